"""Load a RunSpec from a command line and turn it into a Plan, for every command that takes a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.core.wings import Point
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.compose.folders import COMMAND_LINE, DISTURB, RECIPE
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import HUGGING_FACE, RunSpec
from trainspec_cli.recipe.records import UNKNOWN, UnknownTouched, build
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import apply, check, check_engine, check_machine, close_axes, parts_for
from trainspec_cli.recipe.rules.run import BLOCK_PARAMS

if TYPE_CHECKING:
    from trainspec_cli.recipe.compose.compose import Complete, Composed
    from trainspec_cli.run.job.folder import LaunchOrigin


import re
from dataclasses import replace

import yaml

from trainspec_cli import __version__
from trainspec_cli.core.node import cache_dir, cpu_name, make_cache
from trainspec_cli.core.reading.files import VERSION_LINE
from trainspec_cli.core.reading.yaml_file import read_versioned_yaml
from trainspec_cli.planner.calibration import PACE, efficiency_with
from trainspec_cli.planner.hardware.cluster import chip_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.tables import ClusterProfile
from trainspec_cli.run.folder.files import write_text

DATA_PATHS = ("data.path", "data.tokenizer.path")
CHECK_START: Point[Callable[[RunSpec], None]] = Point("check_start")
"""Raises TrainspecError if a recipe that uses the plug-in lacks something that it needs to start."""
ACCELERATOR = "cluster.accelerator"
OF_PLANNING = (DISTURB,)
"""Command-line keys that `trainspec plan` reads itself."""


@dataclass(frozen=True)
class Loaded:
    spec: RunSpec
    composed: Composed

    @property
    def origin(self) -> LaunchOrigin:
        """Return the recipe's origin, which a run records in its folder."""
        from trainspec_cli.recipe.compose.values import (
            render_yaml,  # deferred: loads hydra, which --help does not need
        )
        from trainspec_cli.run.job.folder import LaunchOrigin  # deferred: plans do not start processes

        return LaunchOrigin(self.composed.recipe, sys.argv[1:], render_yaml(self.composed.data, self.composed.origins))


@dataclass(frozen=True)
class Examined:
    draft: RunSpec
    """The recipe, with UNKNOWN in place of missing and invalid values."""
    composed: Composed
    problems: list[Problem]
    """Problems with their line numbers, in reading order."""


def load(arguments: Sequence[str], cwd: Path | None = None, *, to_run: bool = True) -> Loaded:
    """Load the recipe of `recipe=NAME key=value ...`. Raises RecipeError with every problem and its line number, and
    the same errors as `with_counted_block`. A run that is only planned (not `to_run`) needs neither data on this
    machine nor an engine that can run it."""
    examined = examine(arguments, cwd, to_run=to_run)
    problems = examined.problems
    if not to_run:
        lacks_data = [p for p in problems if p.path in DATA_PATHS and p.code in ("missing_file", "missing_value")]
        problems = [problem for problem in problems if problem not in lacks_data]
    others = without_uncounted(problems)
    require(others)
    if len(others) < len(problems):
        return load(with_counted_block(arguments, examined), cwd, to_run=to_run)
    return Loaded(examined.draft, examined.composed)


def load_for_planning(arguments: Sequence[str]) -> Loaded:
    """Like `load`, for a recipe that is planned but not started."""
    return load(arguments, to_run=False)


def with_counted_block(arguments: Sequence[str], examined: Examined) -> list[str]:
    """Return the arguments, adding the parameter count of a user-defined block if nothing else is missing from the
    model. A separate process builds a block and counts its parameters. Raises RecipeError if the block cannot be built,
    and MachineError if the process fails."""
    about_model = [problem for problem in examined.problems if problem.path.partition(".")[0] == "model"]
    if not about_model or without_uncounted(about_model):
        return list(arguments)
    from trainspec_cli.recipe.results.tools import BlockRequest  # deferred, too
    from trainspec_cli.run.tools import COUNT_BLOCK, run_tool  # deferred: plans do not start processes

    model = examined.draft.model
    assert isinstance(model, OwnModel), "only this family's rule requires the count"
    counted = run_tool(COUNT_BLOCK, BlockRequest(model))
    if counted.problem:
        raise RecipeError(examined.composed.locate([counted.problem]))
    return [*arguments, f"{BLOCK_PARAMS}={counted.params}"]


def check_start(spec: RunSpec) -> None:
    """Raise TrainspecError if a plug-in that the recipe uses refuses to start the run."""
    for check_it in parts_for(CHECK_START, spec):
        check_it(spec)


def without_uncounted(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems except for a block's missing parameter count, which `load` determines."""
    return [problem for problem in problems if (problem.code, problem.path) != ("missing_value", BLOCK_PARAMS)]


def examine(arguments: Sequence[str], cwd: Path | None = None, *, to_run: bool = True) -> Examined:
    """Find all problems in a recipe that do not depend on the machine."""
    from trainspec_cli.recipe.compose.compose import (
        compose_arguments,  # deferred: loads hydra, which --help does not need
    )
    from trainspec_cli.session.recipe.complete import (
        absolute_code,
        check_weights,
        complete_head_dim,
        complete_model,
        complete_steps,
        complete_warmup,
    )  # deferred, too

    arguments = _with_folder(arguments)
    aside = () if to_run else OF_PLANNING
    completes: list[Complete] = [*absolute_code(cwd), partial(complete_model, to_run=to_run)]
    completes += [complete_head_dim, complete_steps, complete_warmup]
    composed = compose_arguments(arguments, cwd, completes, aside)
    draft, mistyped = build(RunSpec, composed.data)
    # Rules skip UNKNOWN values. A recipe or option that was not found is therefore reported once, instead of once for
    # each value that it would have set.
    names = draft.__dataclass_fields__
    unknown = set(names) if RECIPE in composed.failed else composed.failed & set(names)
    draft = RunSpec(**{name: UNKNOWN if name in unknown else getattr(draft, name) for name in names})
    checked = [*check(close_axes(draft)), *check_engine(draft)] if to_run else check(draft)
    checked += apply([check_weights], draft) if to_run and not composed.problems else []
    checked += apply([partial(_accelerator_is_used, arguments)], draft) if to_run else []
    problems = composed.locate([*mistyped, *checked])
    # A broken interpolation is not reported if its target is missing or has the wrong type, because that is already
    # reported.
    missing = [f"${{{problem.path}}}" for problem in mistyped if problem.code == "missing_value"]
    missing += [f"${{{problem.path}." for problem in mistyped if problem.code == "wrong_type"]
    known = [
        problem
        for problem in composed.problems
        if problem.code != "bad_interpolation" or not any(target in problem.message for target in missing)
    ]
    new = [problem for problem in problems if not follows(problem, composed)]
    return Examined(draft, composed, sorted([*known, *new], key=_place))


def _with_folder(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `model=hf:FOLDER` written out: the model and the weights of that folder."""
    named = [argument for argument in arguments if argument.startswith(f"model={HUGGING_FACE}")]
    written = ["model=auto" if argument in named else argument for argument in arguments]
    if named and not any(argument.startswith("init.from=") for argument in arguments):
        written.append(f"init.from={named[-1].removeprefix('model=')}")
    return written


def _accelerator_is_used(arguments: Sequence[str], spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if the command line names an accelerator but the recipe trains on CPUs."""
    chip = spec.cluster.accelerator
    typed = {key.strip(): value for key, _, value in (argument.partition("=") for argument in arguments)}
    if chip is None or chip.vendor == "cpu" or spec.cluster.device != "cpu":
        return
    if ACCELERATOR in typed and "cluster.device" not in typed:
        message = f"`{ACCELERATOR}` is {chip.name}, and the recipe trains on CPUs (`cluster.device` is cpu)"
        hint = f"set cluster=auto {ACCELERATOR}={typed[ACCELERATOR]} for GPUs, or cluster.device=cpu for CPUs"
        yield Problem("contradiction", message, ACCELERATOR, hint)


def plan_on(loaded: Loaded, machine: Machine) -> Plan:
    """Resolve every `auto`. Raises MachineError if something is missing on the node, and RecipeError for sizes that do
    not match it."""
    require(loaded.composed.locate(check_machine(loaded.spec, machine)))
    return plan_for(loaded, machine)


def machine_of_job(loaded: Loaded) -> Machine:
    """Return a description of a node of the job, which may differ from this one. Raises RecipeError if the recipe
    leaves open anything that can only be determined on the job's nodes."""
    cluster = loaded.spec.cluster
    open_keys = [key for key in ("device", "devices_per_node") if getattr(cluster, key) == AUTO]
    if open_keys:
        why = "is auto, and the job's nodes cannot be examined before Slurm has allocated them"
        hint = "choose a cluster, such as cluster=h100, or set cluster.device=cuda cluster.devices_per_node=8"
        problems = [Problem("left_open", f"`cluster.{key}` {why}", f"cluster.{key}", hint) for key in open_keys]
        raise RecipeError(loaded.composed.locate(problems))
    if cluster.device == "cpu":
        return this_machine(loaded.spec)
    machine = machine_of_cluster(cluster)
    assert machine is not None, "the cluster specifies its device and the number of devices"
    return machine


def plan_for(loaded: Loaded, machine: Machine) -> Plan:
    """Resolve every `auto` for another machine. Raises the same errors as `plan_on`, except those about missing parts
    of the node."""
    try:
        return plan(loaded.spec, machine)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error


def this_machine(spec: RunSpec) -> Machine:
    """Return a description of this node, with its GPUs unless the spec trains on CPUs."""
    from trainspec_cli.run.job.machine import detect  # deferred: loads psutil, unneeded for other clusters

    return detect(look_for_gpus=spec.cluster.device != "cpu")


def machine_of_cluster(cluster: ClusterSpec) -> Machine | None:
    """Return a description of a node as specified by the recipe's cluster, which may differ from this node. None if the
    cluster leaves open how many GPUs a node has, or whether it has any."""
    chip = cluster.accelerator
    has_gpus = cluster.device == "cuda" or (cluster.device == AUTO and chip is not None and chip.vendor != "cpu")
    if not has_gpus or cluster.devices_per_node == AUTO:
        return None
    return Machine(
        hostname="the cluster's nodes",
        cpu_cores=1,
        memory_bytes=int(cluster.host_memory_gb * 1e9),
        gpu_names=(chip.name if chip else "GPU",) * int(cluster.devices_per_node),
        gpu_memory_bytes=int(chip.memory_gb * 1e9) if chip else 0,
        bf16=chip is None or chip.bf16_tflops > 0,
        fp8=chip is not None and chip.fp8_tflops > 0,
    )


def machine_of_draft(spec: RunSpec) -> Machine | None:
    """Like `this_machine`, for a draft; None if the draft leaves open whether it uses GPUs."""
    try:
        return this_machine(spec)
    except UnknownTouched:
        return None


def require(problems: Sequence[Problem]) -> None:
    """Raise an error with the problems, if there are any: MachineError (exit 4) if the only problem is that something
    is missing on the machine, otherwise RecipeError (exit 2)."""
    if problems:
        error = MachineError if all(problem.environment for problem in problems) else RecipeError
        raise error(problems)


def follows(problem: Problem, composed: Composed) -> bool:
    """Return whether a missing value is the consequence of a recipe or option that was not found, or of a rejected
    value."""
    refused = {other.path for other in composed.problems}
    group = problem.path.partition(".")[0]
    missed = bool(composed.failed & {RECIPE, group, problem.path}) or problem.path in refused
    return problem.code == "missing_value" and missed


def _place(problem: Problem) -> tuple[bool, str, int, int]:
    """Sort key: problems on the command line come first, then file by file."""
    return problem.file != COMMAND_LINE, problem.file or "", problem.line or 0, problem.column or 0


# Defaults for a plan without a recipe: a model on a cluster, with typical values for everything else.


DEFAULTS = "plan_defaults"
"""The recipe used if none is specified (recipes/plan_defaults.yaml)."""
TOKENS_A_PARAMETER = 20
"""Compute-optimal number of tokens per parameter (arXiv:2203.15556, table 3)."""
SEQ_LEN = 4096
TOKENS_A_STEP = 2**22
POOLS = "cluster.pools"
"""Key that describes the nodes of a cluster; if it is set, no default cluster is needed."""
STEPS = "train.max_steps"
TOKENS = "train.tokens"
EPOCHS = "train.epochs"


def with_defaults(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments, with a recipe added if needed, and those among them that are defaults.

    Arguments that name a recipe are unchanged. Raises RecipeError if neither a recipe nor a model is named."""
    given = {argument.partition("=")[0].lstrip("~+") for argument in arguments}
    if RECIPE in given:
        return list(arguments), ()
    if "model" not in given:
        hint = "set recipe=NAME, or model=NAME cluster=NAME: trainspec list shows both"
        raise RecipeError(Problem("missing_value", "neither a recipe nor a model is specified", RECIPE, hint))
    named = [*arguments, f"{RECIPE}={DEFAULTS}"]
    if POOLS in given and "cluster" not in given:
        named.append("cluster=auto")
    try:
        examined = examine(named, to_run=False)
        counted = with_counted_block(named, examined)
        if len(counted) > len(named):  # the default number of tokens depends on the number of parameters
            named = counted
            examined = examine(named, to_run=False)
        # Typical values: samples of 4,096 tokens (or the model's maximum), 4 million tokens per step, and 20 tokens per
        # parameter; for images, 90 epochs of ImageNet's 1.28 million.
        if examined.draft.model.unit == "samples":
            usual = {"data.seq_len": "1", "train.tokens": "1.15e8"}
        else:
            learnt = examined.draft.model.learned_positions
            asked = next(
                (value for key, _, value in (one.partition("=") for one in arguments) if key == "data.seq_len"), ""
            )
            seq_len = int(asked) if asked.isdecimal() and int(asked) else min(SEQ_LEN, learnt or SEQ_LEN)
            usual = {
                "data.seq_len": f"{seq_len}",
                "batching.global_batch_size": f"{max(1, TOKENS_A_STEP // seq_len)}",
                "train.tokens": f"{float(f'{TOKENS_A_PARAMETER * count_params(examined.draft.model):.3g}'):g}",
            }
    except UnknownTouched:  # the model is invalid, which the plan reports
        return named, ()
    if given & {STEPS, TOKENS, EPOCHS}:
        del usual[TOKENS]
    overrides = tuple(f"{key}={value}" for key, value in usual.items() if key not in given)
    return [*named, *overrides], overrides


# A cluster's calibrated efficiencies, stored in the cache under its name and applied to each plan and launch.


UNNAMED = "auto"


def profile_path(cluster: str) -> Path:
    """Return the path of a cluster's profile, which may not exist."""
    return cache_dir() / "profiles" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', cluster or UNNAMED).lstrip('.')}.yaml"


def read_profile(path: Path) -> ClusterProfile:
    """Read a profile. Raises RecipeError for any other file."""
    try:
        return from_plain(ClusterProfile, read_versioned_yaml(path))
    except (RecipeError, ValueError, TypeError) as error:
        message = f"{path} is not a profile of a cluster: {error}"
        hint = "write it again with trainspec calibrate"
        raise RecipeError(Problem("wrong_profile", message, file=str(path), hint=hint)) from error


def write_profile(path: Path, profile: ClusterProfile) -> None:
    if path.is_relative_to(cache_dir()):
        make_cache()
    head = "# Multipliers of the planner's defaults, from trainspec calibrate; low and high bound a 90% interval.\n"
    write_text(path, head + VERSION_LINE + yaml.safe_dump(to_plain(profile), sort_keys=False))


def device_of(spec: RunSpec, machine: Machine | None) -> str:
    """Return the catalogue name of the accelerator, or the name of the CPU."""
    if machine is not None and machine.gpu_names and spec.cluster.device != "cpu":
        chip, _ = chip_of(machine)
        return chip.name if chip else machine.gpu_names[0]
    return spec.cluster.accelerator.name if spec.cluster.accelerator else cpu_name()


def find_profile(spec: RunSpec, machine: Machine | None) -> tuple[ClusterProfile | None, str]:
    """Return this cluster's profile and a line about it. If a profile exists but does not apply, return None and the
    reason. Raises RecipeError if the file is damaged."""
    path = profile_path(spec.cluster.name)
    if spec.cluster.profile == "off" or spec.cluster.pools or not path.is_file():
        return None, ""
    profile = read_profile(path)
    from importlib import metadata  # deferred: slow to load, and few plans have a profile

    found = {"device": device_of(spec, machine), "torch": metadata.version("torch"), "trainspec": __version__}
    for what, here in found.items():
        if (made := getattr(profile, what)) != here:
            stale = (
                f"the profile of {profile.cluster} is not used: it was measured with {what} {made}, and this is {here}"
            )
            return None, f"{stale}; trainspec calibrate renews it, trainspec calibrate --forget removes it"
    return profile, describe_profile(profile)


def describe_profile(profile: ClusterProfile) -> str:
    """Return one line with the date, the number of rows and the main changes."""
    ranked = sorted(profile.parameters.items(), key=lambda item: -abs(item[1].factor - 1))
    moved = [f"{name} x {found.factor:.2f}" for name, found in ranked if found.informed and name != PACE][:3]
    pace = profile.parameters[PACE].factor
    changed = ", ".join((f"pace x {pace:.2f}", *moved))
    rows = f"{profile.rows} measured step{'s' if profile.rows > 1 else ''}"
    return f"profile of {profile.cluster}, {profile.date}, {rows}: {changed}; cluster.profile=off leaves it out"


def with_profile(spec: RunSpec, machine: Machine | None) -> tuple[RunSpec, str]:
    """Return the recipe with its cluster's calibrated efficiencies, and a line about them. The recipe's own values take
    precedence. A profile for a CPU is applied to its probe instead."""
    profile, line = find_profile(spec, machine)
    if profile is None or profile.kind != "gpu":
        return spec, line if profile is None else ""
    values = efficiency_with(profile.factors, Efficiency()).as_dict() | (spec.cluster.efficiency or {})
    return replace(spec, cluster=replace(spec.cluster, efficiency=values)), line
