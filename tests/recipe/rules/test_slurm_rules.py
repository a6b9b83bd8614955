"""Forms of times, sizes and GPUs that Slurm knows, and options that contradict the script's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from recipe.conftest import SPEC

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.cluster import ClusterSpec, SlurmSpec
from trainspec_cli.recipe.records import UNKNOWN
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.recipe.rules.run import time_limit_s


def problems_of(slurm: SlurmSpec, device: str = "cuda") -> list[Problem]:
    cluster = ClusterSpec(device=device, devices_per_node=8, slurm=slurm)  # type: ignore[arg-type]
    return check(replace(SPEC, cluster=cluster))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90", 5400), ("5:30", 330), ("2:00:00", 7200), ("1-0", 86_400), ("3-12:30", 304_200), ("1-0:0:1", 86_401)],
        *[("0", math.inf), ("UNLIMITED", math.inf)],
        *[("2h", None), ("", None), ("-5", None), ("1-", None), ("1:2:3:4", None), ("1.5", None), ("1-2:3:4:5", None)],
    ],
)
def test_times_are_those_of_slurm(text: str, seconds: float | None) -> None:
    assert time_limit_s(text) == seconds
    assert [problem.code for problem in problems_of(SlurmSpec(time=text))] == ([] if seconds else ["bad_time"])


def test_a_time_within_its_own_warning_is_refused() -> None:
    (problem,) = problems_of(SlurmSpec(time="2:00"))
    assert "`2:00`, 120 s:" in problem.message and problem.path == "cluster.slurm.time"
    (problem,) = problems_of(SlurmSpec(time="2"))
    assert "`2`, 120 s (a plain number" in problem.message
    assert problems_of(SlurmSpec(time="2:00", warn_s=60)) == []


@pytest.mark.parametrize(
    ("text", "is_right"), [("64G", True), ("0", True), ("512000", True), ("64GB", False), ("x", False)]
)
def test_memory_is_a_number_and_a_letter(text: str, is_right: bool) -> None:
    assert [problem.path for problem in problems_of(SlurmSpec(mem=text))] == ([] if is_right else ["cluster.slurm.mem"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *[("h100:8", ""), ("8", ""), ("h100", ""), ("1g.10gb:8", "")],
        ("gpu:h100:8", "h100:8, a number or a type"),
        ("h100:0", "a number or a type"),
        ("h100:4", "requests 4 GPUs per node, but `cluster.devices_per_node` uses 8"),
    ],
)
def test_gpus_are_type_and_number(text: str, said: str) -> None:
    found = problems_of(SlurmSpec(gpus_per_node=text))
    assert [said in problem.message for problem in found] == ([True] if said else [])


@pytest.mark.parametrize("key", ["time", "mem", "gpus_per_node"])
def test_what_is_not_known_is_not_judged(key: str) -> None:
    assert problems_of(replace(SlurmSpec(), **{key: UNKNOWN})) == []


def test_gpus_are_not_both_asked_for_and_not() -> None:
    (problem,) = problems_of(SlurmSpec(gpus_per_node="8", gpu_request="none"))
    assert "requests no GPUs" in problem.message


@pytest.mark.parametrize(
    ("line", "slurm", "key"),
    [
        ("--nodes=4", SlurmSpec(), "cluster.num_nodes"),
        ("-N4", SlurmSpec(), "cluster.num_nodes"),
        ("--mail-type=END -J x", SlurmSpec(), "cluster.slurm.job_name"),
        ("--time=1:00:00", SlurmSpec(time="2:00:00"), "cluster.slurm.time"),
        ("--mem-per-cpu 4G", SlurmSpec(mem="64G"), "cluster.slurm.mem"),
        ("--exclusive=user", SlurmSpec(), "cluster.slurm.exclusive"),
        ("--gres=gpu:8", SlurmSpec(), "cluster.slurm.gpus_per_node"),
        ("--gres=nvme:1", SlurmSpec(gpu_request="gres"), "cluster.slurm.gpus_per_node"),
        ("-G 16", SlurmSpec(), "cluster.slurm.gpus_per_node"),
    ],
)
def test_a_further_option_that_contradicts_the_script_is_refused(line: str, slurm: SlurmSpec, key: str) -> None:
    (problem,) = problems_of(replace(slurm, sbatch_lines=(line,)))
    assert (problem.code, problem.path) == ("contradiction", "cluster.slurm.sbatch_lines")
    assert line in problem.message and problem.hint.startswith(f"leave it out; it is set by {key}")


@pytest.mark.parametrize(
    ("line", "slurm"),
    [
        *[
            ("--mail-type=END", SlurmSpec()),
            ("--time=1:00:00", SlurmSpec()),
            ("--exclusive=user", SlurmSpec(exclusive=False)),
        ],
        *[("--gres=nvme:1", SlurmSpec()), ("--gres=gpu:8", SlurmSpec(gpu_request="none"))],
        *[('--comment="--nodes=4"', SlurmSpec()), ("--mem-per-cpu=4G", SlurmSpec())],
    ],
)
def test_a_further_option_of_its_own_is_let_through(line: str, slurm: SlurmSpec) -> None:
    assert problems_of(replace(slurm, sbatch_lines=(line,))) == []


def test_a_further_line_is_an_option() -> None:
    (problem,) = problems_of(SlurmSpec(sbatch_lines=("#SBATCH --mail-type=END",)))
    assert problem.code == "bad_option" and "--mail-type=END" in problem.hint


@pytest.mark.parametrize(
    ("slurm", "path"),
    [
        (SlurmSpec(container_runtime="apptainer"), "container_runtime"),
        (SlurmSpec(container_mounts="/data:/data"), "container_mounts"),
        (SlurmSpec(container_image="x", container_mounts="/a:/b:ro:x"), "container_mounts"),
        (SlurmSpec(container_image="x", container_mounts="/a,"), "container_mounts"),
        (SlurmSpec(container_image="x", container_env=("A=1",)), "container_env"),
        (SlurmSpec(container_image="x", container_gpus="nvidia"), "container_gpus"),
    ],
)
def test_a_container_is_whole(slurm: SlurmSpec, path: str) -> None:
    assert [problem.path for problem in problems_of(slurm)] == [f"cluster.slurm.{path}"]
    assert problems_of(SlurmSpec(container_image="x", container_mounts="/a:/b:ro,/c", container_env=("A",))) == []
