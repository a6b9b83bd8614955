"""Load a RunSpec from a command line, and make a Plan of it, for every command that takes a recipe."""

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
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec, OwnModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import UNKNOWN, UnknownTouched, build
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import apply, check, check_engine, check_machine, close_axes, parts_for
from trainspec_cli.recipe.rules.run import BLOCK_PARAMS

if TYPE_CHECKING:
    from trainspec_cli.recipe.compose.compose import Composed
    from trainspec_cli.run.job.folder import LaunchOrigin


DATA_PATHS = ("data.path", "data.tokenizer.path")
CHECK_START: Point[Callable[[RunSpec], None]] = Point("check_start")
"""Raises TrainspecError where the run of a recipe that uses the wing lacks what a start of it needs."""
ACCELERATOR = "cluster.accelerator"
OF_PLANNING = (DISTURB,)
"""Keys of the command line that `trainspec plan` reads itself."""


@dataclass(frozen=True)
class Loaded:
    spec: RunSpec
    composed: Composed

    @property
    def origin(self) -> LaunchOrigin:
        """Return the origin that a run of this recipe records in its folder."""
        from trainspec_cli.recipe.compose.values import (
            render_yaml,  # loads hydra, which the help of a command does without
        )
        from trainspec_cli.run.job.folder import LaunchOrigin  # loads what starts processes, which plans do without

        return LaunchOrigin(self.composed.recipe, sys.argv[1:], render_yaml(self.composed.data, self.composed.origins))


@dataclass(frozen=True)
class Examined:
    draft: RunSpec
    """UNKNOWN stands in it for what is missing or wrong."""
    composed: Composed
    problems: list[Problem]
    """Located, in the order they are read."""


def load(arguments: Sequence[str], cwd: Path | None = None, *, to_run: bool = True) -> Loaded:
    """Return what `recipe=NAME key=value ...` asks for. Raises RecipeError with every problem, located, and as
    `with_counted_block`. A run that is planned and not started (`to_run`) needs no data here, nor an engine that is
    able to run it."""
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


def load_for_planning(arguments: Sequence[str], cwd: Path | None = None) -> Loaded:
    """Load a run that is planned and not started, as `load` does."""
    return load(arguments, cwd, to_run=False)


def with_counted_block(arguments: Sequence[str], examined: Examined) -> list[str]:
    """Return the arguments, with the number of parameters of a user-defined block where that is all that is wrong with
    the model: another process makes a block and counts. Raises RecipeError where the block cannot be made, and
    MachineError where the process fails."""
    about_model = [problem for problem in examined.problems if problem.path.partition(".")[0] == "model"]
    if not about_model or without_uncounted(about_model):
        return list(arguments)
    from trainspec_cli.recipe.results.tools import BlockRequest  # as above
    from trainspec_cli.run.tools import COUNT_BLOCK, run_tool  # loads what starts processes, which plans do without

    model = examined.draft.model
    assert isinstance(model, OwnModel), "the rule of no other family asks for it"
    counted = run_tool(COUNT_BLOCK, BlockRequest(model))
    if counted.problem:
        raise RecipeError(examined.composed.locate([counted.problem]))
    return [*arguments, f"{BLOCK_PARAMS}={counted.params}"]


def check_start(spec: RunSpec) -> None:
    """Raise TrainspecError where a wing that the recipe uses refuses to start its run."""
    for check_it in parts_for(CHECK_START, spec):
        check_it(spec)


def without_uncounted(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems except the missing number of a block's parameters, which `load` counts."""
    return [problem for problem in problems if (problem.code, problem.path) != ("missing_value", BLOCK_PARAMS)]


def examine(arguments: Sequence[str], cwd: Path | None = None, *, to_run: bool = True) -> Examined:
    """Find everything that is wrong with a recipe, whatever the machine."""
    from trainspec_cli.recipe.compose.compose import (
        compose_arguments,  # loads hydra, which the help of a command does without
    )
    from trainspec_cli.session.recipe.initial import check_weights, complete  # as above
    from trainspec_cli.session.recipe.own_code import absolute_code  # as above
    from trainspec_cli.session.recipe.run_length import complete_steps, complete_warmup  # as above

    aside = () if to_run else OF_PLANNING
    composed = compose_arguments(
        arguments, cwd, (*absolute_code(cwd), partial(complete, to_run=to_run), complete_steps, complete_warmup), aside
    )
    draft, mistyped = build(RunSpec, composed.data)
    # Rules pass over UNKNOWN: what a recipe or an option would have set
    # that was not found is reported once, by its name.
    names = draft.__dataclass_fields__
    unknown = set(names) if RECIPE in composed.failed else composed.failed & set(names)
    draft = RunSpec(**{name: UNKNOWN if name in unknown else getattr(draft, name) for name in names})
    checked = [*check(close_axes(draft)), *check_engine(draft)] if to_run else check(draft)
    checked += apply([check_weights], draft) if to_run and not composed.problems else []
    checked += apply([partial(_accelerator_is_used, arguments)], draft) if to_run else []
    problems = composed.locate([*mistyped, *checked])
    # An interpolation leads nowhere where its target misses, or its section is none, which is reported by itself.
    missing = [f"${{{problem.path}}}" for problem in mistyped if problem.code == "missing_value"]
    missing += [f"${{{problem.path}." for problem in mistyped if problem.code == "wrong_type"]
    known = [
        problem
        for problem in composed.problems
        if problem.code != "bad_interpolation" or not any(target in problem.message for target in missing)
    ]
    new = [problem for problem in problems if not follows(problem, composed)]
    return Examined(draft, composed, sorted([*known, *new], key=_place))


def _accelerator_is_used(arguments: Sequence[str], spec: RunSpec) -> Iterator[Problem]:
    """A rule: who types an accelerator does not train on CPUs since the recipe is for those."""
    chip = spec.cluster.accelerator
    typed = {key.strip(): value for key, _, value in (argument.partition("=") for argument in arguments)}
    if chip is None or chip.vendor == "cpu" or spec.cluster.device != "cpu":
        return
    if ACCELERATOR in typed and "cluster.device" not in typed:
        message = f"`{ACCELERATOR}` is {chip.name}, and the recipe trains on CPUs (`cluster.device` is cpu)"
        hint = f"type cluster=auto {ACCELERATOR}={typed[ACCELERATOR]} for GPUs, or cluster.device=cpu for CPUs"
        yield Problem("contradiction", message, ACCELERATOR, hint)


def plan_on(loaded: Loaded, machine: Machine) -> Plan:
    """Resolve every `auto`. Raises MachineError for what the node lacks, RecipeError for sizes that do not fit it."""
    require(loaded.composed.locate(check_machine(loaded.spec, machine)))
    return plan_for(loaded, machine)


def machine_of_job(loaded: Loaded) -> Machine:
    """Return what a node of the job is, which need not be like this one. Raises RecipeError where the recipe leaves
    open what only the job's nodes could show."""
    cluster = loaded.spec.cluster
    open_keys = [key for key in ("device", "devices_per_node") if getattr(cluster, key) == AUTO]
    if open_keys:
        why = "is auto, and the job's nodes cannot be examined before Slurm has given them"
        hint = "choose a cluster, such as cluster=h100, or type cluster.device=cuda cluster.devices_per_node=8"
        problems = [Problem("left_open", f"`cluster.{key}` {why}", f"cluster.{key}", hint) for key in open_keys]
        raise RecipeError(loaded.composed.locate(problems))
    if cluster.device == "cpu":
        return this_machine(loaded.spec)
    machine = machine_of_cluster(cluster)
    assert machine is not None, "its device is cuda, and the devices of a node are counted"
    return machine


def plan_for(loaded: Loaded, machine: Machine) -> Plan:
    """Resolve every `auto` for a machine that is not this one. Raises as `plan_on`, but for what the node lacks."""
    try:
        return plan(loaded.spec, machine)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error


def this_machine(spec: RunSpec) -> Machine:
    """This node as a spec without problems would use it."""
    from trainspec_cli.run.job.machine import detect  # loads psutil, which plans for another cluster do without

    return detect(look_for_gpus=spec.cluster.device != "cpu")


def machine_of_cluster(cluster: ClusterSpec) -> Machine | None:
    """Return a node as the recipe's cluster describes it, which need not be like this one; None if it leaves open how
    many GPUs a node has, or whether it has any."""
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
    """This node as a draft would use it; None where the draft does not say whether it wants GPUs."""
    try:
        return this_machine(spec)
    except UnknownTouched:
        return None


def require(problems: Sequence[Problem]) -> None:
    """Raise what they amount to: MachineError (exit 4) where only the machine lacks something, else RecipeError (2)."""
    if problems:
        error = MachineError if all(problem.environment for problem in problems) else RecipeError
        raise error(problems)


def follows(problem: Problem, composed: Composed) -> bool:
    """Return whether a value misses because the recipe or option that gives it was not found, or because its own was
    refused."""
    refused = {other.path for other in composed.problems}
    group = problem.path.partition(".")[0]
    missed = bool(composed.failed & {RECIPE, group, problem.path}) or problem.path in refused
    return problem.code == "missing_value" and missed


def _place(problem: Problem) -> tuple[bool, str, int, int]:
    """The command line first, then file by file."""
    return problem.file != COMMAND_LINE, problem.file or "", problem.line or 0, problem.column or 0


# The plan where no recipe is named: a model on a cluster, with what is usual for the rest.


DEFAULTS = "plan_defaults"
"""The recipe in the place of one (recipes/plan_defaults.yaml)."""
TOKENS_A_PARAMETER = 20
"""arXiv:2203.15556, table 3: what trains a model of its size best for the compute."""
SEQ_LEN = 4096
TOKENS_A_STEP = 2**22
POOLS = "cluster.pools"
"""Say what a cluster's nodes are, so that no other cluster stands in the place of what nobody has given."""
LENGTHS = ("train.max_steps", "train.tokens", "train.epochs")


def with_defaults(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """-> (the arguments with a recipe, the overrides among them that stand for what nobody has given).

    Those that name a recipe stay as they are. Raises RecipeError where neither a recipe nor a model is named.
    """
    given = {argument.partition("=")[0].lstrip("~+") for argument in arguments}
    if RECIPE in given:
        return list(arguments), ()
    if "model" not in given:
        hint = "type recipe=NAME, or model=NAME cluster=NAME: trainspec list shows both"
        raise RecipeError(Problem("missing_value", "neither a recipe nor a model is named", RECIPE, hint))
    named = [*arguments, f"{RECIPE}={DEFAULTS}"]
    if POOLS in given and "cluster" not in given:
        named.append("cluster=auto")
    try:
        examined = examine(named, to_run=False)
        counted = with_counted_block(named, examined)
        if len(counted) > len(named):  # the usual number of tokens follows from the parameters
            named = counted
            examined = examine(named, to_run=False)
        usual = _usual(examined.draft.model, arguments)
    except UnknownTouched:  # the model is wrong, which the plan reports
        return named, ()
    if given & set(LENGTHS):
        del usual["train.tokens"]
    overrides = tuple(f"{key}={value}" for key, value in usual.items() if key not in given)
    return [*named, *overrides], overrides


def _usual(model: ModelSpec, arguments: Sequence[str]) -> dict[str, str]:
    """Samples of 4,096 tokens, as far as the model's positions reach, four million tokens a step, 20 a parameter; of
    pictures, 90 times the 1.28 million of ImageNet."""
    if model.unit == "samples":
        return {"data.seq_len": "1", "train.tokens": "1.15e8"}
    learnt = model.learned_positions if isinstance(model, DecoderModel) else 0
    asked = next((value for key, _, value in (one.partition("=") for one in arguments) if key == "data.seq_len"), "")
    seq_len = int(asked) if asked.isdecimal() and int(asked) else min(SEQ_LEN, learnt or SEQ_LEN)
    return {
        "data.seq_len": f"{seq_len}",
        "batching.global_batch_size": f"{max(1, TOKENS_A_STEP // seq_len)}",
        "train.tokens": f"{float(f'{TOKENS_A_PARAMETER * count_params(model):.3g}'):g}",
    }
