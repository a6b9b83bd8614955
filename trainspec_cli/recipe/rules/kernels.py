"""Which backends a run may have, and what its machine must bring for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from trainspec_cli.core.errors import Problem, closest
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import IN_BLOCKS, KERNELS, TORCH, Backend
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.layout import size_of


def known_backends(spec: RunSpec) -> Iterator[Problem]:
    for op, backend in spec.kernels.by_op.items():
        path, allowed = f"kernels.{op}", (AUTO, *KERNELS[op])
        if backend not in allowed:
            message = f"`{path}` is {backend!r}; {', '.join(allowed[:-1])} or {allowed[-1]} is needed"
            near = closest(backend, allowed)
            yield Problem("wrong_choice", message, path, f"did you mean {path}={near}?" if near else "")


def used_operations(spec: RunSpec) -> Iterator[Problem]:
    """A kernel that was named is used."""
    for op, backend in _named(spec):
        if not backend_is_used(spec, op):
            message = f"`kernels.{op}` is {backend}, and this run has no such operation"
            yield Problem("unsupported", message, f"kernels.{op}", f"type kernels.{op}={TORCH}")


def backend_is_used(spec: RunSpec, op: str) -> bool:
    model = spec.model
    if op == "adamw":
        return spec.optim.name == "adamw"
    if model.unit == "samples":
        return False
    if op == "ssd_scan":
        return model.scans
    if op == "grouped_matmul":
        return model.experts is not None
    if op == "rope":
        return model.rotates
    ring = size_of(spec.layout, "cp") > 1 and spec.layout.context_method == "ring"
    return op != "attention" or not ring


def whole_vocabulary(spec: RunSpec) -> Iterator[Problem]:
    for op, backend in _named(spec):
        reason = KERNELS[op][backend].whole_vocabulary and size_of(spec.layout, "tp") > 1
        if reason:
            message = f"`kernels.{op}` is {backend}, which needs the whole vocabulary, and layout.tp cuts it"
            yield Problem("unsupported", message, f"kernels.{op}", f"type kernels.{op}={TORCH}, or layout.tp=1")


def seen_by_recompute(spec: RunSpec) -> Iterator[Problem]:
    """Selective recomputation of eager blocks watches each operation, and under its eyes nothing is fused."""
    if spec.recompute != "selective" or spec.compile:
        return
    for op, name in _named(spec):
        if op in IN_BLOCKS and KERNELS[op][name].needs_compiler:
            message = f"`kernels.{op}` is {name}, and recompute=selective follows single operations, which it fuses"
            hint = f"type kernels.{op}={TORCH}, recompute=full or compile=true"
            yield Problem("unsupported", message, f"kernels.{op}", hint)


KERNEL_RULES = (known_backends, used_operations, whole_vocabulary, seen_by_recompute)


def check_kernels(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """Return what this machine lacks for the backends that are named."""
    on_gpu = spec.cluster.device == "cuda" or (spec.cluster.device == AUTO and bool(machine.gpu_names))
    for op, name in _named(spec):
        path, backend = f"kernels.{op}", KERNELS[op][name]
        lack = lacking(backend, on_gpu=on_gpu)
        if lack:
            hint = f"type {path}={TORCH}"
            if lack == backend.missing_package() and (on_gpu or backend.on == "any"):
                hint = f"type pip install 'trainspec[{backend.extra}]', or {path}={TORCH}"
            message = f"`{path}` is {name}: {explain(backend, on_gpu=on_gpu)}"
            yield Problem("missing_kernel", message, path, hint, environment=True)


def lacking(backend: Backend, *, on_gpu: bool) -> str:
    """Name what the backend needs and is missing here; "" where nothing is."""
    if backend.on == "cuda" and not on_gpu:
        return "CUDA"
    if _torch_version() < backend.since_torch:
        return "torch"
    return backend.missing_package() or ("compiler" if backend.needs_compiler and not find_compiler() else "")


def explain(backend: Backend, *, on_gpu: bool) -> str:
    """`lacking` in words; "" where nothing is."""
    lack = lacking(backend, on_gpu=on_gpu)
    words = {
        "": "",
        "CUDA": "it runs on CUDA alone",
        "torch": f"it needs torch {'.'.join(map(str, backend.since_torch))}",
        "compiler": "no C++ compiler (g++, clang++) is on the PATH",
    }
    return words.get(lack, f"the package {lack} is not installed (pip install 'trainspec[{backend.extra}]')")


def why_untried(plan: Plan, op: str, name: str) -> str:
    """Why `auto` does not consider a backend; "" where it does."""
    backend, compiles = KERNELS[op][name], plan.spec.compile
    if op in IN_BLOCKS and compiles and backend.fused:
        return "blocks are compiled as they are"
    if op in IN_BLOCKS and not compiles and plan.recompute == "selective" and backend.needs_compiler:
        return "recompute=selective follows single operations"
    if backend.whole_vocabulary and plan.layout.tp > 1:
        return "layout.tp cuts the vocabulary"
    more = "it takes more memory than the plan counts, and is used where it is named" if backend.more_memory else ""
    return explain(backend, on_gpu=plan.device == "cuda") or more


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, if there is one."""
    candidates = [os.environ.get("CXX") or "g++", "g++", "clang++", "c++"]
    return next((found for found in map(shutil.which, candidates) if found), None)


def _named(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Operations with a backend that is neither the default nor left open nor unknown."""
    return ((op, name) for op, name in spec.kernels.changed.items() if name in KERNELS[op])


def _torch_version() -> tuple[int, int]:
    from importlib.metadata import version  # takes long to load, and few recipes name a kernel

    major, minor, *_ = version("torch").split(".")
    return int(major), int(minor)
