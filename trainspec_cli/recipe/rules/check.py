"""All checks of a recipe: on its own, against the engine, and against a machine.

A rule yields problems. A rule that uses an unknown value (`records.UNKNOWN`: missing, of the wrong type or out of
range) stops there. As a result, one wrong number does not hide the problems of other keys, and no rule ever divides by
zero."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import cast

from trainspec_cli.core.errors import Problem, closest
from trainspec_cli.core.reading.files import expand, how_to_copy
from trainspec_cli.core.wings import MISSING_WING, Part, Point, find_wings, parts_of
from trainspec_cli.recipe.field_types import AUTO, AutoInt
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.kernels import IN_BLOCKS, KERNELS, TORCH, Backend
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.model import TextModel, TransformersModel
from trainspec_cli.recipe.keys.resilience import SitesSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import UNKNOWN, UnknownTouched
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.layout import (
    COMM_RULES,
    ELASTIC_RULES,
    FABRIC_RULES,
    LAYOUT_RULES,
    MODEL_RULES,
    POOL_RULES,
    RELAYOUT_RULES,
    TRAINING_RULES,
    divisors,
    fixed_groups,
    injected_faults,
    only_planned,
    pipeline_of,
    size_of,
    wanted_groups,
    whole_hosts,
)
from trainspec_cli.recipe.rules.run import (
    BATCHING_RULES,
    OPTIM_RULES,
    OWN_CODE_RULES,
    RUN_RULES,
    SLURM_RULES,
    TEXT_RULES,
    forget_out_of_range,
)

WITHOUT_PATH = {"python_stdlib": "data=text or data=jsonl", "phantom": "data=images or data=volumes"}
"""Sources that read no file -> what to set for a source that does."""
OF_FOLDERS = ("tokens", "images", "volumes")
OF_IDS = ("tokens", "nanogpt", "megatron")
"""Sources that contain token ids."""
OF_TABLES = ("parquet", "arrow")
TRACKERS = ("tensorboard", "wandb", "mlflow")
Rule = Callable[[RunSpec], Iterable[Problem]]


# Recipe keys that belong to a plug-in. The recipe format is a protocol, so these keys are known and checked even if the
# plug-in's folder has been deleted; only the plug-in interprets them. A recipe uses a plug-in if the plug-in's key has
# the plug-in's value. Parts of unused plug-ins are not loaded.


RULES: Point[Iterable[Callable[[RunSpec], Iterable[Problem]]]] = Point("rules")
"""Rules for recipes that use the plug-in."""
PACKAGES: Point[Iterable[tuple[str, str, str, str]]] = Point("packages")
"""(key, its value, the package that it needs, the trainspec extra that installs the package)"""


@dataclass(frozen=True)
class WingKeys:
    wing: str
    key: str
    value: str
    """The value of `key` that makes a recipe use the plug-in."""
    otherwise: str
    """What to set instead of using the plug-in."""
    section: str
    """The section of the plug-in's settings, which have no meaning without the plug-in."""
    defaults: object
    of_one_start: tuple[str, ...]
    """Keys of `section` that differ between starts. They are rejected in a sweep, and without the plug-in."""
    files: tuple[str, ...]
    """Keys in `of_one_start` that name a file. Relative paths are made absolute, so that every process of the run finds
    the file."""


WING_KEYS = (
    WingKeys(
        "sites",
        "resilience.mode",
        "sites",
        "resilience=restart",
        "resilience.sites",
        SitesSpec(),
        of_one_start=("site", "endpoint", "listen", "secret"),
        files=("secret",),
    ),
    WingKeys(
        *("ray", "cluster.manager", "ray", "cluster.manager=none", "cluster.manager", ClusterSpec.manager),
        of_one_start=(),
        files=(),
    ),
)


def parts_for(point: Point[Part], spec: RunSpec) -> list[Part]:
    """Return the parts that the plug-ins used by a recipe register at `point`."""
    used = [keys.wing for keys in WING_KEYS if attrgetter(keys.key)(spec) == keys.value]
    return parts_of(point, used) if used else []


def keys_of_wings(spec: RunSpec) -> Iterator[Problem]:
    """Reject keys of a plug-in that is not installed or not used."""
    for keys in WING_KEYS:
        is_used = attrgetter(keys.key)(spec) == keys.value
        section = attrgetter(keys.section)(spec)
        if keys.wing not in find_wings():
            path = keys.key if is_used else keys.section
            if is_used or section != keys.defaults:
                message = f"`{path}` is set, but the plug-in trainspec_cli/wings/{keys.wing} is not installed"
                yield Problem(MISSING_WING, message, path, f"reinstall trainspec, or set {keys.otherwise}")
            continue
        for name in keys.of_one_start if not is_used else ():
            if (value := getattr(section, name)) is not None:
                path = f"{keys.section}.{name}"
                message = f"`{path}` is {value}, but `{keys.key}` is {attrgetter(keys.key)(spec)}, not {keys.value}"
                yield Problem("usage", message, path, f"set {keys.key.partition('.')[0]}={keys.value}, or leave it out")


# Checks of the recipe on its own, and on a machine.


def check(spec: RunSpec) -> list[Problem]:
    """Return all problems that can be found without inspecting a machine."""
    rules: list[Rule] = [*MODEL_RULES, world_size, schedule, vocabulary, data_path, tokenizer, uncertainty, ownership]
    rules += [half_precision, largest_micro_batch, keys_of_wings]
    rules += [*RUN_RULES, *BATCHING_RULES, *COMM_RULES, *ELASTIC_RULES, *FABRIC_RULES, *KERNEL_RULES]
    rules += [*OPTIM_RULES, *POOL_RULES, *RELAYOUT_RULES, *SLURM_RULES, *TEXT_RULES, *OWN_CODE_RULES]
    # If the key that selects a plug-in is invalid, it is unknown whether the plug-in is used.
    with contextlib.suppress(UnknownTouched):
        rules += [rule for of_wing in parts_for(RULES, spec) for rule in of_wing]
    known, problems = forget_out_of_range(spec)
    return [*problems, *apply_in_range(rules, known)]


def check_engine(spec: RunSpec) -> list[Problem]:
    """Return what this version's engine cannot run."""
    return apply(
        [*BUILT, only_planned, own_framework, elastic_model, group_hosts, trained_formats, injected_faults], spec
    )


def check_built(spec: RunSpec) -> list[Problem]:
    """Return what the engine does not support on any machine, in the model and its layout."""
    return apply(BUILT, spec)


def check_machine(spec: RunSpec, machine: Machine) -> list[Problem]:
    """Return what is missing on this machine to run an otherwise correct recipe."""
    here: list[Rule] = [partial(rule, machine=machine) for rule in (gpus, matrix_units, check_kernels)]
    return apply([*here, packages, compiler, shared_memory], spec)


def apply(rules: Iterable[Rule], spec: RunSpec) -> list[Problem]:
    """Apply `rules` to the values that are in range; `check` reports the others individually."""
    return apply_in_range(rules, forget_out_of_range(spec)[0])


def apply_in_range(rules: Iterable[Rule], known: RunSpec) -> list[Problem]:
    """Apply `rules` to values that are all in range. Searches do this for many layouts of one recipe."""
    problems: list[Problem] = []
    for rule in rules:
        with contextlib.suppress(UnknownTouched):
            problems.extend(rule(known))
    return problems


def world_size(spec: RunSpec) -> Iterator[Problem]:
    """Require that the product of the axes equals the number of processes (per replica group). If an axis is auto, the
    product of the others must divide that number."""
    devices = spec.cluster.devices_per_node
    if devices == AUTO:
        return
    processes = spec.cluster.num_nodes * devices
    every = {axis: getattr(spec.layout, axis) for axis in MESH_AXES}
    sizes = {axis: size for axis, size in every.items() if size != AUTO}
    # Each replica group has its own mesh. Another rule rejects a number of groups that does not divide the processes.
    groups = fixed_groups(spec)
    if processes % groups == 0:
        processes //= groups
    product = math.prod(sizes.values())
    free = len(sizes) < len(MESH_AXES)
    if product == processes or (free and processes % product == 0):
        return
    axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "every axis=1"
    over = f" / {groups}" if groups > 1 else ""
    nodes = f"{spec.cluster.num_nodes} x {devices}{over} = {processes} processes"
    nodes += f" for each of {groups} replica groups" if groups > 1 else ""
    layout = f"{axes}, which does not divide the processes" if free else f"{axes}, which makes {product}"
    message = f"the cluster has {nodes} (nodes x devices), but the layout asks for {layout}"
    # Point to the largest axis as the most likely mistake or, if all axes are 1, to the axis that usually grows.
    path = f"layout.{max(sizes, key=lambda axis: (sizes[axis], axis == 'dp_shard'))}"
    others = product // max(sizes.values())
    hint = f"choose axes whose product divides {processes}, or change cluster.devices_per_node"
    if processes % others == 0:
        fitting = ", ".join(map(str, divisors(processes // others)))
        hint = f"set {path}=auto; with the other axes unchanged, it may be {fitting}"
    yield Problem("not_divisible", message, path, hint)


def schedule(spec: RunSpec) -> Iterator[Problem]:
    warmup = spec.optim.schedule.warmup_steps
    steps = spec.train.max_steps
    path = "optim.schedule.warmup_steps"
    if warmup >= steps >= 1:
        message = f"the learning rate would warm up for {warmup} steps in a run of {steps} (`train.max_steps`)"
        yield Problem(code="out_of_range", path=path, message=message, hint=f"set {path}={steps // 10}")
    decay = spec.optim.schedule.decay_fraction
    if warmup < steps and spec.optim.schedule.kind == "wsd" and warmup + decay * steps > steps:
        message = f"a warm-up of {warmup} steps and a decay over the last {decay:g} of {steps} steps overlap"
        hint = f"set optim.schedule.decay_fraction={math.floor((1 - warmup / steps) * 100) / 100:g} or less"
        yield Problem(code="out_of_range", path="optim.schedule.decay_fraction", message=message, hint=hint)


def vocabulary(spec: RunSpec) -> Iterator[Problem]:
    """Require an embedding row for every token."""
    if spec.model.unit == "samples":
        return
    # The size is known here only for a tokenizer that has not been trained yet; others are read later, with the data.
    wanted = spec.data.tokenizer.vocab_size
    rows = spec.model.vocab_size
    if spec.data.source not in OF_IDS and spec.data.tokenizer.is_trained and wanted > rows:
        path = "data.tokenizer.vocab_size"
        message = f"a tokenizer of {wanted} tokens does not fit a model with `model.vocab_size` {rows}"
        hint = f"set model.vocab_size={wanted}, or {path}={rows}"
        yield Problem(code="out_of_range", path=path, message=message, hint=hint)


def data_path(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.source == "mixture":
        if not spec.data.mixture:
            hint = "set data.mixture.NAME.source=jsonl data.mixture.NAME.path=<path> data.mixture.NAME.weight=1"
            yield Problem("missing_value", "`data.mixture` names no sources", "data.mixture", hint)
        elif spec.data.path is not None:
            message = "`data.path` is set, but each part of data=mixture has its own path"
            yield Problem("unsupported", message, "data.path", "set data.path=null")
    elif not spec.data.is_own:
        yield from _source_path(spec.data.source, spec.data.path, "data")
    for group in ("mixture", "validation"):
        for name, part in getattr(spec.data, group).items():
            if not part.is_own:
                yield from _source_path(part.source, part.path, f"data.{group}.{name}")
            if part.weight <= 0:
                message = f"`data.{group}.{name}.weight` is {part.weight:g}; expected a number greater than 0"
                yield Problem("out_of_range", message, f"data.{group}.{name}.weight")


def _source_path(source: str, path: str | None, where: str) -> Iterator[Problem]:
    chosen = f"data={source}" if where == "data" else source
    kind = "folder" if source in OF_FOLDERS else "file, folder or glob"
    if source in WITHOUT_PATH:
        if path is not None:
            message = f"`{where}.path` is {path}, but {chosen} reads no file"
            yield Problem("unsupported", message, f"{where}.path", f"set {WITHOUT_PATH[source]}")
    elif path is None:
        message = f"`{where}.path` is null; {chosen} reads a {kind}"
        hint = f"set {where}.path=<path>"
        yield Problem(code="missing_value", path=f"{where}.path", message=message, hint=hint)
    else:
        place = expand(path)
        # One match is enough, because a glob may match a million files.
        exists = place.is_dir() if source in OF_FOLDERS else place.exists()
        if not exists and (source in OF_FOLDERS or not any(glob.iglob(str(place), recursive=True))):  # noqa: PTH207
            yield _missing_file(f"{where}.path", path, kind)


def tokenizer(spec: RunSpec) -> Iterator[Problem]:
    """Require that a named tokenizer file exists, and reject a mixture whose parts would each train a separate
    tokenizer."""
    path = spec.data.tokenizer.path
    sources = {part.source for part in spec.data.mixture.values()}
    if spec.data.source == "mixture" and spec.data.tokenizer.is_trained and not sources <= set(OF_IDS):
        message = "the parts of a mixture share one tokenizer, but `data.tokenizer.path` is null"
        hint = "set data.tokenizer.path=<a tokenizer.json>, or set init.from to a checkpoint that has its own"
        yield Problem("missing_value", message, "data.tokenizer.path", hint)
    if path is not None and not expand(path).is_file():
        yield _missing_file("data.tokenizer.path", path, "file")


def _missing_file(path: str, value: str, kind: str) -> Problem:
    place = "" if expand(value).is_absolute() else f" in {Path.cwd()}"
    message = f"`{path}` is {value}; no such {kind}{place}"
    if remote := how_to_copy(value):
        return Problem("missing_file", f"`{path}` is {value}, which is not on this machine", path, remote)
    return Problem(code="missing_file", path=path, message=message, hint=f"set {path}=<the {kind}'s path>")


def uncertainty(spec: RunSpec) -> Iterator[Problem]:
    """Require that each key of `known_within` names a numeric key of its section, with a factor of at least 1."""
    for section in ("reliability", "site", "power", "cost"):
        values = getattr(spec.cluster, section)
        for key, factor in values.known_within.items():
            path = f"cluster.{section}.known_within.{key}"
            if not isinstance(getattr(values, key, ""), (int, float, type(None))):
                message = f"`{path}` does not name a numeric key of `cluster.{section}`"
                yield Problem(code="unknown_key", path=path, message=message, hint=f"type ~{path}")
            elif factor < 1:
                message = f"`{path}` is {factor:g}; expected a factor of at least 1 (2: between half and twice)"
                hint = f"set {path}={1 / factor:g}" if factor > 0 else ""
                yield Problem("out_of_range", message, path, hint)


def ownership(spec: RunSpec) -> Iterator[Problem]:
    if spec.cluster.cost.owned and spec.cluster.cost.device_price_usd is None:
        path = "cluster.cost.device_price_usd"
        message = f"`cluster.cost.owned` is true, and `{path}` has no value"
        yield Problem("missing_value", message, path, f"set {path}=<dollars>, or cost=owned")


def half_precision(spec: RunSpec) -> Iterator[Problem]:
    """Reject a chip without bf16 and fp16 rates. The planner derives missing rates from bf16, or from fp16 for a chip
    without bf16."""
    chips = {f"cluster.pools.{place}.accelerator": pool.accelerator for place, pool in enumerate(spec.cluster.pools)}
    if spec.cluster.accelerator is not None:
        chips["cluster.accelerator"] = spec.cluster.accelerator
    for section, chip in chips.items():
        if chip.bf16_tflops == chip.fp16_tflops == 0:
            path = f"{section}.bf16_tflops"
            message = f"`{path}` and `{section}.fp16_tflops` are 0; expected a value for one of them"
            yield Problem("missing_value", message, path, "set it to the rate in the chip's data sheet")


def largest_micro_batch(spec: RunSpec) -> Iterator[Problem]:
    """Reject a limit below every rank's initial micro-batch, because the scheduler could not respect it."""
    usual = spec.batching.micro_batch_size
    most = spec.scheduler.max_micro_batch_size
    if usual != AUTO and most != AUTO and most < usual:
        path = "scheduler.max_micro_batch_size"
        message = f"`{path}` is {most}, but `batching.micro_batch_size` is already {usual}"
        yield Problem("out_of_range", message, path, f"set {path}={usual} or more, or auto")


def gpus(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """Reject a machine without the usable GPUs requested by `cluster.device` or by the accelerator's name.

    Without this rule, a run on a node with a broken driver could train on its CPUs for days unnoticed."""
    cluster = spec.cluster
    found = len(machine.gpu_names)
    wanted = spec.cluster.devices_per_node
    if cluster.device == "cpu":
        return
    named = cluster.accelerator is not None and cluster.accelerator.vendor != "cpu"
    if machine.gpu_problem:
        yield machine.gpu_problem
    elif not found and (cluster.device == "cuda" or named):
        asked_by = "cluster.device"
        value = "cuda"
        if cluster.device != "cuda" and cluster.accelerator is not None:
            asked_by = "cluster.accelerator"
            value = cluster.accelerator.name
        message = f"`{asked_by}` is {value}, but {machine.hostname} has no GPU"
        hint = "set cluster.device=cpu to train on its CPUs, or run on a machine with a GPU (nvidia-smi lists GPUs)"
        yield _lacking("no_gpu", asked_by, message, hint)
    elif found and wanted != AUTO and wanted > found:
        message = f"`cluster.devices_per_node` is {wanted}, but {machine.hostname} has {found} GPUs"
        hint = f"set cluster.devices_per_node={found}, or auto"
        yield _lacking("too_few_gpus", "cluster.devices_per_node", message, hint)


def matrix_units(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """Reject formats in which the GPUs cannot multiply matrices; CPUs emulate them."""
    if spec.cluster.device == "cpu" or not machine.gpu_names:
        return
    if spec.precision.compute == "bf16" and not machine.bf16:
        got = f"`precision.compute` is bf16, which {machine.gpu_names[-1]} does not support (Ampere and later do)"
        yield _lacking("no_bf16", "precision.compute", got, "set precision=fp32, or precision.compute=auto")
    if spec.precision.matmul == "fp8" and not machine.fp8:
        got = f"`precision.matmul` is fp8, which {machine.gpu_names[0]} does not support (Ada, Hopper and later do)"
        yield _lacking("no_fp8", "precision.matmul", got, "set precision.matmul=compute")


def packages(spec: RunSpec) -> Iterator[Problem]:
    """Require the optional packages that the recipe needs, which extras of trainspec install."""
    tracked = [(f"tracking.{name}", "true", name, name) for name in TRACKERS if getattr(spec.tracking, name)]
    sources = {"data.source": spec.data.source}
    for group in ("mixture", "validation"):
        sources |= {f"data.{group}.{name}.source": part.source for name, part in getattr(spec.data, group).items()}
    tables = [(path, source, "pyarrow", "hf") for path, source in sources.items() if source in OF_TABLES]
    scaled = [("precision.matmul", "fp8", "torchao", "float8")] if spec.precision.matmul == "fp8" else []
    if isinstance(spec.model, TransformersModel):
        scaled.append(("model.backend", spec.model.backend, "transformers", "transformers"))
    of_wings = [needed for of_wing in parts_for(PACKAGES, spec) for needed in of_wing]
    for path, value, package, extra in (*tracked, *tables, *scaled, *of_wings):
        # Locate them without importing them, because some take seconds to load.
        if importlib.util.find_spec(package) is None:
            message = f"`{path}` is {value}, but the package {package} is not installed"
            yield _lacking("missing_package", path, message, f"run pip install 'trainspec[{extra}]'")


def compiler(spec: RunSpec) -> Iterator[Problem]:
    """Require a C++ compiler: torch.compile generates C++ for CPUs and a C launcher for each GPU kernel."""
    if spec.compile and not find_compiler():
        message = "`compile` is true, but no C++ compiler (g++, clang++) is on the PATH"
        yield _lacking("missing_compiler", "compile", message, "set compile=false, or install one (apt install g++)")


def shared_memory(spec: RunSpec) -> Iterator[Problem]:
    """Require /dev/shm if the state is copied to memory."""
    path = "checkpoint.memory_interval_steps"
    if spec.checkpoint.memory_interval_steps is not None and not Path("/dev/shm").is_dir():
        yield _lacking(
            "no_shared_memory", path, f"`{path}` needs /dev/shm, which is missing on this node", f"set {path}=null"
        )


def _lacking(code: str, path: str, message: str, hint: str) -> Problem:
    return Problem(code=code, path=path, message=message, hint=hint, environment=True)


# Which backends a run can use, and what they need from the machine.


def known_backends(spec: RunSpec) -> Iterator[Problem]:
    for op, backend in spec.kernels.by_op.items():
        path = f"kernels.{op}"
        allowed = (AUTO, *KERNELS[op])
        if backend not in allowed:
            message = f"`{path}` is {backend!r}; expected {', '.join(allowed[:-1])} or {allowed[-1]}"
            near = closest(backend, allowed)
            yield Problem("wrong_choice", message, path, f"did you mean {path}={near}?" if near else "")


def used_operations(spec: RunSpec) -> Iterator[Problem]:
    """Reject a backend for an operation that the run does not use."""
    for op, backend in _named(spec):
        if not backend_is_used(spec, op):
            message = f"`kernels.{op}` is {backend}, but this run has no such operation"
            yield Problem("unsupported", message, f"kernels.{op}", f"set kernels.{op}={TORCH}")


def backend_is_used(spec: RunSpec, op: str) -> bool:
    model = spec.model
    if op == "adamw":
        return spec.optim.name == "adamw"
    if model.unit == "samples" or "kernels" in model.record.refuses:
        return False
    if op == "ssd_scan":
        return model.scans
    if op == "grouped_matmul":
        return model.experts is not None
    if op == "rope":
        return model.rotates
    # Ring attention has a separate kernel, which passes on keys and values while it computes.
    ring = size_of(spec.layout, "cp") > 1 and spec.layout.context_method == "ring"
    return op != "attention" or not ring


def whole_vocabulary(spec: RunSpec) -> Iterator[Problem]:
    for op, backend in _named(spec):
        reason = KERNELS[op][backend].whole_vocabulary and size_of(spec.layout, "tp") > 1
        if reason:
            message = f"`kernels.{op}` is {backend}, which needs the full vocabulary, but layout.tp shards it"
            yield Problem("unsupported", message, f"kernels.{op}", f"set kernels.{op}={TORCH}, or layout.tp=1")
        elif KERNELS[op][backend].whole_vocabulary and getattr(spec.model, "logit_softcap", None):
            message = f"`kernels.{op}` is {backend}, which does not limit logits (`model.logit_softcap`)"
            yield Problem("unsupported", message, f"kernels.{op}", f"set kernels.{op}={TORCH}")


def seen_by_recompute(spec: RunSpec) -> Iterator[Problem]:
    """Reject fused kernels in eager blocks with selective recomputation, which must observe each operation."""
    if spec.recompute != "selective" or spec.compile:
        return
    for op, name in _named(spec):
        if op in IN_BLOCKS and KERNELS[op][name].needs_compiler:
            message = f"`kernels.{op}` is {name}, which fuses operations that recompute=selective must see one by one"
            hint = f"set kernels.{op}={TORCH}, recompute=full or compile=true"
            yield Problem("unsupported", message, f"kernels.{op}", hint)


KERNEL_RULES = (known_backends, used_operations, whole_vocabulary, seen_by_recompute)


def check_kernels(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """Return what is missing on this machine for the named backends."""
    on_gpu = spec.cluster.device == "cuda" or (spec.cluster.device == AUTO and bool(machine.gpu_names))
    for op, name in _named(spec):
        path = f"kernels.{op}"
        backend = KERNELS[op][name]
        lack = lacking(backend, on_gpu=on_gpu)
        if lack:
            hint = f"set {path}={TORCH}"
            if lack == backend.missing_package() and (on_gpu or backend.on == "any"):
                hint = f"run pip install 'trainspec[{backend.extra}]', or {path}={TORCH}"
            message = f"`{path}` is {name}: {explain(backend, on_gpu=on_gpu)}"
            yield Problem("missing_kernel", message, path, hint, environment=True)


def lacking(backend: Backend, *, on_gpu: bool) -> str:
    """Return the name of a requirement of the backend that is missing on this machine; "" if nothing is missing."""
    if backend.on == "cuda" and not on_gpu:
        return "CUDA"
    from importlib.metadata import version  # it is slow to load, and few recipes name a kernel

    if tuple(map(int, version("torch").split(".")[:2])) < backend.since_torch:
        return "torch"
    return backend.missing_package() or ("compiler" if backend.needs_compiler and not find_compiler() else "")


def explain(backend: Backend, *, on_gpu: bool) -> str:
    """Describe `lacking` in words; "" if nothing is missing."""
    lack = lacking(backend, on_gpu=on_gpu)
    words = {
        "": "",
        "CUDA": "it runs only on CUDA",
        "torch": f"it needs torch {'.'.join(map(str, backend.since_torch))}",
        "compiler": "no C++ compiler (g++, clang++) is on the PATH",
    }
    return words.get(lack, f"the package {lack} is not installed (pip install 'trainspec[{backend.extra}]')")


def why_untried(plan: Plan, op: str, name: str) -> str:
    """Return why `auto` does not consider a backend; "" if it does consider it."""
    backend = KERNELS[op][name]
    compiles = plan.spec.compile
    if op in IN_BLOCKS and compiles and backend.fused:
        return "compiled blocks keep the default"
    if op in IN_BLOCKS and not compiles and plan.recompute == "selective" and backend.needs_compiler:
        return "recompute=selective must see each operation"
    if backend.whole_vocabulary and plan.layout.tp > 1:
        return "layout.tp shards the vocabulary"
    if backend.whole_vocabulary and getattr(plan.spec.model, "logit_softcap", None):
        return "it does not limit logits (model.logit_softcap)"
    more = "it needs more memory than the plan counts, so it is used only if named" if backend.more_memory else ""
    return explain(backend, on_gpu=plan.device == "cuda") or more


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    candidates = [os.environ.get("CXX") or "g++", "g++", "clang++", "c++"]
    return next((found for found in map(shutil.which, candidates) if found), None)


def _named(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield operations whose backend is known and is neither the default nor `auto`."""
    return ((op, name) for op, name in spec.kernels.changed.items() if name in KERNELS[op])


# Values that can be specified and planned but not trained yet. The engine rejects them instead of ignoring them.


TRAINED = {"compute": ("bf16", "fp32", AUTO), "matmul": ("compute", "fp8")}
"""The formats in `precision` that this version's engine supports; the first one is the one to suggest."""
FP8_MULTIPLE = 16
"""Kernels need matrices whose sides are multiples of this number."""


def close_axes(spec: RunSpec) -> RunSpec:
    """Return `spec` with every axis except those of data parallelism set to 1 if it is `auto`, as a launch resolves
    it."""
    if spec.layout is UNKNOWN:
        return spec

    def close(size: AutoInt) -> AutoInt:
        return 1 if size is not UNKNOWN and size == AUTO else size

    old = spec.layout
    new = replace(old, cp=close(old.cp), tp=close(old.tp), pp=close(old.pp), ep=close(old.ep), etp=close(old.etp))
    return replace(spec, layout=new)


def own_framework(spec: RunSpec) -> Iterator[Problem]:
    """Reject launches with a framework other than trainspec's own engine, because such runs can only be planned."""
    if not spec.framework.counted:
        message = f"`framework` is {spec.framework.name}, whose runs can be planned but not started"
        hint = "leave `framework` out, or run `trainspec plan`; `trainspec emit` writes other engines' configurations"
        yield Problem("unsupported", message, "framework", hint)


def data_matches_model(spec: RunSpec) -> Iterator[Problem]:
    """Require images or volumes for convolutional models, and tokens for text models."""
    model = spec.model
    data = spec.data
    if model.unit == "samples" and data.unit == "tokens":
        message = f"data={data.source} is text, but a {model.family} model reads images or volumes"
        yield Problem("unsupported", message, "data.source", "set data=phantom, data=images or data=volumes")
    elif model.unit == "tokens" and data.unit == "samples":
        message = f"data={data.source} has no tokens, which a {model.family} model needs"
        yield Problem("unsupported", message, "data.source", "set data=text, or choose another model")
    elif model.unit == "samples" and data.seq_len != 1:
        message = f"`data.seq_len` is {data.seq_len}; a sample is one image or volume"
        yield Problem("unsupported", message, "data.seq_len", "set data.seq_len=1")


def compiled_model(spec: RunSpec) -> Iterator[Problem]:
    reason = spec.model.record.refuses.get("compile")
    if spec.compile and reason:
        yield Problem("unsupported", reason, "compile", "set compile=false")


def group_hosts(spec: RunSpec) -> Iterator[Problem]:
    yield from whole_hosts(spec.cluster.num_nodes, wanted_groups(spec))


def elastic_model(spec: RunSpec) -> Iterator[Problem]:
    reason = spec.model.record.refuses.get("elastic")
    if spec.resilience.mode == "elastic" and reason:
        yield Problem("unsupported", reason, "resilience.mode", "set resilience=restart")


def float8(spec: RunSpec) -> Iterator[Problem]:
    """Reject fp8 linear layers if the family does not allow them, or if the kernels do not support the shapes of a
    rank's matrices."""
    if spec.precision.matmul != "fp8":
        return
    refused = spec.model.record.refuses.get("fp8")
    found = {"precision.matmul": refused} if refused else {}
    if not refused:
        model = cast("TextModel", spec.model)
        tp = size_of(spec.layout, "tp")
        sides = {
            "model.hidden_size": model.hidden_size,
            "model.ffn_size": model.ffn_size / tp,
            "model.num_heads": model.num_heads * model.head_dim / tp,
            "model.num_kv_heads": model.num_kv_heads * model.head_dim / tp,
        }
        for path, side in sides.items():
            if side % FP8_MULTIPLE:
                multiple = f"which is not a multiple of {FP8_MULTIPLE}"
                found[path] = f"`{path}` gives a rank a matrix with a side of {side:g}, {multiple}"
    for path, reason in found.items():
        yield Problem("unsupported", f"`precision.matmul` is fp8: {reason}", path, "set precision.matmul=compute")
    if not refused and pipeline_of(spec.layout).splits_backward:
        path = "layout.pipeline_schedule"
        split = f"{spec.layout.pipeline_schedule} splits each linear layer's backward, which fp8 layers cannot split"
        hint = f"set {path}=1f1b, or precision.matmul=compute"
        yield Problem("unsupported", f"`precision.matmul` is fp8: {split}", path, hint)


def trained_formats(spec: RunSpec) -> Iterator[Problem]:
    for key, allowed in TRAINED.items():
        value = getattr(spec.precision, key)
        if value not in allowed:
            path = f"precision.{key}"
            message = f"`{path}` is {value}; this version trains with {' or '.join(allowed)}"
            hint = f"set {path}={allowed[0]}, or predict it with trainspec plan and the same arguments"
            yield Problem("unsupported", message, path, hint)


BUILT: tuple[Rule, ...] = (data_matches_model, compiled_model, *TRAINING_RULES, *LAYOUT_RULES, float8)
