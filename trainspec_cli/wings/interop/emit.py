"""A recipe's plan in another engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.planner.capacity import asked_for
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.session.planning.disturbance import load_disturbance
from trainspec_cli.session.planning.plan import plan_loaded, require_fit
from trainspec_cli.session.recipe.load import load_for_planning, with_defaults
from trainspec_cli.wings.interop import (
    EMITTED,
    NO_CONTAINER,
    TARGETS,
    Container,
    Spoken,
    Target,
    run_values,
    speak,
)


@dataclass(frozen=True)
class Emission:
    """An engine's files on paper."""

    target: Target
    spoken: Spoken
    files: Mapping[str, str]
    """File name -> text."""


def emit_recipe(arguments: Sequence[str], engine: str, container: Container = NO_CONTAINER) -> Emission:
    """Plan a recipe, and say it in an engine's words. Raises RecipeError for what the engine cannot say, and PlanError
    where nothing fits."""
    if engine not in TARGETS:
        near = closest(engine, TARGETS)
        hint = f"type --for {near}" if near else f"there are: {', '.join(TARGETS)}"
        raise RecipeError(Problem("usage", f"there is no engine `{engine}` to emit for", "--for", hint))
    target = TARGETS[engine]
    arguments, _ = with_defaults(arguments)
    if load_disturbance(arguments):
        raise RecipeError(Problem("usage", "disturb= is simulated by trainspec plan alone", hint="leave it out"))
    loaded = load_for_planning(arguments)
    if loaded.spec.cluster.pools:
        message = "a configuration speaks of one kind of node, and `cluster.pools` has several"
        raise RecipeError(Problem("unsupported", message, "cluster.pools", "name one cluster: cluster=h100"))
    planned = plan_loaded(loaded)
    try:
        run = run_values(loaded.composed.recipe, resolved(planned), tuple(arguments), container)
        spoken = speak(target, run)
    except RecipeError as error:
        raise RecipeError(loaded.composed.locate(error.problems)) from error
    files = target.render(spoken, run)
    said: list[JsonObject] = [
        {
            "ours": one.ours,
            "value": one.value,
            "theirs": one.theirs,
            "their_value": one.their_value,
            "place": one.place,
            "reason": one.approximate,
        }
        for one in spoken.said
    ]
    record: JsonObject = {
        "recipe": run.recipe,
        "engine": target.name,
        "engine_version": target.version,
        "files": [*sorted(files)],
        "exact": [one for one in said if not one["reason"]],
        "approximate": [one for one in said if one["reason"]],
        "fixed": [{"theirs": one.theirs, "value": one.value, "why": one.why} for one in spoken.fixed],
        # `value` is null for a section.
        "not_carried": [{"ours": one.ours, "value": one.value, "why": one.why} for one in spoken.not_carried],
    }
    return Emission(target, spoken, {**files, EMITTED: json_text(record) + "\n"})


def write_emission(emission: Emission, folder: Path, *, force: bool) -> None:
    """Write the files into `folder`. Raises RecipeError where one of them is there, unless `force`."""
    there = [name for name in emission.files if (folder / name).exists()]
    if there and not force:
        message = f"{folder} has {' and '.join(there)}, which would be overwritten"
        raise RecipeError(Problem("output_exists", message, "--output", "choose another folder, or add --force"))
    try:
        for name, text in emission.files.items():
            write_text(folder / name, text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
    except OSError as error:
        hint = "choose a folder that you may write to"
        raise RecipeError(
            Problem("output_exists", f"{folder} cannot be written: {error.strerror}", "--output", hint)
        ) from error


def resolved(planned: PlanReport) -> RunSpec:
    """Return the recipe with the values of the plan's best layout in the place of `auto`. Raises PlanError."""
    best = require_fit(planned)
    assert planned.run is not None, "a layout that fits has a forecast"
    # The layout of all replicas together: other engines have no replica groups.
    spec = replace(planned.spec, layout=asked_for(best.layout))
    chip = spec.cluster.accelerator
    device = spec.cluster.device
    if device == AUTO:
        device = "cpu" if chip and chip.vendor == "cpu" else "cuda"
    compute = spec.precision.compute
    if compute == AUTO:  # as the plan counts with it
        compute = "bf16" if chip and chip.bf16_tflops else "fp16"
    per_node = planned.capacity.world_size // spec.cluster.num_nodes
    cluster = replace(spec.cluster, devices_per_node=per_node, device=device)
    checkpoint = spec.checkpoint
    if checkpoint.interval_steps == AUTO:
        checkpoint = replace(checkpoint, interval_steps=planned.run.goodput.checkpoint_interval_steps)
    return replace(
        spec,
        cluster=cluster,
        checkpoint=checkpoint,
        batching=replace(spec.batching, micro_batch_size=best.micro_batch_size),
        recompute=best.recompute,  # type: ignore[arg-type]
        offload=best.offload,
        precision=replace(spec.precision, compute=compute),
        comm=replace(spec.comm, gradients=spec.comm.fixed.gradients),
    )
