"""The script as bash reads it, and its content."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lab.problems import raises

import trainspec_cli
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.printable import is_printable
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, SlurmSpec
from trainspec_cli.recipe.results.blueprint import Blueprint
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.run import gpus_of_node, text_on_lines
from trainspec_cli.run.slurm.container import mounts
from trainspec_cli.run.slurm.script import check_folder, render_script, start_command


def options(text: str) -> list[str]:
    """Return the options that sbatch reads from the lines before the first command."""
    lines = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.split("\n"))
    return [word for line in lines if line.startswith("#SBATCH") for word in sbatch_words(line.removeprefix("#SBATCH"))]


def sbatch_words(line: str) -> Iterator[str]:
    """sbatch's own parser: as a shell's, but a backslash counts between quotation marks of either kind, and `#` begins
    a comment anywhere else."""
    word, quote, characters = None, "", iter(line)
    for character in characters:
        if character == "\\":
            word = (word or "") + next(characters, "")
        elif quote:
            quote, word = ("", word) if character == quote else (quote, (word or "") + character)
        elif character in "\"'":
            quote, word = character, word or ""
        elif character == "#":
            break
        elif character in " \t\r\v\f":
            yield from filter(None, [word])
            word = None
        else:
            word = (word or "") + character
    assert not quote, f"sbatch refuses an unmatched quotation mark: {line}"
    yield from filter(None, [word])


@pytest.fixture
def render(make_plan, tmp_path: Path):
    def make(
        slurm: SlurmSpec = SlurmSpec(),  # noqa: B008
        roots: int = 1,
        device: str = "cpu",
        groups: int = 1,
        name: str = "run",
        recipe: str = "tiny",
        argv: tuple[str, ...] = ("sbatch", "recipe=tiny"),
        needed: tuple[Path, ...] = (),
        accelerator: AcceleratorSpec | None = None,
    ) -> str:
        plan: Plan = make_plan()
        cluster = replace(plan.spec.cluster, slurm=slurm, accelerator=accelerator)
        plan = replace(
            plan, spec=replace(plan.spec, cluster=cluster), num_nodes=4, device=device, replica_groups=groups
        )
        folders = [tmp_path / f"{name} {i}" for i in range(roots)]
        return render_script(plan, folders, recipe, argv, tmp_path, needed)

    return make


def test_what_is_not_asked_for_is_left_to_the_site(render, tmp_path: Path) -> None:
    assert options(render()) == [
        "--job-name=run 0",
        "--nodes=4",
        "--ntasks-per-node=1",
        f"--output={tmp_path}/run 0/logs/slurm-%j.log",
        "--open-mode=append",
        "--exclusive",
        "--signal=B:USR2@120",
        "--requeue",
    ]


def test_what_is_asked_for_stands_in_it(render) -> None:
    slurm = SlurmSpec(
        partition="gpu",
        account="lab",
        qos="high",
        time="2:00:00",
        gpus_per_node="h100:8",
        mem="0G",
        constraint="ib",
        exclude="node[3,7]",
        dependency="singleton",
        sbatch_lines=("--reservation=mine",),
        max_requeues=0,
    )
    expected = ("partition=gpu", "account=lab", "qos=high", "time=2:00:00", "gpus-per-node=h100:8", "mem=0G")
    more = ("constraint=ib", "exclude=node[3,7]", "dependency=singleton", "reservation=mine", "no-requeue")
    assert {f"--{option}" for option in (*expected, *more)} <= set(options(render(slurm)))


def test_gpus_are_asked_for_where_the_run_uses_them(render) -> None:
    assert "--gpus-per-node=2" in options(render(device="cuda"))


def test_nothing_is_exported_through_sbatch_or_srun(render) -> None:
    assert "--export" not in render()


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        (SlurmSpec(gpus_per_node="h100"), ["--gpus-per-node=h100:2"]),
        (SlurmSpec(gpu_request="gres"), ["--gres=gpu:2"]),
        (SlurmSpec(gpu_request="gres", gpus_per_node="h100"), ["--gres=gpu:h100:2"]),
        (SlurmSpec(gpu_request="gpus_per_task", gpus_per_node="a100:4"), ["--gpus-per-task=a100:4"]),
        (SlurmSpec(gpu_request="none"), []),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants_it(render, slurm: SlurmSpec, expected: list[str]) -> None:
    asked = options(render(slurm, device="cuda"))
    assert [option for option in asked if re.match("--(gpus|gres)", option)] == expected


def starts(text: str) -> tuple[list[str], list[str]]:
    """-> srun with its options, and the command that it starts on each node"""
    srun, agent = text.partition(' "$run" \\\n')[2].strip().split(" \\\n  ")
    return shlex.split(srun), shlex.split(agent)


PACKAGE = Path(trainspec_cli.__file__).parent
INSIDE = ["PYTHONNOUSERSITE=1", "PYTHONPATH=/opt/trainspec", "PYTHONSAFEPATH=1"]


def test_pyxis_is_told_by_srun_what_the_container_is(render, tmp_path: Path) -> None:
    image = "nvcr.io#nvidia/pytorch:25.01-py3"
    slurm = SlurmSpec(container_image=image, container_mounts="/data:/data:ro,/scratch", container_env=("A", "B"))
    text = render(slurm, device="cuda")
    srun, agent = starts(text)
    own = f"{PACKAGE}:/opt/trainspec/trainspec_cli:ro,{tmp_path}:{tmp_path}"
    assert srun[-4:] == [
        f"--container-image={image}",
        f"--container-mounts={own},/data:/data:ro,/scratch:/scratch",
        f"--container-workdir={tmp_path}",
        "--container-env=A,B",
    ]
    assert not [option for option in options(text) if option.startswith("--container")]
    assert agent[0] == "env" and set(INSIDE) < set(agent)
    assert agent[-3:] == ["python3", "-m", "trainspec_cli.run.backend.nodes.agent"]
    assert sys.executable not in agent, "that is the Python outside"


@pytest.mark.parametrize(
    ("runtime", "gpus", "device", "vendor", "option"),
    [
        ("apptainer", "auto", "cuda", None, "--nv"),
        ("apptainer", "auto", "cuda", "nvidia", "--nv"),
        ("singularity", "auto", "cuda", "amd", "--rocm"),
        ("apptainer", "amd", "cuda", None, "--rocm"),
        ("apptainer", "none", "cuda", "nvidia", None),
        ("apptainer", "auto", "cpu", None, None),
    ],
)
def test_apptainer_starts_the_agent_on_each_node(
    render, tmp_path: Path, runtime: Any, gpus: Any, device: str, vendor: str | None, option: str | None
) -> None:
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    python = f"{environment}/bin/python"
    Path(python).symlink_to("/usr/bin/python3")
    slurm = SlurmSpec(
        container_runtime=runtime,
        container_gpus=gpus,
        container_python=python,
        container_image="torch.sif",
        container_mounts="/data:/data:ro",
        container_env=("NCCL_IB_HCA",),
    )
    chip = AcceleratorSpec("chip", vendor, 1.0, 1.0, 1.0) if vendor else None
    text = render(slurm, device=device, needed=(Path("/elsewhere"), tmp_path / "below"), accelerator=chip)
    srun, agent = starts(text)
    assert srun[-1] == "--mpi=none"
    mounts = (f"{PACKAGE}:/opt/trainspec/trainspec_cli:ro", f"{tmp_path}:{tmp_path}", "/elsewhere:/elsewhere")
    binds = [word for mount in (*mounts, "/data:/data:ro") for word in ("--bind", mount)]
    begins = [runtime, "exec", *([option] if option else []), *binds, "--pwd", str(tmp_path), "torch.sif", "env"]
    assert agent[: len(begins)] == begins, "the venv is below the job's folder, which is mounted"
    assert agent[-3:] == [python, "-m", "trainspec_cli.run.backend.nodes.agent"]
    prefix = runtime.upper()
    assert f'[ -z "${{NCCL_IB_HCA+set}}" ] || export {prefix}ENV_NCCL_IB_HCA="$NCCL_IB_HCA"\n' in text


def test_the_environment_of_the_containers_python_is_mounted_with_its_own_base(tmp_path: Path) -> None:
    conda, virtual = tmp_path / "conda", tmp_path / "virtual"
    (conda / "conda-meta").mkdir(parents=True)
    (virtual / "bin").mkdir(parents=True)
    (virtual / "pyvenv.cfg").touch()
    (virtual / "bin/python").symlink_to(conda / "bin/python3.11")
    own = f"{PACKAGE}:/opt/trainspec/trainspec_cli:ro"
    for python, expected in (
        (f"{conda}/bin/python", [conda]),
        (f"{virtual}/bin/python", [virtual, conda]),
        ("/opt/no/such/bin/python", []),
        ("python3.12", []),
    ):
        assert mounts(SlurmSpec(container_python=python), []) == [own, *(f"{one}:{one}" for one in expected)]


def test_folders_are_mounted_where_they_lie_and_by_their_names(tmp_path: Path) -> None:
    """A folder of runs is often a link to a larger disk: inside, the link needs what it leads to."""
    work, scratch, other = tmp_path / "work", tmp_path / "scratch", tmp_path / "other"
    for folder in (work, scratch, other / "data"):
        folder.mkdir(parents=True)
    (work / "runs").symlink_to(scratch)
    (tmp_path / "data").symlink_to(other / "data")
    needed = [work, work / "runs" / "a", work / ".." / "beside", tmp_path / "data", work / "below"]
    expected = [
        *((folder, folder) for folder in (work, scratch / "a", tmp_path / "beside", other / "data")),
        (other / "data", tmp_path / "data"),
    ]
    assert mounts(SlurmSpec(), needed)[1:] == [f"{source}:{target}" for source, target in expected]


@pytest.mark.parametrize("folder", ["/", "/a:b", "/a,b"])
def test_a_folder_that_cannot_be_mounted_is_refused(folder: str) -> None:
    with raises(RecipeError, "bad_mount", path="cluster.slurm.container_image"):
        mounts(SlurmSpec(container_image="x"), [Path(folder)])


@pytest.mark.parametrize(("roots", "task"), [(1, "0"), (3, "2")])
def test_bash_takes_the_run_of_its_task(render, tmp_path: Path, roots: int, task: str) -> None:
    """The script itself, with a stand-in for what it ends in."""
    text = render(SlurmSpec(setup=("export GREETING='two words'",)), roots)
    head, _, _ = text.partition("exec ")
    script = f'{head}echo "$PWD|$run|$GREETING"\n'
    done = subprocess.run(
        ["bash", "-eu"], input=script, env={"SLURM_ARRAY_TASK_ID": task}, capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path}|{tmp_path}/run {task}|two words\n", done.stderr


def test_a_sweep_is_an_array(render, tmp_path: Path) -> None:
    asked = options(render(SlurmSpec(array_parallel=2), roots=5))
    assert "--array=0-4%2" in asked
    assert f"--output={tmp_path}/slurm/%A_%a.log" in asked


def test_replica_groups_outlive_a_node(render) -> None:
    text = render(groups=2)
    assert "--no-kill" in options(text)
    assert "--no-kill" in next(line for line in text.splitlines() if line.strip().startswith("srun"))
    assert "--no-kill" not in render()


HOSTILE = (
    "$(touch MARKER)", "`touch MARKER`", "a'; touch MARKER; '", 'a" --comment=injected "', "a --comment=injected",
    "a # b", "a\\", "a\\ --comment=injected", "%j%%j", '\\"', "${IFS}", "~", "!!",
)  # fmt: skip
NASTY = st.text(list("aZ0 .-=%#;&|<>$`'\"\\(){}[]*?!~ü"), min_size=1, max_size=20) | st.sampled_from(HOSTILE)
CONTROLS = ("\n", "\r", "\t", "\v", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\ud800")
TEXTS = [field.name for field in fields(SlurmSpec) if field.type == "str | None"]
DIRECTIVES = {name: name.replace("_", "-") for name in TEXTS if not name.startswith("container_")}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(TEXTS), NASTY, min_size=1), NASTY, NASTY, NASTY)
def test_text_is_refused_or_reaches_slurm_as_it_is(
    render: Callable[..., str], tmp_path: Path, texts: dict[str, str], name: str, recipe: str, argument: str
) -> None:
    """No value reaches beyond its own option, whatever it contains."""
    slurm, root = SlurmSpec(**texts), tmp_path / f"{name} 0"
    assert not list(text_on_lines(as_spec(slurm)))
    assume(not is_refused(root))
    text = render(slurm, name=name, recipe=recipe, argv=("sbatch", argument))
    plain = options(render(SlurmSpec(job_name="x"), name="run"))
    if gpus := texts.get("gpus_per_node"):
        texts = {**texts, "gpus_per_node": gpus_of_node(gpus, 2) or gpus}
    expected = {f"--{DIRECTIVES[key]}={value}" for key, value in texts.items() if key in DIRECTIVES}
    found = options(text)
    assert expected <= set(found)
    assert len(found) == len(plain) + len(expected - {f"--job-name={slurm.job_name}"})
    (log,) = [option for option in found if option.startswith("--output=")]
    assert re.sub("%(.)", lambda found: {"%": "%", "j": "12"}[found[1]], log) == f"--output={root}/logs/slurm-12.log"
    assert_runs_nothing(text, root, tmp_path)


def as_spec(slurm: SlurmSpec) -> Any:
    return SimpleNamespace(cluster=SimpleNamespace(slurm=slurm), run=SimpleNamespace(dir="auto"))


def is_refused(root: Path) -> bool:
    try:
        check_folder(root)
    except RecipeError:
        return True
    return False


def assert_runs_nothing(text: str, root: Path, folder: Path) -> None:
    """The whole script as bash runs it, with a stand-in for the driver, which gets the run's folder."""
    script = text.replace(f"exec {sys.executable} -m", "exec printf '%s\\0'")
    done = subprocess.run(
        ["bash", "-eu", "-c", script], capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin:/bin"}
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.split("\0")[:3] == ["trainspec_cli.session.slurm_job", str(root), "srun"]
    assert not list(folder.rglob("MARKER"))


@settings(deadline=None)
@given(st.sampled_from([*TEXTS, "sbatch_lines"]), NASTY, st.sampled_from(CONTROLS), NASTY)
def test_control_characters_are_refused(name: str, before: str, control: str, after: str) -> None:
    text = f"{before}{control}{after}"
    slurm = SlurmSpec(sbatch_lines=(text,)) if name == "sbatch_lines" else SlurmSpec(**{name: text})
    (problem,) = text_on_lines(as_spec(slurm))
    assert (problem.code, problem.path) == ("bad_text", f"cluster.slurm.{name}")
    assert is_printable(problem.message) and "\n" not in problem.message


@pytest.mark.parametrize("control", CONTROLS)
def test_setup_may_have_lines_and_hides_nothing(control: str) -> None:
    refused = list(text_on_lines(as_spec(SlurmSpec(setup=("module load cuda", f"true{control}false")))))
    assert [problem.path for problem in refused] == ["cluster.slurm.setup"] * (control not in "\n\t")


@pytest.mark.parametrize("folder", ["a\nb", "a\\b", "a\x1b]0;b", "a\u202eb"])
def test_a_folder_that_a_script_cannot_name_is_refused(folder: str, tmp_path: Path) -> None:
    with raises(RecipeError, "bad_text") as refused:
        check_folder(tmp_path / folder)
    assert folder not in str(refused.value) or folder == "a\\b"


def test_the_command_line_stays_one_comment(render: Callable[..., str]) -> None:
    text = render(
        argv=("sbatch", "run.dir=a\n#SBATCH --comment=injected\ntouch MARKER"), recipe="x\n#SBATCH --exclusive"
    )
    assert text.split("\n")[1].startswith("# trainspec sbatch 'run.dir=a\\n#SBATCH")
    assert not [option for option in options(text) if "comment" in option]
    assert [option for option in options(text) if option.startswith("--job-name")] == ["--job-name=run 0"]


@pytest.mark.parametrize("sorts_nodes", [True, False])
def test_tasks_are_numbered_by_a_hostfile_where_the_plan_places_nodes(
    make_plan, tmp_path: Path, sorts_nodes: bool
) -> None:
    blueprint = Blueprint("leaves", (), ("dp",), (), 1.0, 1.0, (), sorts_nodes=sorts_nodes)
    plan = replace(make_plan(), blueprint=blueprint)
    text = render_script(plan, [tmp_path / "run"], "tiny", ("sbatch",), tmp_path)
    assert ("--distribution=arbitrary" in text) == sorts_nodes
    assert "--distribution=arbitrary" not in start_command(plan, tmp_path, []), "the doctor writes no hostfile"
