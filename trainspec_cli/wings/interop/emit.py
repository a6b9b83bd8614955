"""Write a recipe's plan as the configuration of another engine."""

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
    Target,
    Translation,
    run_values,
    translate,
)


@dataclass(frozen=True)
class Emission:
    """The files for an engine, before they are written."""

    target: Target
    translation: Translation
    files: Mapping[str, str]
    """File name -> text."""


def emit_recipe(arguments: Sequence[str], engine: str, container: Container = NO_CONTAINER) -> Emission:
    """Plan a recipe and translate it for an engine. Raises RecipeError for values that the engine does not support, and
    PlanError if no layout fits."""
    if engine not in TARGETS:
        near = closest(engine, TARGETS)
        hint = f"pass --for {near}" if near else f"known engines: {', '.join(TARGETS)}"
        raise RecipeError(Problem("usage", f"unknown engine `{engine}`", "--for", hint))
    target = TARGETS[engine]
    arguments, _ = with_defaults(arguments)
    if load_disturbance(arguments):
        raise RecipeError(Problem("usage", "disturb= works only with trainspec plan", hint="leave it out"))
    loaded = load_for_planning(arguments)
    if loaded.spec.cluster.pools:
        message = "a configuration has one kind of node, but `cluster.pools` has several"
        raise RecipeError(Problem("unsupported", message, "cluster.pools", "name one cluster: cluster=h100"))
    planned = plan_loaded(loaded)
    try:
        run = run_values(loaded.composed.recipe, resolved(planned), tuple(arguments), container)
        translation = translate(target, run)
    except RecipeError as error:
        raise RecipeError(loaded.composed.locate(error.problems)) from error
    files = target.render(translation, run)
    translated: list[JsonObject] = [
        {
            "ours": one.ours,
            "value": one.value,
            "theirs": one.theirs,
            "their_value": one.their_value,
            "place": one.destination,
            "reason": one.approximate,
        }
        for one in translation.translated
    ]
    record: JsonObject = {
        "recipe": run.recipe,
        "engine": target.name,
        "engine_version": target.version,
        "files": [*sorted(files)],
        "exact": [one for one in translated if not one["reason"]],
        "approximate": [one for one in translated if one["reason"]],
        "fixed": [{"theirs": one.theirs, "value": one.value, "why": one.why} for one in translation.fixed],
        # `value` is null for a section.
        "not_carried": [{"ours": one.ours, "value": one.value, "why": one.why} for one in translation.not_carried],
    }
    return Emission(target, translation, {**files, EMITTED: json_text(record) + "\n"})


def write_emission(emission: Emission, folder: Path, *, force: bool) -> None:
    """Write the files to `folder`. Raises RecipeError if one of them exists, unless `force`."""
    existing = [name for name in emission.files if (folder / name).exists()]
    if existing and not force:
        message = f"{folder} contains {' and '.join(existing)}, which would be overwritten"
        raise RecipeError(Problem("output_exists", message, "--output", "choose another folder, or add --force"))
    try:
        for name, text in emission.files.items():
            write_text(folder / name, text)
            if name.endswith(".sh"):
                (folder / name).chmod(0o755)
    except OSError as error:
        hint = "choose a folder that you can write to"
        raise RecipeError(
            Problem("output_exists", f"{folder} cannot be written: {error.strerror}", "--output", hint)
        ) from error


def resolved(planned: PlanReport) -> RunSpec:
    """Return the recipe with every `auto` replaced by the value in the plan's best layout. Raises PlanError."""
    best = require_fit(planned)
    assert planned.run is not None, "a layout that fits has a forecast"
    # The layout covers all replica groups together, because other engines do not have them.
    spec = replace(planned.spec, layout=asked_for(best.layout))
    chip = spec.cluster.accelerator
    device = spec.cluster.device
    if device == AUTO:
        device = "cpu" if chip and chip.vendor == "cpu" else "cuda"
    compute = spec.precision.compute
    if compute == AUTO:  # the format that the plan assumes
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
