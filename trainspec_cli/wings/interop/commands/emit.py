"""`trainspec emit`: write a recipe's plan as the configuration of another engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import Style
from trainspec_cli.planner.capacity import asked_for
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.session.planning.disturbance import load_disturbance
from trainspec_cli.session.planning.plan import plan_loaded, require_fit
from trainspec_cli.session.recipe.load import load_for_planning, with_defaults
from trainspec_cli.wings.interop import EMITTED, NOT_CARRIED, TARGETS, Container, run_values, show, translate

For = Annotated[str, typer.Option("--for", metavar="ENGINE", help=f"One of {', '.join(TARGETS)}.")]
Output = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the emitted files.")]
Overwrite = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
Image = Annotated[str, typer.Option(metavar="NAME", help="For a cluster manager: container image with trainspec.")]
Volume = Annotated[
    str, typer.Option(metavar="NAME", help="For a cluster manager: volume or bucket URL that all nodes mount.")
]


def emit(
    arguments: RecipeArguments,
    engine: For,
    output: Output,
    image: Image = "",
    volume: Volume = "",
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a recipe's plan as another engine's configuration, with the command and the environment of the run.

    For a cluster manager (from kubernetes to skypilot-ray), write the manifest that starts trainspec.

    Needs neither a GPU nor the engine. Unsupported values are rejected with an error that names them. DIR/emitted.json
    lists how each key is translated, what is only approximate, and what is not carried over.
    """
    if engine not in TARGETS:
        near = closest(engine, TARGETS)
        hint = f"pass --for {near}" if near else f"known engines: {', '.join(TARGETS)}"
        raise RecipeError(Problem("usage", f"unknown engine `{engine}`", "--for", hint))
    target = TARGETS[engine]
    arguments, _ = with_defaults(arguments)
    if load_disturbance(arguments):
        raise RecipeError(Problem("usage", "disturb= only works with trainspec plan", hint="leave it out"))
    loaded = load_for_planning(arguments)
    if loaded.spec.cluster.pools:
        message = "a configuration has one kind of node, but `cluster.pools` has several"
        raise RecipeError(Problem("unsupported", message, "cluster.pools", "choose one cluster, such as cluster=h100"))
    planned = plan_loaded(loaded)
    container = Container(image, volume)
    try:
        run = run_values(loaded.composed.recipe, resolved(planned), tuple(arguments), container)
        translation = translate(target, run)
    except RecipeError as error:
        raise RecipeError(loaded.composed.locate(error.problems)) from error
    files = dict(target.render(translation, run))
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
        # For a section, `value` is null.
        "not_carried": [{"ours": one.ours, "value": one.value, "why": one.why} for one in translation.not_carried],
    }
    files[EMITTED] = json_text(record) + "\n"
    existing = [name for name in files if (output / name).exists()]
    if existing and not force:
        message = f"{output} contains {' and '.join(existing)}, which would be overwritten"
        raise RecipeError(Problem("output_exists", message, "--output", "choose another folder, or add --force"))
    try:
        for name, text in files.items():
            write_text(output / name, text)
            if name.endswith(".sh"):
                (output / name).chmod(0o755)
    except OSError as error:
        message = f"{output} cannot be written: {error.strerror}"
        hint = "choose a folder that you can write to"
        raise RecipeError(Problem("output_exists", message, "--output", hint)) from error
    if as_json:
        print(json_text(record))
        return
    # Print a short table. emitted.json contains all keys.
    style = Style.of(sys.stdout)
    print(f"{output}: {', '.join(files)} for {target.title} {target.version}")
    nearly = [one for one in translation.translated if one.approximate]
    rows = [("exact", f"{len(translated) - len(nearly)} keys")]
    rows += [("approximate", f"{one.ours} -> {one.theirs or 'implied'}: {one.approximate}") for one in nearly]
    own = [one.ours for one in translation.not_carried if one.ours in NOT_CARRIED]
    of_script: dict[str, list[str]] = {}
    for one in translation.not_carried:
        if one.ours not in NOT_CARRIED:
            of_script.setdefault(one.why, []).append(f"{one.ours}={show(one.value)}")
    rows += [("not carried", f"{why}: {' '.join(values)}") for why, values in of_script.items()]
    rows += [("not carried", f"only for trainspec: {', '.join(own)}")] if own else []
    for (kind, text), before in zip(rows, ["", *(kind for kind, _ in rows)], strict=False):
        print(f"{style.bold(kind if kind != before else ''):<11}  {text}")


# The recipe of a plan's best layout, which the other engine's configuration describes


def resolved(planned: PlanReport) -> RunSpec:
    """Return the recipe with every `auto` replaced by the value in the plan's best layout. Raises PlanError."""
    best = require_fit(planned)
    assert planned.run is not None, "a fitting layout has a forecast"
    # The layout covers all replica groups together, because other engines do not have replica groups.
    spec = replace(planned.spec, layout=asked_for(best.layout))
    chip = spec.cluster.accelerator
    device = spec.cluster.device
    if device == AUTO:
        device = "cpu" if chip and chip.vendor == "cpu" else "cuda"
    compute = spec.precision.compute
    if compute == AUTO:  # the number format that the plan assumes
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
