"""Lines of a recipe that a batch script takes as they are: shown, and submitted only where they are the user's own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.drawing import slow_after
from lab.problems import raises

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.slurm.submit import machine_of_job, plan_runs, write_submission
from trainspec_cli.session.slurm.submit import submit as submit_runs

RECIPE = """\
defaults: [tiny, _self_]
data: {max_bytes: 200000}
run: {dir: run}
cluster:
  slurm:
    setup:
      - module load cuda
      - export A=1
"""
NOBODY = 65534
Submit = Callable[..., int]


@pytest.fixture
def recipe(write: Callable[[str, str], Path]) -> Path:
    file = write("recipes/mine.yaml", RECIPE)
    file.chmod(0o664)
    return file


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """`trainspec sbatch recipe=mine ARGUMENTS --submit`, with a stand-in for Slurm's that keeps what it is given."""
    program = tmp_path / "programs" / "sbatch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncp "$2" {tmp_path}/submitted\necho 41\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: run(["sbatch", "recipe=mine", *arguments, "--submit"])


def test_a_job_on_unnamed_gpus_multiplies_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """Every GPU that torch still supports does; the catalogue knows of those that do not."""
    gpus = ("cluster.device=cuda", "cluster.devices_per_node=2", "cluster.num_nodes=1", "precision=auto")
    (planned,) = plan_runs(["recipe=tiny", *gpus], [])
    assert (planned.plan.device, planned.plan.compute) == ("cuda", "bf16")


def test_own_lines_are_shown_and_submitted(
    submit: Submit, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a file that the user's group may write, as it is by default on many hosts."""
    assert submit("--json") == 0
    said = capsys.readouterr()
    assert "cluster.slurm.setup (recipes/mine.yaml:6):\n  module load cuda\n  export A=1\n" in said.err
    told = json.loads(said.out)
    assert (told["job_id"], told["setup"], told["sbatch_lines"]) == ("41", ["module load cuda", "export A=1"], [])
    assert "\nmodule load cuda\nexport A=1\n" in (tmp_path / "submitted").read_text()


def test_options_and_lines_are_shown_each_below_its_key(
    submit: Submit, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE + "    sbatch_lines: [--reservation=mine]\n")
    assert submit() == 0
    said = capsys.readouterr().err
    assert "cluster.slurm.setup (recipes/mine.yaml:6):\n  module load cuda\n  export A=1\n" in said
    assert "cluster.slurm.sbatch_lines (recipes/mine.yaml:9):\n  --reservation=mine\n" in said


def made_by_another_user(recipe: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(recipe, NOBODY, NOBODY)
    return "recipes/mine.yaml belongs to another user, nobody"


def made_open(recipe: Path) -> str:
    recipe.chmod(0o666)
    return "recipes/mine.yaml can be written by every user of this machine"


@pytest.mark.parametrize("make", [made_by_another_user, made_open])
def test_lines_of_others_are_shown_and_refused(
    make: Callable[[Path], str], submit: Submit, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = make(recipe)
    assert submit() == 2
    said = capsys.readouterr().err
    assert said.startswith("cluster.slurm.setup (recipes/mine.yaml:6):\n  module load cuda\n")
    assert f"{why}\n  --> recipes/mine.yaml:6:5" in said
    assert "--allow-setup" in said
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [made_by_another_user, made_open])
def test_lines_of_others_are_submitted_when_that_is_asked_for(
    make: Callable[[Path], str], submit: Submit, recipe: Path, tmp_path: Path
) -> None:
    make(recipe)
    assert submit("--allow-setup") == 0
    assert "\nmodule load cuda\n" in (tmp_path / "submitted").read_text()


def test_options_of_others_are_refused_too(submit: Submit, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--error` could write into any file of the user's."""
    lines = RECIPE.replace("setup", "sbatch_lines").replace("export A=1", "--mail-type=END")
    recipe.write_text(lines.replace("module load cuda", "--error=/home/me/.bashrc"))
    made_open(recipe)
    assert submit() == 2
    assert "`cluster.slurm.sbatch_lines`" in capsys.readouterr().err


def test_a_recipe_of_others_without_such_lines_is_submitted(submit: Submit, recipe: Path) -> None:
    """And lines that are typed are the user's own."""
    recipe.write_text(RECIPE.partition("cluster:")[0])
    made_open(recipe)
    assert submit("cluster.slurm.setup=[ls]") == 0


def test_text_that_would_be_a_line_of_its_own_is_told_with_its_place(
    write: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = '  slurm:\n    partition: "gpu\\n#SBATCH --comment=x"\n    setup: ["true\\x1b[2K\\rfalse"]\n'
    write("recipes/mine.yaml", f'defaults: [tiny, _self_]\nrun: {{dir: "a\\nb"}}\ncluster:\n{slurm}')
    assert run(["validate", "recipe=mine", "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [(e["code"], e["path"], f"{e['file']}:{e['line']}") for e in errors] == [
        ("bad_text", "run.dir", "recipes/mine.yaml:2"),
        ("bad_text", "cluster.slurm.partition", "recipes/mine.yaml:5"),
        ("bad_text", "cluster.slurm.setup", "recipes/mine.yaml:6"),
    ]
    assert errors[1]["message"].startswith("`cluster.slurm.partition` is `gpu\\n#SBATCH --comment=x`; ")


def test_the_nodes_of_a_job_are_those_of_its_recipe() -> None:
    (planned,) = plan_runs(["recipe=tiny", "cluster=h100", "cluster.num_nodes=2"], [])
    machine = machine_of_job(planned.loaded)
    cluster = planned.loaded.spec.cluster
    assert cluster.accelerator is not None
    assert machine.gpu_names == (cluster.accelerator.name,) * 8
    assert machine.memory_bytes == cluster.host_memory_gb * 1e9
    assert machine.gpu_memory_bytes == cluster.accelerator.memory_gb * 1e9
    assert machine.bf16 and machine.fp8


@pytest.mark.parametrize("key", ["device", "devices_per_node"])
def test_what_only_the_jobs_nodes_could_show_has_to_be_typed(key: str) -> None:
    fixed = {"device": "cuda", "devices_per_node": "8"} | {key: "auto"}
    with pytest.raises(RecipeError) as raised:
        plan_runs(["recipe=tiny", *(f"cluster.{name}={value}" for name, value in fixed.items())], [])
    assert [(problem.code, problem.path) for problem in raised.value.problems] == [("left_open", f"cluster.{key}")]


def test_a_sweep_plans_every_combination_and_each_value_once() -> None:
    arguments = ["recipe=tiny", "cluster.device=cpu", "optim.lr=9", "cluster.devices_per_node=1"]
    runs = plan_runs(arguments, [("optim.lr", ["0.1", "0.2"]), ("train.seed", ["1", "2"])])
    specs = [planned.loaded.spec for planned in runs]
    assert [(spec.optim.lr, spec.train.seed) for spec in specs] == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    with raises(RecipeError, "usage", "Slurm options"):
        plan_runs(arguments, [("cluster.devices_per_node", ["1", "2"])])


@pytest.mark.parametrize("of_command", slow_after(1, [False, True]))
@pytest.mark.parametrize(("answer", "code"), [("exit 1", "slurm_refused"), ("exec sleep 9", "slurm_silent")])
def test_a_refused_submission_leaves_nothing_and_one_that_may_be_queued_stays(
    submit: Submit,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of_command: bool,
    answer: str,
    code: str,
) -> None:
    monkeypatch.setattr("trainspec_cli.run.slurm.commands.TIMEOUT_S", 0.5)
    given = ["recipe=mine", "run.dir=mine", "--json"]
    if of_command:
        (tmp_path / "train.py").touch()
        given = ["cluster.device=cpu", "--dir", "mine", "--json", "--", sys.executable, "train.py"]
    program = tmp_path / "programs" / "sbatch"
    works = program.read_text()
    program.write_text(f"#!/bin/sh\n{answer}\n")
    assert run(["sbatch", "--submit", *given]) == 4
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == code
    assert (tmp_path / "mine").exists() is (code == "slurm_silent")
    # What was only shown before stays, whatever becomes of its submission.
    assert run(["sbatch", *given]) == 0
    assert run(["sbatch", "--submit", *given]) == 4
    assert RunDir(tmp_path / "mine").job_sbatch.is_file()
    program.write_text(works)
    assert run(["sbatch", "--submit", *given]) == 0


def test_an_array_has_a_script_for_each_run_and_one_for_all(
    tmp_path: Path, write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainspec_cli.session.slurm.submit.prepare_data", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["recipe=tiny", "cluster.device=cpu", "cluster.devices_per_node=1"]
    runs = plan_runs(given, [("train.seed", ["1", "2"])])
    made = write_submission(runs)
    assert [read_json(RunDir(root).plan_json)["spec"]["train"]["seed"] for root in made.roots] == [1, 2]
    assert made.script.read_text() == made.text and "--array=0-1" in made.text
    for root in made.roots:
        own = RunDir(root).job_sbatch.read_text()
        assert "--array" not in own and str(root) in own
    monkeypatch.setattr("trainspec_cli.session.slurm.submit.submit_to_slurm", lambda script: "77")
    assert submit_runs(made) == "77"
    assert [read_json(RunDir(root).slurm_json)["job_id"] for root in made.roots] == ["77_0", "77_1"]
    (alone,) = runs[:1]
    one = write_submission([alone], force=True)
    assert one.script == RunDir(one.roots[0]).job_sbatch and "--force" in one.text and "--force" not in made.text
    submit_runs(one)
    assert read_json(RunDir(one.roots[0]).slurm_json)["job_id"] == "77"
    assert one.script.stat().st_mode & 0o777 == 0o600
