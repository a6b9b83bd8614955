"""`trainspec list`: the accelerators, clusters and models that a recipe or a plan may name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.errors import Problem, RecipeError, closest
from trainspec_cli.json_value import JsonObject, JsonValue
from trainspec_cli.planner.hardware.catalogue import load_group, models
from trainspec_cli.planner.workload import count_active_params, count_params
from trainspec_cli.reporter.style import Style
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.model import OwnModel
from trainspec_cli.units import format_count

Row = JsonObject


def accelerators() -> Iterator[Row]:
    """Yield what `cluster.accelerator=NAME` may be, with the rates of its data sheet."""
    keys = ("bf16_tflops", "memory_gb", "memory_tb_per_s", "link_gb_per_s", "tdp_w", "price_usd_per_hour")
    for name, values in load_group("accelerator").items():
        yield {"name": name, "label": values.get("name"), **{key: values.get(key) for key in keys}}


def clusters() -> Iterator[Row]:
    """Yield what `cluster=NAME` may be: a kind of node."""
    for name, values in load_group("cluster").items():
        chosen = [entry for entry in _entries(values) if "accelerator" in next(iter(entry), "")]
        keys = ("devices_per_node", "scaleup_devices", "nic_gbit_per_s")
        accelerator = next(iter(chosen[0].values())) if chosen else None
        yield {"name": name, "accelerator": accelerator, **{key: values.get(key) for key in keys}}


def known_models() -> Iterator[Row]:
    """Yield what `model=NAME` may be, but for `auto`, which is a checkpoint's."""
    for name, model in models().items():
        sizes: Row = {"parameters": None, "active_parameters": None}
        if not isinstance(model, OwnModel) or model.block_params:
            sizes = {"parameters": count_params(model), "active_parameters": count_active_params(model)}
        yield {"name": name, "family": model.family, **sizes}


KINDS: dict[str, Callable[[], Iterator[Row]]] = {
    "accelerators": accelerators,
    "clusters": clusters,
    "models": known_models,
}


def list(
    kind: Annotated[
        str | None, typer.Argument(metavar="|".join(KINDS), help="One kind alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what has a name: cluster.accelerator=NAME, cluster=NAME and model=NAME; your own in ./conf included."""
    if kind is not None and kind not in KINDS:
        near = closest(kind, KINDS)
        hint = f"type trainspec list {near}" if near else f"kinds: {', '.join(KINDS)}"
        raise RecipeError(Problem("usage", f"there is no list of `{kind}`", hint=hint))
    found = {name: [*rows()] for name, rows in KINDS.items() if kind in (None, name)}
    print(json_text(found) if as_json else "\n\n".join(_table(name, rows) for name, rows in found.items()))


def _entries(values: JsonObject) -> Sequence[JsonObject]:
    defaults = values.get("defaults")
    return [entry for entry in defaults if isinstance(entry, dict)] if isinstance(defaults, Sequence) else ()


def _table(kind: str, rows: Sequence[Row]) -> str:
    style = Style.of(sys.stdout)
    headings = [*rows[0]]
    cells = [[heading if heading != "name" else kind for heading in headings]]
    cells += [[_cell(heading, row[heading]) for heading in headings] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    texts = [isinstance(rows[0][heading], str) for heading in headings]
    lines = [
        "  ".join(
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(row, widths, texts, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([style.bold(lines[0]), *lines[1:]])


def _cell(heading: str, value: JsonValue) -> str:
    if value is None:
        return "-"
    if heading.endswith("parameters") and isinstance(value, int):
        return format_count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
