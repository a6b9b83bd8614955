"""Rules for what can be written and planned but not yet trained: the engine refuses it instead of ignoring it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.model import TextModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.check import Rule, apply
from trainspec_cli.recipe.rules.comm import wanted_groups, whole_hosts
from trainspec_cli.recipe.rules.layout import LAYOUT_RULES, family_training, only_planned, pipeline_of, size_of
from trainspec_cli.recipe.structure import UNKNOWN

TRAINED: dict[str, tuple[Any, ...]] = {
    "precision.compute": ("bf16", "fp32", AUTO),
    "precision.matmul": ("compute", "fp8"),
    "cluster.device": ("cpu", "cuda", AUTO),
}
"""The values that this version's engine and launcher take; the first is the one to type."""


def close_axes(spec: RunSpec) -> RunSpec:
    """Return `spec` with the axes beside data parallelism set to 1 where they are `auto`, as a launch has them."""
    old = spec.layout
    if old is UNKNOWN:
        return spec
    cp, tp, pp, ep, etp = (1 if _is_auto(size) else size for size in (old.cp, old.tp, old.pp, old.ep, old.etp))
    return replace(spec, layout=replace(old, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp))


def _is_auto(value: object) -> bool:
    return value is not UNKNOWN and value == AUTO


def check_engine(spec: RunSpec) -> list[Problem]:
    """Return what this version's engine cannot run."""
    return apply(
        [
            *BUILT,
            only_planned,
            own_framework,
            elastic_model,
            group_hosts,
            *(partial(trained_value, path) for path in TRAINED),
        ],
        spec,
    )


def check_built(spec: RunSpec) -> list[Problem]:
    """Return the parts of the model and its layout that the engine cannot build, wherever it is to run."""
    return apply(BUILT, spec)


def own_framework(spec: RunSpec) -> Iterator[Problem]:
    """Only trainspec's own engine can be started; other frameworks are planned for."""
    if not spec.framework.counted:
        message = f"`framework` is {spec.framework.name}, whose runs are planned and not started here"
        hint = "leave `framework` out, or type `trainspec plan`; `trainspec emit` writes other engines' configurations"
        yield Problem("unsupported", message, "framework", hint)


def data_of_its_kind(spec: RunSpec) -> Iterator[Problem]:
    """Images or volumes for models of samples, tokens for those of text."""
    model = spec.model
    data = spec.data
    if model.unit == "samples" and data.unit == "tokens":
        message = f"data={data.source} is text, and a {model.family} model reads images or volumes"
        yield Problem("unsupported", message, "data.source", "type data=phantom, data=images or data=volumes")
    elif model.unit == "tokens" and data.unit == "samples":
        message = f"data={data.source} has no tokens, which a {model.family} model reads"
        yield Problem("unsupported", message, "data.source", "type data=text, or another model")
    elif model.unit == "samples" and data.seq_len != 1:
        message = f"`data.seq_len` is {data.seq_len}; a sample is one image or volume"
        yield Problem("unsupported", message, "data.seq_len", "type data.seq_len=1")


def compiled_model(spec: RunSpec) -> Iterator[Problem]:
    reason = spec.model.record.refuses.get("compile")
    if spec.compile and reason:
        yield Problem("unsupported", reason, "compile", "type compile=false")


def group_hosts(spec: RunSpec) -> Iterator[Problem]:
    yield from whole_hosts(spec.cluster.num_nodes, wanted_groups(spec))


def elastic_model(spec: RunSpec) -> Iterator[Problem]:
    reason = spec.model.record.refuses.get("elastic")
    if spec.resilience.mode == "elastic" and reason:
        yield Problem("unsupported", reason, "resilience.mode", "type resilience=restart")


FP8_MULTIPLE = 16
"""Kernels take matrices whose sides are multiples of it."""
UNDO_FP8 = "precision.matmul=compute"


def float8(spec: RunSpec) -> Iterator[Problem]:
    if spec.precision.matmul != "fp8":
        return
    if reason := spec.model.record.refuses.get("fp8"):
        yield _unsupported_in_fp8("precision.matmul", reason, f"type {UNDO_FP8}")
        return
    yield from _fp8_sizes(cast("TextModel", spec.model), size_of(spec.layout, "tp"))
    if pipeline_of(spec.layout).splits_backward:
        message = f"{spec.layout.pipeline_schedule} splits each linear layer's backward, which fp8 ones do in one"
        yield _unsupported_in_fp8(
            "layout.pipeline_schedule", message, f"type layout.pipeline_schedule=1f1b, or {UNDO_FP8}"
        )


def _fp8_sizes(model: TextModel, tp: int) -> Iterator[Problem]:
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
            yield _unsupported_in_fp8(path, message, f"type {UNDO_FP8}")


def _unsupported_in_fp8(path: str, message: str, hint: str) -> Problem:
    return Problem("unsupported", f"`precision.matmul` is fp8: {message}", path, hint)


BUILT: tuple[Rule, ...] = (data_of_its_kind, compiled_model, family_training, *LAYOUT_RULES, float8)


def trained_value(path: str, spec: RunSpec) -> Iterator[Problem]:
    value = attrgetter(path)(spec)
    allowed = TRAINED[path]
    if value not in allowed:
        choices = " or ".join(str(choice) for choice in allowed)
        message = f"`{path}` is {value}; this version trains with {choices}"
        hint = f"type {path}={allowed[0]}, or trainspec plan with the same arguments says what it would take"
        yield Problem("unsupported", message, path, hint)
