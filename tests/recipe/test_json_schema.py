"""The schemas of editors say of each value what trainspec says of it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from lab.schema_check import find_errors, load_as_editors_do

from trainspec_cli.balance.disturbance import Disturbance
from trainspec_cli.recipe.compose.folders import DISTURB, find_folders
from trainspec_cli.recipe.field_types import AUTO, AutoInt, PositiveInt, Range
from trainspec_cli.recipe.json_schema import SHORT_FORMS, group_schema, plain_schema, recipe_schema, sections_of_group
from trainspec_cli.recipe.keys.kernels import KERNELS, KernelSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build, hints_of, key_of, known_paths
from trainspec_cli.recipe.rules.run import forget_out_of_range
from trainspec_cli.run.folder.event_types.events import event_types
from trainspec_cli.run.folder.file_schemas import FILE_SCHEMAS

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "conf" / "schema"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OPTIONS = sorted((ROOT / "conf").glob("*/*.yaml"))
GROUPS = find_folders(ROOT).groups
WRITE = "type, in the checkout: trainspec schema --write conf/schema"


def fresh(name: str) -> Any:
    """Return the schema of this name as it would be read from its file."""
    if name in FILE_SCHEMAS:
        written = FILE_SCHEMAS[name]()
    elif name == DISTURB:
        written = plain_schema(DISTURB, Disturbance)
    else:
        written = recipe_schema(GROUPS) if name == "recipe" else group_schema(name, GROUPS)
    return json.loads(json.dumps(written))


def test_the_published_files_are_what_the_dataclasses_give() -> None:
    names = ["recipe", *GROUPS, DISTURB, *FILE_SCHEMAS]
    assert sorted(path.stem for path in SCHEMAS.iterdir()) == sorted(names), WRITE
    published = {name: json.loads((SCHEMAS / f"{name}.json").read_text()) for name in names}
    of_event = published["event"]  # types of a wing are known only while its folder is there
    for case in [one for one in of_event["allOf"] if one["if"]["properties"]["type"]["const"] not in event_types()]:
        of_event["allOf"].remove(case)
        of_event["definitions"].pop(case["then"]["$ref"].rpartition("/")[2])
    assert [name for name, schema in published.items() if schema != fresh(name)] == [], WRITE


def test_every_shipped_file_names_its_schema_and_keeps_to_it() -> None:
    """The modeline is the first line, after # @package, which Hydra reads in the first lines alone."""
    for file in (*RECIPES, *OPTIONS):
        text = file.read_text()
        lines = [line for line in text.splitlines() if not line.startswith("# @package")]
        named = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", lines[0])
        assert named, file
        schema = (file.parent / named[1]).resolve()
        assert schema == SCHEMAS / ("recipe.json" if file in RECIPES else f"{file.parent.name}.json")
        assert find_errors(json.loads(schema.read_text()), load_as_editors_do(text)) == [], file


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("defaults: [tiny, {override /model: mine}, _self_]\ndescription: mine\ntrain: {tokens: 1e9}", []),
        ("optim: {lr: '${model.hidden_size}'}\nmodel:\n  num_layers: ???\n  family: decoder\ndata: ${model}", []),
        ("train: {max_steps: 1_000}\nscheduler: {changes: [{step: 500, pp: 2}]}", []),
        ("data: {mixture: {web: {source: jsonl, path: x}}}\ncluster: {slurm: {setup: [module load]}}", []),
        ("optim: {lrr: 1}", ["optim.lrr"]),
        ("optimizer: {lr: 1}", ["optimizer"]),
        ("defaults: [{override /modle: x}]", ["defaults.0.override /modle"]),
        ("defaults: [{override /model: x, override /optim: y}]", ["defaults.0"]),
        ("defaults: [{model: x}]", ["defaults.0.model"]),
        ("model: {num_layer: 3}", ["model.num_layer"]),
        ("model: {family: conv, widths: [0]}", ["model.widths.0"]),
        ("optim: {lr: 0}", ["optim.lr"]),
        ("train: {max_steps: 1.5}", ["train.max_steps"]),
        ("train: {max_steps: '100'}", ["train.max_steps"]),
        ("train: {max_steps: 1e13}", ["train.max_steps"]),
        ("optim: {schedule: {kind: cosin}}", ["optim.schedule.kind"]),
        ("kernels: {attention: flsh}", ["kernels.attention"]),
        ("compile: 1", ["compile"]),
        ("data: {mixture: {web: {source: 1}}}", ["data.mixture.web.source"]),
        ("scheduler: {changes: [{stap: 500}]}", ["scheduler.changes.0.stap"]),
        ("optim:", ["optim"]),
    ],
)
def test_what_an_editor_underlines(text: str, errors: list[str]) -> None:
    assert find_errors(fresh("recipe"), load_as_editors_do(text)) == errors


def test_an_option_may_build_on_others_and_one_of_a_disturbance_may_not() -> None:
    text = "defaults: [h100, {/accelerator@accelerator: mine}, _self_]"
    assert find_errors(fresh("cluster"), yaml.safe_load(text)) == []
    assert find_errors(fresh("cluster"), {"defaults": [{"/chip@x": "mine"}]}) == ["defaults.0./chip@x"]
    assert find_errors(fresh("model"), {"defaults": ["llama_6m"], "num_layers": 3}) == []
    assert find_errors(fresh("disturb"), {"defaults": ["slow_node"], "steps": "${x}"}) == ["defaults", "steps"]


def test_a_group_is_the_section_of_its_name_that_is_nearest_to_the_root() -> None:
    found = {group: [one.__name__ for one in sections_of_group(group)] for group in GROUPS}
    assert (found["optim"], found["slurm"], found["accelerator"]) == (["OptimSpec"], ["SlurmSpec"], ["AcceleratorSpec"])
    assert found["model"] == ["DecoderModel", "HybridModel", "OwnModel", "TransformersModel", "ConvModel"]
    assert [one.__name__ for one in sections_of_group("optim/schedule")] == ["ScheduleSpec"]
    assert sections_of_group("im") == sections_of_group("nothing") == sections_of_group("lr") == []


def keys_at(schema: Any, node: Any, path: str) -> Iterator[Any]:
    """Yield the schemas of a dotted key below `node`."""
    if "$ref" in node:
        yield from keys_at(schema, schema["definitions"][node["$ref"].rpartition("/")[2]], path)
    for alternative in node.get("anyOf", ()):
        yield from keys_at(schema, alternative, path)
    name, _, rest = path.partition(".")
    if name in node.get("properties", ()):
        found = node["properties"][name]
        yield from keys_at(schema, found, rest) if rest else [found]


def test_every_key_of_a_recipe_has_a_description() -> None:
    schema = fresh("recipe")
    for path in dict.fromkeys(known_paths(RunSpec)):
        found = list(keys_at(schema, schema, path))
        assert found, path
        assert all(re.search(r".\n\nUnit: |.\n\nValue: ", one["description"]) for one in found), path
    (stored,) = keys_at(schema, schema, "cluster.storage_gb_per_s")
    assert stored["default"] == 1.2 and "checkpoint storage" in stored["description"]
    unit, value, default = stored["description"].rpartition("\n\n")[2].split(". ")
    assert (unit, value.partition(":")[0], default) == ("Unit: GB/s (decimal)", "Value", "Default: 1.2.")


def sections_below(wanted: Any) -> Iterator[type]:
    """Yield every dataclass that a value of this type may hold, those of lists and of values by name too."""
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        yield wanted
        for one in dataclasses.fields(wanted):
            yield from sections_below(hints_of(wanted)[one.name])
    for inner in getattr(wanted, "__args__", ()):
        yield from sections_below(inner)


@dataclass(frozen=True)
class OddLimits:
    """Limits that no shipped section has."""

    half: Annotated[float, Range(-0.5, 0.5, includes_low=False, includes_high=False)] = 0.0
    many: tuple[PositiveInt, ...] | None = None
    sizes: AutoInt | None = None
    degrees: Literal[7, "half"] = 7
    by_name: dict[str, float] = field(default_factory=dict)
    widths: tuple[PositiveInt, ...] = (1,)
    any_number: float = 0.0


SECTIONS = {
    section.__name__: section for section in (*sections_below(RunSpec), *sections_below(Disturbance), OddLimits)
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 7, -1, 0.5, -0.5, 0.25, 1.0, 1.5, 2.0, 1001, 70_000, 1_000_000, 1e9, 10**9 + 1, 1e12),
    *(10**15, 1e16, -1e16, 1e30, 1.1e30, -1e31, "", "auto", "none", "bf16", "nonsense", "1", "all"),
    *([], [1], [0], [1, 1.5], ["a"], [None], ["shares"], [1] * 1001, [[]], {}, {"a": 1}, {"a": "b"}, {"a": None}),
]


def is_taken(section: type, key: str, value: Any) -> bool:
    """Return whether trainspec takes a value by itself; other missing keys do not count."""
    draft, problems = build(section, {key: value})
    _, out_of_range = forget_out_of_range(draft)
    return not [one for one in (*problems, *out_of_range) if one.path.startswith(key) and one.code != "missing_value"]


@pytest.mark.clause("REC-5")
@pytest.mark.parametrize("name", SECTIONS)
def test_the_schema_takes_the_values_that_trainspec_takes(name: str) -> None:
    """Each of many values for each key, also those of lists and sections."""
    section = SECTIONS[name]
    schema = json.loads(json.dumps(plain_schema(name, section)))
    for one in dataclasses.fields(section):
        if section is KernelSpec:
            continue  # its words are known to a rule; see below
        for value in VALUES:
            key = key_of(one)
            if (key, value) == ("family", AUTO):
                continue  # it stands for the checkpoint's before the recipe is built
            is_share = one.name == "warmup_steps" and isinstance(value, float) and 0 < value < 1
            if (isinstance(value, str) or is_share) and (section, one.name) in SHORT_FORMS:
                continue  # a name or a share, which is written out before the recipe is built
            taken = is_taken(section, key, value)
            assert (find_errors(schema, {key: value}) == []) is taken, f"{name}.{key} = {value!r}"


def test_the_kernels_of_an_operation_are_those_that_it_has() -> None:
    schema = fresh("kernels")
    for op, backends in KERNELS.items():
        assert find_errors(schema, {op: "auto"}) == find_errors(schema, {op: next(iter(backends))}) == []
        assert find_errors(schema, {op: "nonsense"}) == [op]
