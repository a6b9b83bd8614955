from __future__ import annotations

from pathlib import Path

import pytest
from lab.problems import assert_problems

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.compose import Completion, Composed, amend, compose, compose_arguments

ROOT = Path(__file__).parents[3]
RECIPES = ", ".join(sorted(path.stem for path in ROOT.joinpath("recipes").glob("*.yaml")))

RECIPE = "batching: {global_batch_size: 8}\ntrain:\n  max_steps: 5\n"


@pytest.mark.clause("REC-1")
def test_a_shipped_recipe_with_the_origin_of_every_value(tmp_path: Path) -> None:
    composed = compose("tiny", ["optim.lr=0.5", "optim=sgd"], tmp_path)
    assert composed.problems == ()
    assert (composed.data["optim"]["name"], composed.data["optim"]["lr"]) == ("sgd", 0.5)
    assert str(composed.origins["optim.lr"]) == "command line:2"
    assert composed.origins["optim.name"].file.endswith("conf/optim/sgd.yaml")
    assert composed.origins["train.max_steps"].file.endswith("recipes/tiny.yaml")
    assert composed.origins["train.seed"].file.endswith("conf/trainspec.yaml")


@pytest.mark.clause("REC-1")
def test_origins_point_at_the_line_that_says_it(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", RECIPE)
    composed = compose("mine", [], tmp_path)
    for path, origin in composed.origins.items():
        line = (tmp_path / origin.file).read_text().splitlines()[origin.line - 1]
        key = path.rpartition(".")[2]
        is_section = any(other.startswith(f"{path}.") for other in composed.origins)
        assert line[origin.column - 1 :].startswith(key) or is_section


def test_interpolations_are_resolved(tmp_path: Path) -> None:
    composed = compose("tiny", ["model.vocab_size=700", "train.seed=${model.num_layers}"], tmp_path)
    assert composed.data["data"]["tokenizer"]["vocab_size"] == 700
    assert composed.data["train"]["seed"] == 2


def test_the_users_own_come_first(tmp_path: Path, write) -> None:
    write("recipes/tiny.yaml", f"defaults: [override /model: llama_tiny]\n{RECIPE}")
    write("conf/model/llama_tiny.yaml", "name: my_own\nvocab_size: 300\n")
    composed = compose("tiny", [], tmp_path)
    assert composed.problems == ()
    assert (composed.data["model"], composed.data["train"]["max_steps"]) == ({"name": "my_own", "vocab_size": 300}, 5)
    assert str(composed.origins["model.name"]) == "conf/model/llama_tiny.yaml:1"
    assert str(composed.origins["train.max_steps"]) == "recipes/tiny.yaml:4"


def test_another_hydra_program_in_the_folder_does_no_harm(tmp_path: Path, write) -> None:
    write("conf/config.yaml", "defaults: [nothing]\nfoo: 1\n")
    write("conf/hydra/default.yaml", "nonsense: 1\n")
    composed = compose("tiny", [], tmp_path)
    assert composed.problems == ()
    assert "foo" not in composed.data


def test_a_recipe_by_its_path(tmp_path: Path, write) -> None:
    write("else where/my own.yaml", RECIPE)
    write("else where/tiny.yaml", RECIPE)
    composed = compose("else where/my own.yaml", [], tmp_path)
    assert (composed.problems, composed.recipe, composed.data["train"]["max_steps"]) == ((), "my own", 5)
    assert compose("tiny", [], tmp_path).data["train"]["max_steps"] == 20
    assert compose("else where/tiny.yaml", [], tmp_path).data["train"]["max_steps"] == 5, "not the shipped one"


@pytest.mark.clause("REC-2")
def test_a_recipe_in_a_folder_and_one_built_on_another(tmp_path: Path, write) -> None:
    write("recipes/team/base.yaml", RECIPE)
    write("recipes/child.yaml", "defaults: [team/base, _self_]\ntrain: {seed: 7}\n")
    composed = compose("child", [], tmp_path)
    assert composed.problems == ()
    assert (composed.data["train"]["seed"], composed.data["train"]["max_steps"]) == (7, 5)
    assert str(composed.origins["train.max_steps"]) == "recipes/team/base.yaml:3"


@pytest.mark.clause("REC-2")
def test_the_command_line_outranks_a_recipes_choice(tmp_path: Path) -> None:
    assert compose("tiny", ["model=llama_6m"], tmp_path).data["model"]["name"] == "llama_6m"


def test_open_values_stay_open(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", "train: {seed: 1}\n")
    assert compose("mine", [], tmp_path).data["train"]["max_steps"] == "???"


def test_keys_that_no_file_has_are_left_for_others_to_judge(tmp_path: Path) -> None:
    composed = compose("tiny", ["optim.lrr=1", "+new.key=2"], tmp_path)
    assert (composed.problems, composed.data["optim"]["lrr"], composed.data["new"]) == ((), 1, {"key": 2})


def test_taking_a_key_out(tmp_path: Path) -> None:
    composed = compose("tiny", ["~optim.schedule"], tmp_path)
    assert "schedule" not in composed.data["optim"]
    assert str(composed.origins["optim.schedule"]) == "command line:2"
    problems = compose("tiny", ["~optim.schedul"], tmp_path).problems
    assert_problems(problems, ("unknown_key", "command line:2", "`optim.schedul`", "`optim.schedule`"))


def test_a_key_below_a_single_value(tmp_path: Path) -> None:
    problems = compose("tiny", ["compile.foo=3"], tmp_path).problems
    assert_problems(problems, ("unknown_key", "command line:2", "`compile`", "`foo`", "compile=<value>"))


def test_unknown_recipe(tmp_path: Path, write) -> None:
    write("recipes/old.yml", RECIPE)

    def assert_told(recipe: str, *parts: str) -> None:
        problems = compose(recipe, [], tmp_path).problems
        assert_problems(problems, ("unknown_recipe", "command line:1", f"`{recipe}`", *parts))

    assert_told("quickstrat", "recipe=quickstart?", "`trainspec list recipe`")
    assert_told("zzzz", RECIPES, "a .yaml file")
    assert_told("old", ".yaml, not .yml")
    assert_told("x/y.yaml", str(tmp_path))
    write("beside.yml", RECIPE)
    for name in ("beside", "beside.yaml", "beside.yml"):
        assert_told(name, ".yaml, not .yml")


def test_no_recipe(tmp_path: Path) -> None:
    hints = ("recipe=quickstart", "`trainspec list recipe`")
    assert_problems(compose_arguments([], tmp_path).problems, ("missing_value", "", *hints))
    assert_problems(compose("", [], tmp_path).problems, ("missing_value", "command line:1", *hints))


@pytest.mark.parametrize(("word", "meant"), [("tiny", "tiny"), ("tniy", "tiny"), ("zzzz", "zzzz")])
def test_a_word_alone_is_one_mistake(tmp_path: Path, word: str, meant: str) -> None:
    problems = compose_arguments([word], tmp_path).problems
    assert_problems(problems, ("bad_override", "command line:1", f"recipe={meant}"))


def test_unknown_option_on_the_command_line_and_in_a_recipe(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", f"defaults:\n  - override /optim: adam\n{RECIPE}")
    composed = compose("mine", ["model=llama6m"], tmp_path)
    assert_problems(
        sorted(composed.problems, key=lambda problem: problem.where(), reverse=True),
        ("unknown_option", "recipes/mine.yaml:2:5", "`optim`", "`adam`", "`adamw`", "`trainspec list optim`"),
        ("unknown_option", "command line:2", "`llama6m`", "model=llama_6m?", "`trainspec list model`"),
    )
    assert composed.failed == {"optim", "model"}
    assert composed.data["train"]["max_steps"] == 5


def test_an_option_that_is_gone_is_refused_with_what_takes_its_place(tmp_path: Path) -> None:
    composed = compose("tiny", ["comm=low_rank"], tmp_path)
    assert_problems(composed.problems, ("unknown_option", "command line:2", "low_rank", "comm=int8"))
    assert composed.failed == {"comm"}


def test_every_wrong_line_of_a_defaults_list(tmp_path: Path, write) -> None:
    write(
        "recipes/mine.yaml",
        """\
        defaults:
          - override /modle: llama_6m
          - optim: sgd
          - override data: text
          - quickstrat
          - override /layout: ddp
        train: {max_steps: 5}
        """,
    )
    composed = compose("mine", [], tmp_path)
    assert_problems(
        composed.problems,
        ("unknown_group", "recipes/mine.yaml:2:5", "`modle`", "`override /model`"),
        ("bad_defaults", "recipes/mine.yaml:3:5", "`optim: sgd`", "- override /optim: sgd"),
        ("bad_defaults", "recipes/mine.yaml:4:5", "`override data: text`", "- override /data: text"),
        ("unknown_recipe", "recipes/mine.yaml:5:5", "`quickstrat`", "`quickstart`"),
    )
    assert (composed.data["layout"]["dp_shard"], composed.data["train"]["max_steps"]) == (1, 5)


def test_several_options_in_one_line_of_a_defaults_list_are_not_merged(tmp_path: Path, write) -> None:
    write("conf/cluster/both.yaml", "defaults:\n  - /accelerator@accelerator: [h100_sxm, a40]\nname: both\n")
    assert_problems(
        compose("tiny", ["cluster=both"], tmp_path).problems,
        (
            "bad_defaults",
            "conf/cluster/both.yaml:2:5",
            "`accelerator@accelerator`",
            "2 options",
            "h100_sxm, a40",
            "/accelerator@accelerator: h100_sxm",
        ),
    )
    write("conf/cluster/one.yaml", "defaults:\n  - /accelerator@accelerator: [a40]\nname: one\n")
    one = compose("tiny", ["cluster=one"], tmp_path)
    assert (one.problems, one.data["cluster"]["accelerator"]["name"]) == ((), "A40")


def test_what_a_named_section_lacks_is_missing_in_its_file(tmp_path: Path, write) -> None:
    write("conf/accelerator/mine.yaml", "name: mine\nmemory_gib: 80\n")
    composed = compose("tiny", ["cluster=h100", "cluster.accelerator=mine"], tmp_path)
    (problem,) = composed.locate([Problem("missing_value", "", "cluster.accelerator.link_gb_per_s")])
    assert (problem.file, problem.line) == ("conf/accelerator/mine.yaml", 1)


def test_a_list_for_a_section_is_refused(tmp_path: Path) -> None:
    problems = compose("tiny", ["cluster=h100", "cluster.accelerator=[h100_sxm,a40]"], tmp_path).problems
    assert_problems(problems, ("wrong_type", "cluster.accelerator", "name of an option"))


def test_an_option_that_a_defaults_list_chooses_twice(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", "defaults:\n  - tiny\n  - override /cluster: h100\n  - override /cluster: h200\n")
    write(
        "conf/cluster/both.yaml",
        "defaults:\n  - /accelerator@accelerator: h100_sxm\n  - /accelerator@accelerator: h200_sxm\nname: both\n",
    )
    assert_problems(
        compose("mine", [], tmp_path).problems,
        ("bad_defaults", "recipes/mine.yaml:4:5", "`cluster`", "h100 in line 3", "h200"),
    )
    assert_problems(
        compose("tiny", ["cluster=both"], tmp_path).problems,
        ("bad_defaults", "conf/cluster/both.yaml:3:5", "`accelerator@accelerator`", "h100_sxm in line 2", "h200_sxm"),
    )
    write("recipes/child.yaml", "defaults: [base, override /cluster: h200]\n")
    write("recipes/base.yaml", "defaults: [tiny, override /cluster: h100]\n")
    assert compose("child", [], tmp_path).problems == ()


def test_a_broken_recipe_does_not_hide_faults_of_the_command_line(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", "train: [1\n")
    composed = compose("mine", ["optim.lr:3", "data=jsnl"], tmp_path)
    assert [(problem.code, problem.where()) for problem in composed.problems] == [
        ("bad_override", "command line:2"),
        ("bad_yaml", "recipes/mine.yaml:1:8"),
        ("unknown_option", "command line:3"),
    ]
    assert composed.failed == {"recipe", "data"}


def test_faults_inside_a_users_own_groups(tmp_path: Path, write) -> None:
    write("conf/model/broken.yaml", "a: [1\n")
    write("conf/model/orphan.yaml", "defaults: [llama_6]\na: 1\n")
    write("conf/model/lost.yaml", "defaults:\n  - /nowhere: x\na: 1\n")
    write("conf/model/nowhere.yaml", "defaults:\n  - /optim: sgd\na: 1\n")
    write("conf/model/round.yaml", "defaults: [about]\n")
    write("conf/model/about.yaml", "defaults: [round]\n")

    for option, code, where, *parts in (
        ("broken", "bad_yaml", "conf/model/broken.yaml:1:4"),
        ("orphan", "unknown_option", "conf/model/orphan.yaml:1:12", "`model`", "`llama_6`"),
        ("lost", "unknown_group", "conf/model/lost.yaml:2:5", "`nowhere`"),
        ("nowhere", "bad_defaults", "conf/model/nowhere.yaml:2:5"),
        ("round", "bad_defaults", "conf/model/about.yaml:1:12", "`round`", "itself"),
    ):
        assert_problems(compose("tiny", [f"model={option}"], tmp_path).problems, (code, where, *parts))


def test_recipes_that_build_on_one_another_in_a_circle(tmp_path: Path, write) -> None:
    write("recipes/one.yaml", f"defaults: [two]\n{RECIPE}")
    write("recipes/two.yaml", "defaults:\n  - one\n  - override /optim: sgd\n")
    composed = compose("one", [], tmp_path)
    assert_problems(composed.problems, ("bad_defaults", "recipes/two.yaml:2:5"))
    assert (composed.data["optim"]["name"], composed.data["train"]["max_steps"]) == ("sgd", 5)


@pytest.mark.clause("REC-2")
def test_of_two_recipes_to_build_on_the_later_one_counts_and_the_own_choice_most(tmp_path: Path, write) -> None:
    write("recipes/one.yaml", "defaults:\n  - override /optim: sgd\n  - override /model: moe_tiny\ntrain: {seed: 1}\n")
    write("recipes/two.yaml", "defaults:\n  - override /optim: muon\n  - override /model: llama_6m\ntrain: {seed: 2}\n")
    write("recipes/both.yaml", "defaults:\n  - override /model: llama_tiny\n  - one\n  - two\n")
    composed = compose("both", [], tmp_path)
    found = [composed.data["optim"]["name"], composed.data["model"]["name"], composed.data["train"]["seed"]]
    assert (composed.problems, found) == ((), ["muon", "llama_tiny", 2])


def test_an_accelerator_that_a_cluster_chooses_leaves_nothing_of_another(tmp_path: Path, write) -> None:
    write("conf/accelerator/mine.yaml", "name: mine\nmemory_gb: 80\n")
    write("conf/cluster/mine.yaml", "defaults:\n  - h100\n  - /accelerator@accelerator: mine\nname: x\n")
    cluster = compose("tiny", ["cluster=mine"], tmp_path).data["cluster"]
    assert (cluster["accelerator"], cluster["nic_gbit_per_s"]) == ({"name": "mine", "memory_gb": 80}, 400)


def test_a_section_that_is_left_open_takes_keys(tmp_path: Path) -> None:
    arguments = ["data=mixture", "data.mixture.web.source=jsonl", "data.mixture.web.path=x"]
    composed = compose("tiny", arguments, tmp_path)
    assert (composed.problems, composed.data["data"]["mixture"]) == ((), {"web": {"source": "jsonl", "path": "x"}})


def test_interpolations_that_lead_nowhere(tmp_path: Path) -> None:
    composed = compose("tiny", ["train.seed=${train.max_step}", "optim.lr=${optim.lr}"], tmp_path)
    assert_problems(
        composed.problems,
        ("bad_interpolation", "command line:3", "`optim.lr`", "${optim.lr}", "Recursive"),
        ("bad_interpolation", "command line:2", "`train.seed`", "${train.max_step}", "`train.max_steps`"),
    )
    assert composed.data["train"]["seed"] == "???"


def test_problems_carry_the_text_they_stand_in(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", f"defaults:\n  - override /optim: adam\n{RECIPE}")
    excerpts = {problem.excerpt for problem in compose("mine", ["model=x"], tmp_path).problems}
    assert excerpts == {"  - override /optim: adam", "model=x"}


def test_what_is_beside_a_recipes_name_does_no_harm(tmp_path: Path, write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has a folder `tiny`; the working directory is the default."""
    write("tiny", "not a recipe")
    write("recipes/mine.yaml", RECIPE)
    assert compose("tiny", [], tmp_path).data["model"]["name"]
    monkeypatch.chdir(tmp_path)
    assert compose_arguments(["recipe=mine"]).data["train"]["max_steps"] == 5
    assert compose_arguments(["recipe=mine"]).cwd == tmp_path.resolve()


def test_a_disturbance_is_no_key_of_a_run(tmp_path: Path) -> None:
    composed = compose_arguments(["recipe=tiny", "disturb=slow_node", "train.seed=3"], tmp_path)
    assert [(problem.code, problem.path, problem.line) for problem in composed.problems] == [
        ("unknown_key", "disturb", 2)
    ]
    assert composed.data["train"]["seed"] == 3 and "disturb" not in composed.data
    aside = compose_arguments(["recipe=tiny", "disturb=slow_node"], tmp_path, aside=("disturb",))
    assert aside.problems == () and "disturb" not in aside.data


def test_values_of_another_programs_file_are_plain_text(tmp_path: Path) -> None:
    given = {"model": {"name": "${x}", "tags": ["a${y}", "b\\${z}"], "num_layers": 3}}

    def complete(data: dict, unchosen: frozenset) -> Completion:
        return Completion(given, "/a/config.json")

    composed = compose_arguments(["recipe=tiny"], tmp_path, [complete])
    assert composed.problems == ()
    assert {key: composed.data["model"][key] for key in given["model"]} == given["model"]
    assert str(composed.origins["model.num_layers"]) == "/a/config.json:1"


def test_what_failed_is_known_by_its_group(tmp_path: Path) -> None:
    assert compose("tiny", [], tmp_path).failed == frozenset()
    assert "recipe" in compose_arguments(["recipe=nothing"], tmp_path).failed
    assert compose("tiny", ["optim=nothing"], tmp_path).failed == {"optim"}


def test_an_accelerator_is_chosen_by_its_name_whole(tmp_path: Path, write) -> None:
    """Nothing of the cluster's own accelerator is left, and keys next to the name count, in any order."""
    write("conf/accelerator/mine.yaml", "name: My chip\nvendor: me\nbf16_tflops: 100\n")
    named = ["cluster.accelerator.tdp_w=400", "cluster.accelerator=mine"]
    composed = compose("llama3_8b", ["cluster=h100", *named], tmp_path)
    assert composed.data["cluster"]["accelerator"] == {
        "name": "My chip", "vendor": "me", "bf16_tflops": 100, "tdp_w": 400
    }  # fmt: skip
    assert composed.data["cluster"]["nic_gbit_per_s"] == 400
    assert str(composed.origins["cluster.accelerator.bf16_tflops"]) == "conf/accelerator/mine.yaml:3"
    assert composed.origins["cluster.accelerator.tdp_w"].file == "command line"
    assert_problems(
        compose("llama3_8b", ["cluster.accelerator=min"], tmp_path).problems,
        ("unknown_option", "command line:2", "cluster.accelerator=mine?", "`trainspec list accelerator`"),
    )
    assert compose("llama3_8b", ["cluster.accelerator=null"], tmp_path).data["cluster"]["accelerator"] is None


def test_a_problem_of_a_chosen_section_is_located_at_the_choice(tmp_path: Path, write) -> None:
    """The remedy is another choice; a key that is missing below it is missing in its file."""
    write("recipes/mine.yaml", "defaults: [tiny, override /framework: megatron, _self_]\n")

    def place(arguments: list[str], path: str) -> str:
        composed = compose("mine", arguments, tmp_path)
        (problem,) = composed.locate([Problem("contradiction", "", path)])
        return problem.where()

    assert place(["train.seed=1", "cluster.accelerator=rtx_4090"], "cluster.accelerator") == "command line:3"
    assert place(["cluster=h100"], "cluster.accelerator") == "command line:2"
    assert place(["cluster=h100"], "cluster") == "command line:2"
    assert place([], "framework") == "recipes/mine.yaml:1:18"
    assert place(["framework=torchtitan"], "framework") == "command line:2"
    chosen_by_default = place([], "optim.schedule")
    assert chosen_by_default.split(":")[0].endswith("conf/optim/adamw.yaml")


@pytest.mark.parametrize("argument", ["accelerator=rtx_4090", "+accelerator=rtx_4090"])
def test_a_group_that_no_recipe_chooses_from_leads_to_its_section(argument: str, tmp_path: Path) -> None:
    problems = compose("llama3_8b", [argument], tmp_path).problems
    assert_problems(problems, ("unknown_group", "command line:2", "cluster.accelerator=rtx_4090"))


def test_a_recipe_cannot_override_an_accelerator_by_its_defaults(tmp_path: Path, write) -> None:
    write("recipes/mine.yaml", "defaults:\n  - tiny\n  - override /accelerator: rtx_4090\n")
    (problem,) = compose("mine", [], tmp_path).problems
    assert (problem.code, problem.where()) == ("unknown_group", "recipes/mine.yaml:3:5")
    assert "cluster.accelerator=rtx_4090" in problem.hint


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cluster=16xl4", "cluster.accelerator=l4 cluster.devices_per_node=16"),
        ("cluster=h100x8", "cluster=h100 cluster.devices_per_node=8"),
        ("cluster=8xh100", "cluster=h100 cluster.devices_per_node=8"),
        ("cluster=l4", "cluster.accelerator=l4"),
        ("cluster=4x4090", "cluster=rtx_4090_x4"),
        ("cluster=4xrtx_4090", "cluster=rtx_4090_x4"),
        ("cluster=rtx4090x2", "cluster=rtx_4090_x2"),
        ("cluster=rtx_4090", "cluster.accelerator=rtx_4090"),
        ("cluster=rtx4090", "cluster.accelerator=rtx_4090"),
        ("cluster=rtx_4090_x3", "cluster.accelerator=rtx_4090 cluster.devices_per_node=3"),
        ("cluster=a100_40", "cluster=a100_40gb"),
        ("cluster.accelerator=4090", "cluster.accelerator=rtx_4090"),
    ],
)
def test_a_number_of_chips_and_the_number_of_a_chip_lead_to_names(typed: str, meant: str, tmp_path: Path) -> None:
    (problem,) = compose("llama3_8b", [typed], tmp_path).problems
    assert f" {meant}? `trainspec list " in problem.hint


def test_a_broken_file_of_a_named_section_is_told(tmp_path: Path, write) -> None:
    write("conf/accelerator/mine.yaml", "name: [1\n")
    (problem,) = compose("llama3_8b", ["cluster.accelerator=mine"], tmp_path).problems
    assert (problem.code, problem.where()) == ("bad_yaml", "conf/accelerator/mine.yaml:1:7")


@pytest.mark.clause("VER-2")
def test_a_recipe_may_state_its_version_which_is_no_value(tmp_path: Path, write) -> None:
    write("recipes/older.yaml", "defaults: [tiny, _self_]\ntrain: {seed: 7}\n")
    write("recipes/mine.yaml", 'spec_version: "1.0"\ndefaults: [older, _self_]\noptim: {lr: 0.5}\n')
    composed = compose("mine", cwd=tmp_path)
    assert composed.problems == () and "spec_version" not in {*composed.data, *composed.origins}
    assert (composed.data["train"]["seed"], composed.data["optim"]["lr"]) == (7, 0.5)


def test_a_command_line_has_no_version(tmp_path: Path) -> None:
    composed = compose_arguments(["recipe=tiny", "spec_version=1.0", "train.seed=3"], tmp_path)
    (problem,) = composed.problems
    assert (problem.path, problem.line) == ("spec_version", 2) and "trainspec migrate" in problem.hint
    assert "spec_version" not in composed.data and composed.data["train"]["seed"] == 3


@pytest.mark.clause("VER-4", "VER-5")
@pytest.mark.parametrize(
    ("stated", "code", "version"),
    [
        ('"1.2"', "newer_version", "version 1.2"),
        ('"0.3"', "unknown_version", "'0.3'"),
        ("1.0", "unknown_version", "1.0"),
    ],
)
def test_a_recipe_of_another_version_is_refused_with_its_line(tmp_path: Path, write, stated, code, version) -> None:
    """Also if another recipe builds on it. Its other keys are not judged: they may be right in that version."""
    write("recipes/old.yaml", f"description: old\nspec_version: {stated}\nnew_section: {{}}\ndefaults: [gone]\n")
    write("recipes/mine.yaml", "defaults: [old, _self_]\n")
    for name in ("old", "mine"):
        problems = compose(name, cwd=tmp_path).problems
        assert_problems(problems, (code, "recipes/old.yaml:2:1", "recipes/old.yaml", version))
        assert problems[0].hint


# Which of several keys that take one another's place stays.


GRANDPARENT = "train: {max_steps: 5}"
PARENT = "defaults: [old]\ntrain: {tokens: 6}"
CHILD = "defaults: [middle]\ntrain: {epochs: 7}"


@pytest.mark.clause("REC-2")
@pytest.mark.parametrize(
    ("recipe", "arguments", "kept"),
    [
        ("old", [], {"max_steps": 5}),
        ("middle", [], {"tokens": 6}),
        ("young", [], {"epochs": 7}),
        ("young", ["train.max_steps=8"], {"max_steps": 8}),
        ("young", ["~train.epochs"], {"tokens": 6}),
        ("middle", ["train.tokens=null"], {"max_steps": 5}),
        ("old", ["train.tokens=8", "train.epochs=9"], {"tokens": 8, "epochs": 9}),
    ],
)
def test_what_is_given_last_takes_the_place_of_the_others(
    write, tmp_path: Path, recipe: str, arguments: list[str], kept: dict[str, int]
) -> None:
    for name, text in (("old", GRANDPARENT), ("middle", PARENT), ("young", CHILD)):
        write(f"recipes/{name}.yaml", text)
    composed = compose(recipe, arguments, tmp_path)
    train = composed.data["train"]
    keys = ("max_steps", "tokens", "epochs")
    assert {key: train[key] for key in keys if train.get(key) not in (None, "???")} == kept
    assert {key for key in keys if f"train.{key}" in composed.origins and train.get(key) in kept.values()} == set(kept)


def test_an_argument_takes_the_place_of_a_runs_own_value() -> None:
    def complete(data: JsonObject, _: frozenset[str]) -> Completion:
        seen.append(data["train"])
        return Completion({"train": {"max_steps": 9}}, "train.tokens")

    seen: list[object] = []
    own: JsonObject = {"train": {"max_steps": 5, "epochs": 7.0, "tokens": None}}
    composed = amend("mine", own, ["train.tokens=6"], [complete])
    assert seen == [{"tokens": 6}]
    assert composed.data["train"] == {"tokens": 6, "max_steps": 9}
    assert composed.origins["train.max_steps"] == composed.origins["train.tokens"]
    assert amend("mine", own, [], []).data == own


# `framework=./mine.yaml`: a file of the user's own in the place of an option.


def with_own_framework(folder: Path, text: str, *more: str) -> Composed:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return compose("quickstart", ["framework=./mine.yaml", *more], folder)


def test_a_file_lies_over_the_option_that_it_builds_on(tmp_path: Path) -> None:
    text = "defaults: [megatron]\nname: Ours\nstates:\n  zero1: {bucket_bytes: 7}\n"
    found = with_own_framework(tmp_path, text, "framework.overlap_dp=false")
    assert not found.problems
    framework = found.data["framework"]
    assert isinstance(framework, dict)
    assert (framework["name"], framework["fused_kernels"], framework["overlap_dp"]) == ("Ours", True, False)
    assert framework["states"] == {"zero1": {"bucket_bytes": 7}}
    assert (found.origins["framework.name"].file, found.origins["framework.name"].line) == ("mine.yaml", 2)


def test_a_file_alone_leaves_nothing_of_the_option_before(tmp_path: Path) -> None:
    assert with_own_framework(tmp_path, "name: Alone\n").data["framework"] == {"name": "Alone"}


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [("defaults: [megatrn]\n", "unknown_option", "`megatrn`"), ("name: ]\n", "bad_yaml", "")],
)
def test_mistakes_of_a_file_are_told_with_their_line(tmp_path: Path, text: str, code: str, part: str) -> None:
    problem = with_own_framework(tmp_path, text).problems[0]
    assert (problem.code, problem.file, problem.line) == (code, "mine.yaml", 1)
    assert part in problem.message


def test_a_missing_file_and_an_unknown_name_say_what_to_type(tmp_path: Path) -> None:
    (missing,) = compose("quickstart", ["framework=./mine.yaml"], tmp_path).problems
    assert missing.code == "missing_file" and "mine.yaml" in missing.message
    (unknown,) = compose("quickstart", ["framework=megatrn"], tmp_path).problems
    for command in ("framework=megatron?", "`trainspec list framework`", "set framework=./mine.yaml"):
        assert command in unknown.hint
