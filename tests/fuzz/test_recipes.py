"""Recipes and command lines of strangers, through `validate`, `show` and `plan`."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from fuzz.conftest import STRANGE, damaged_bytes, ends, tell
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.drawing import slow_after

from trainspec_cli.recipe.compose.values import parse_arguments
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import known_paths

RECIPE = """\
defaults:
  - override /model: llama_6m
  - override /data: text
  - _self_
description: somebody's
data: {path: mine.txt, seq_len: 64}
optim: {lr: 1e-3}
batching: {global_batch_size: 8}
train: {max_steps: 20}
"""

DEEP = "x: " + "[" * 3000 + "]" * 3000
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
DOUBLING = "t0: xxxxxxxx\n" + "".join(f"t{n}: ${{t{n - 1}}}${{t{n - 1}}}\n" for n in range(1, 60))
SECTIONS = "s0: {a: 1, b: 2}\n" + "".join(f"s{n}: {{a: '${{s{n - 1}}}', b: '${{s{n - 1}}}'}}\n" for n in range(1, 60))
HOSTILE = {
    "deep": (DEEP, "levels deep"),
    "deep in blocks": ("".join(f"{' ' * n}a:\n" for n in range(400)), "levels deep"),
    "billion laughs": (LAUGHS, "its aliases are expanded"),
    "holds itself": ("x: &a [*a]", "it contains itself"),
    "holds itself in a mapping": ("x: &a {y: *a}", "it contains itself"),
    "texts that double": (DOUBLING, "a text of more than"),
    "sections that double": (SECTIONS, "more than"),
    "a section that holds itself": ("a: {b: '${a}'}", "Recursive interpolation"),
    "time": ("description: ${now:%Y}", "no resolver `now`"),
    "environment": ("description: ${oc.env:HOME}", "no resolver `oc.env`"),
    "decode": ("description: ${oc.decode:'[1, 2]'}", "no resolver `oc.decode`"),
    "hydra": ("description: ${hydra:runtime.cwd}", "no resolver `hydra`"),
    "nested references": ("description: " + "${" * 200 + "a" + "}" * 200, "error"),
    "a long reference": (f"description: ${{{'a' * 3000}}}", "characters"),
    "a huge number": (f"train: {{max_steps: {'9' * 5000}}}", "digits"),
    "bytes": ("\xff\xfe\x00", "UTF-8"),
    "a control character": ("description: a\x07b", "special characters"),
    "a tag": ("x: !!python/object/apply:os.system [ls]", "error"),
    "a binary": ("description: !!binary gIGC", "error"),
    "a date": ("train: {max_steps: 2026-01-01}", "expected "),
    "a set": ("train: !!set {a, b}", "error"),
    "merge keys": ("train: {<<: {max_steps: 3}}", ""),
    "many merges": ("a: &a {x: 1}\nb: {<<: [" + ", ".join(["*a"] * 20000) + "]}", ""),
    "keys that are no words": ("1: 2\nnull: 3\ntrue: 4", "error"),
    "a list": ("[1, 2]", "`key: value`"),
    "a text": ("hello", "`key: value`"),
    "two documents": ("a: 1\n---\nb: 2", "error"),
    "nothing": ("", "error"),
    "a NUL in a path": ('data: {path: "a\\0b"}', "error"),
    "half a surrogate": ('data: {path: "a\\ud800b"}', "error"),
    "a long name": (f"data: {{path: {'x' * 3000}}}", "error"),
    "a strange home": ("data: {path: ~nobody-at-all/x}", "error"),
    "a device": ("data: {path: /dev/zero}", "error"),
    "defaults of a device": ("defaults: [/dev/zero]", "error"),
    "defaults in a circle": ("defaults: [hostile]", ""),
    "defaults that are no list": ("defaults: {a: b}", ""),
    "defaults of references": ("defaults: ['${now:%Y}', {override /model: '${a}'}]", "error"),
    "hydra's own section": ("hydra: {run: {dir: /tmp/x}}", "error"),
}
"""Kind -> (a recipe's text, words of the error)."""


def write_hostile(project: Path, text: str) -> None:
    (project / "recipes").mkdir(exist_ok=True)
    (project / "recipes/hostile.yaml").write_bytes(text.encode("latin-1", errors="surrogateescape"))
    (project / "mine.txt").write_text("to be or not to be\n" * 50)


@pytest.mark.clause("REC-6")
@pytest.mark.parametrize("kind", slow_after(4, HOSTILE))
def test_hostile_recipes(project: Path, kind: str) -> None:
    text, words = HOSTILE[kind]
    write_hostile(project, text)
    code, said = tell("validate", "recipe=hostile")
    assert code == 2 and words in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_recipes_by_other_commands(project: Path, kind: str) -> None:
    """Whole by themselves, and with values that make the rest of the recipe right."""
    text, _ = HOSTILE[kind]
    write_hostile(project, text)
    assert tell("show", "recipe=hostile", "--json")[0] == 2
    if "defaults:" not in text and text.startswith(tuple("abcdefghijklmnopqrstuvwxyz")):
        write_hostile(project, f"defaults: [tiny]\n{text}")
        tell("validate", "recipe=hostile")
        tell("show", "recipe=hostile")


@pytest.mark.parametrize("count", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_recipes_with_damaged_bytes(project: Path, count: int) -> None:
    for damaged in damaged_bytes(RECIPE.encode(), count):
        write_hostile(project, "")
        (project / "recipes/hostile.yaml").write_bytes(damaged)
        tell("validate", "recipe=hostile")


PATHS = sorted(set(known_paths(RunSpec)))
NUMBERS = ("1e18", "-1", "0", "1e308", "9" * 5000, "-1e18", "0.5", "9223372036854775807", "nan", "inf", "100000000")


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_values_of_any_size(project: Path, count: int) -> None:
    """Two keys at a time, so that one key's rule meets the other's strange value."""
    chance = random.Random(2)
    for _ in range(count):
        changes = [f"{chance.choice(PATHS)}={chance.choice(NUMBERS)}" for _ in range(2)]
        base = chance.choice(["tiny", "tiny_chat", "quickstart"])
        tell(chance.choice(["validate", "validate", "plan"]), f"recipe={base}", *changes)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith(("model.", "layout.", "cluster.num"))])
def test_a_large_size_is_refused_or_reckoned_with(project: Path, path: str) -> None:
    code, said = tell("plan", "recipe=tiny", f"{path}=1e18")
    assert code in (0, 2, 3), said


def test_more_layers_than_any_model_has(project: Path) -> None:
    code, said = tell("validate", "recipe=tiny", "model.num_layers=1e18")
    assert code == 2 and "command line:2" in said and "`model.num_layers`" in said and " 1000000000000000000; " in said


NAMES = ("", ".", "/", "..", "../x", "/etc/passwd", "x" * 300, "x" * 5000, "~", "~nobody-at-all/x.yaml", "a/../tiny", "tiny.yaml", "\ud800", ".yaml", "${a}", "[", "a\nb")  # fmt: skip # noqa: E501


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (turn % 2)) for turn, name in enumerate(NAMES)])  # fmt: skip # noqa: E501
def test_names_of_recipes(project: Path, name: str) -> None:
    assert tell("validate", f"recipe={name}")[0] == 2


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (turn % 4 > 0)) for turn, name in enumerate(NAMES)])  # fmt: skip # noqa: E501
def test_names_of_options(project: Path, name: str) -> None:
    assert tell("show", f"recipe={name}")[0] == 2
    assert tell("validate", "recipe=tiny", f"model={name}")[0] == 2
    assert tell("show", "recipe=tiny", "--diff", name)[0] == 2


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_something_else_in_the_place_of_a_recipe(project: Path, kind: str) -> None:
    write_hostile(project, "")
    path = project / "recipes/hostile.yaml"
    path.unlink()
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    for name in ("hostile", "recipes/hostile.yaml"):
        assert tell("validate", f"recipe={name}")[0] == 2
    tell("list", "recipe")


def test_conf_of_a_stranger(project: Path) -> None:
    (project / "conf/model").mkdir(parents=True)
    for text, _ in list(HOSTILE.values())[::8]:
        (project / "conf/model/mine.yaml").write_bytes(text.encode("latin-1", errors="surrogateescape"))
        assert tell("validate", "recipe=tiny", "model=mine")[0] == 2


@pytest.mark.slow
def test_composed_yaml_of_a_stranger(project: Path) -> None:
    for turn, (text, _) in enumerate(list(HOSTILE.values())[::8]):
        (project / "composed.yaml").write_bytes(text.encode("latin-1", errors="surrogateescape"))
        tell("show", "recipe=tiny", "--diff", "composed.yaml", *["--json"][: turn % 2])


@pytest.mark.slow
@pytest.mark.parametrize("examples", [150])
def test_any_text_on_the_command_line(examples: int) -> None:
    words = st.sampled_from(
        [*PATHS, "recipe", "model", "+a", "~train", "hydra.run", "a.b.c", "fault", *"[]{}()$'\",:=\\"]
    )
    values = st.one_of(st.text(max_size=40), words, st.integers().map(str), st.sampled_from(["${", "range(1,1e9)", "glob(*)", "[" * 5000, "{a:" * 1000, "int(" * 500, "'" * 9, "1e999", "0x" + "f" * 9999, "sort(1,2)", "extend_list(1)", "cast(a)"]))  # fmt: skip # noqa: E501

    @settings(max_examples=examples)
    @given(st.lists(st.tuples(words, values), max_size=3))
    def parse(pairs: list[tuple[str, str]]) -> None:
        with ends():
            parse_arguments([f"{key}={value}" for key, value in pairs])

    parse()


@pytest.mark.parametrize("value", slow_after(1, ["[" * 5000, "{a:" * 1000, "int(" * 500, "0x" + "f" * 9999, "range(1,10)", "a" * 100_000, "[" + "1," * 60_000 + "]", "${now:%Y}", "${" * 50, "\\" * 100, "\ud800"]))  # fmt: skip # noqa: E501
def test_values_on_the_command_line(project: Path, value: str) -> None:
    tell("validate", "recipe=tiny", f"data.path={value}")
    tell("show", "recipe=tiny", f"model={value}", "--json")


def test_strange_values_in_a_recipe(project: Path) -> None:
    """JSON is YAML: each key of a recipe gets each strange value."""
    chance = random.Random(3)
    for path in chance.sample(PATHS, 10):
        value = chance.choice(STRANGE)
        *above, key = path.split(".")
        content: object = {key: value}
        for section in reversed(above):
            content = {section: content}
        write_hostile(project, f"defaults: [tiny]\n{json.dumps(content)[1:-1]}")
        tell("validate", "recipe=hostile")
