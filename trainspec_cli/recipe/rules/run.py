"""Rules for checkpoints, evaluations and the name of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.reading.files import how_to_copy
from trainspec_cli.recipe.field_types import AUTO

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

RUN_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def memory_copies(spec: RunSpec) -> Iterator[Problem]:
    path = "checkpoint.memory_interval_steps"
    if spec.checkpoint.memory_interval_steps is not None and spec.resilience.mode == "elastic":
        message = f"`{path}` is set, and with resilience=elastic every replica group holds the newest state already"
        yield Problem(code="unsupported", path=path, message=message, hint=f"type {path}=null, or resilience=restart")


def run_name(spec: RunSpec) -> Iterator[Problem]:
    """A run is found by its name, which must not look like a folder, an option or `last`."""
    name = spec.run.name
    if name and (not RUN_NAME.fullmatch(name) or name == "last"):
        message = f"`run.name` is {name!r}; letters, digits, `_`, `-` and `.` make a name, and `last` is the newest run"
        yield Problem("bad_name", message, "run.name", "such as run.name=baseline-2")


def local_folder(spec: RunSpec) -> Iterator[Problem]:
    """A run's files are on this machine or on a file system that it mounts."""
    if spec.run.dir and how_to_copy(spec.run.dir):
        message = f"`run.dir` is {spec.run.dir}; a run writes to a local or mounted folder, and to no remote path"
        yield Problem("unsupported", message, "run.dir", "type run.dir=FOLDER, and copy it when the run is over")


def heldout(spec: RunSpec) -> Iterator[Problem]:
    """What follows the held-out loss needs evaluations, which one replica group remembers alone."""
    wanted = {
        "checkpoint.keep_best": spec.checkpoint.keep_best,
        "train.early_stop_evals": spec.train.early_stop_evals is not None,
    }
    for path in (path for path, is_wanted in wanted.items() if is_wanted):
        if spec.train.eval_interval_steps is None:
            message = f"`{path}` follows the held-out loss, and `train.eval_interval_steps` is null"
            yield Problem("missing_value", message, path, "type train.eval_interval_steps=100, or another number")
        if spec.resilience.mode == "elastic":
            message = f"`{path}` is set, and with resilience=elastic a group that comes back knows no evaluations"
            yield Problem("unsupported", message, path, "leave it out, or type resilience=restart")


def framework_has(spec: RunSpec) -> Iterator[Problem]:
    """A layout that is pinned names what the framework has."""
    facts, layout = spec.framework, spec.layout
    pinned = {
        "zero_stage": (layout.zero_stage, facts.zero_stages, layout.dp_shard not in (AUTO, 1)),
        "pipeline_schedule": (layout.pipeline_schedule, facts.schedules, layout.pp not in (AUTO, 1)),
    }
    for key, (value, has, counts) in pinned.items():
        if counts and value != AUTO and value not in has:
            path = f"layout.{key}"
            message = f"`{path}` is {value}, which {facts.name} does not have"
            hint = f"type {path}=" + ", or ".join(map(str, has)) if has else f"{facts.name} has none: type layout.pp=1"
            yield Problem("unsupported", message, path, hint)


RUN_RULES = (memory_copies, heldout, run_name, local_folder, framework_has)
