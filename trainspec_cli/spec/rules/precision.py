"""Which models and layouts the engine multiplies in fp8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from trainspec_cli.errors import Problem
from trainspec_cli.spec.recipe.model import TextModel
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.rules.layout import pipeline_of, size_of

FP8_MULTIPLE = 16
"""Kernels take matrices whose sides are multiples of it."""


def float8(spec: RunSpec) -> Iterator[Problem]:
    if spec.precision.matmul != "fp8":
        return
    if reason := spec.model.record.refuses.get("fp8"):
        yield _unsupported("precision.matmul", reason, _PLAINLY)
        return
    yield from _sizes(cast("TextModel", spec.model), size_of(spec.layout, "tp"))
    if pipeline_of(spec.layout).splits_backward:
        message = (
            f"{spec.layout.pipeline_schedule} splits each linear layer's backward in two, which fp8 ones do in one"
        )
        yield _unsupported(
            "layout.pipeline_schedule", message, "type layout.pipeline_schedule=1f1b, or " + _PLAINLY[5:]
        )


def _sizes(model: TextModel, tp: int) -> Iterator[Problem]:
    """Check the sizes of a rank's parts."""
    sides = {
        "model.hidden_size": model.hidden_size,
        "model.ffn_size": model.ffn_size / tp,
        "model.num_heads": model.num_heads * model.head_dim / tp,
        "model.num_kv_heads": model.num_kv_heads * model.head_dim / tp,
    }
    for path, side in sides.items():
        if side % FP8_MULTIPLE:
            message = f"`{path}` gives a rank a matrix with a side of {side:g}, which is no multiple of {FP8_MULTIPLE}"
            yield _unsupported(path, message, _PLAINLY)


_PLAINLY = "type precision.matmul=compute"


def _unsupported(path: str, message: str, hint: str) -> Problem:
    return Problem("unsupported", f"`precision.matmul` is fp8: {message}", path, hint)
