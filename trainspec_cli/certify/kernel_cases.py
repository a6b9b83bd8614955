"""Kernels as an axis of the matrix: each that this chip has takes the place of an operation's default one."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator

from trainspec_cli.certify.cases import COMBINED, Case, refusals
from trainspec_cli.certify.families import FAMILIES
from trainspec_cli.spec.recipe.kernels import KERNELS, TORCH
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import ModelSpec, has_layer_list
from trainspec_cli.spec.rules.kernels import lacking

UPDATE = "adamw"
"""The operation that is no part of the gradients."""
SPREAD_FAMILIES = {"grouped_matmul": "moe", "ssd_scan": "mamba"}
"""The family that shows an operation in several layouts; dense for all others."""


FP8 = "fp8"


def features_here(*, on_gpu: bool) -> tuple[str, ...]:
    """Return what this chip and its packages have in place of the defaults: kernels (`attention.math`), and `fp8`."""
    kernels = [f"{operation}.{backend}" for operation in KERNELS for backend in backends(operation, on_gpu=on_gpu)]
    return (*kernels, *([FP8] if importlib.util.find_spec("torchao") is not None else []))


def kernel_cases(max_processes: int, features: Collection[str]) -> Iterator[Case]:
    """Yield the legal cases of kernels that gradients depend on."""
    for family, model in FAMILIES.items():
        for operation in (name for name in KERNELS if name != UPDATE and _has(model, name)):
            for backend in _named(operation, features):
                yield from _legal(family, (operation, backend), max_processes)


def update_cases(max_processes: int, features: Collection[str]) -> Iterator[Case]:
    """Yield the legal cases of the optimizer's kernels."""
    for family in FAMILIES:
        for backend in _named(UPDATE, features):
            yield from _legal(family, (UPDATE, backend), max_processes)


def _named(operation: str, features: Collection[str]) -> list[str]:
    return [backend for backend in KERNELS[operation] if f"{operation}.{backend}" in features]


def backends(operation: str, *, on_gpu: bool) -> list[str]:
    """Return the backends beside the default one that this chip and its packages have."""
    others = ((name, backend) for name, backend in KERNELS[operation].items() if name != TORCH)
    return [name for name, backend in others if not lacking(backend, on_gpu=on_gpu)]


def _legal(family: str, kernel: tuple[str, str], max_processes: int) -> Iterator[Case]:
    """What is compiled takes long: it is measured in the family that shows its operation, in one process."""
    operation, backend = kernel
    shows = family == SPREAD_FAMILIES.get(operation, "dense") or len(FAMILIES) == 1
    compiled = KERNELS[operation][backend].needs_compiler
    if compiled and not shows:
        return
    spread = COMBINED if shows and not compiled else ()
    for layout in (Layout(), *(each for each in spread if each.world_size <= max_processes)):
        optimizer = "even_adamw" if operation == UPDATE else "sgd"
        case = Case(family, layout, optimizer=optimizer, kernel=kernel)  # type: ignore[arg-type]
        if not refusals(case):
            yield case


def _has(model: ModelSpec, operation: str) -> bool:
    """Return whether a model's layers have attention or SwiGLU; the rules of a recipe tell of other operations."""
    if operation not in ("attention", "swiglu"):
        return True
    if not has_layer_list(model):
        return False
    mixers = {mixer for layer in model.layer_list for mixer in layer.mixers}
    if operation == "attention":
        return bool(mixers & {"attention", "latent"})
    plain = "feed_forward" in mixers or ("experts" in mixers and model.as_decoder.gate_limit is None)
    return plain and model.gated_mlp and model.activation == "silu"
