"""Rules that join several values: what divides what, what excludes what, what must be there.

A rule yields problems. A rule that meets an unknown value (see `unknown.py`), one that misses, is mistyped or is out of
its range, says nothing: so one wrong number does not hide the others' faults, and no rule divides by zero.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.reading.files import expand, how_to_copy
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.comm import (
    COMM_RULES,
    ELASTIC_RULES,
    KERNEL_RULES,
    RELAYOUT_RULES,
    check_kernels,
    find_compiler,
    fixed_groups,
)
from trainspec_cli.recipe.rules.layout import BATCHING_RULES, FABRIC_RULES, MODEL_RULES, POOL_RULES, divisors
from trainspec_cli.recipe.rules.run import (
    OPTIM_RULES,
    OWN_CODE_RULES,
    RUN_RULES,
    SLURM_RULES,
    TEXT_RULES,
    forget_out_of_range,
)
from trainspec_cli.recipe.structure import UnknownTouched
from trainspec_cli.recipe.wings import PACKAGES, RULES, keys_of_wings, parts_for

WITHOUT_PATH = {"python_stdlib": "data=text or data=jsonl", "phantom": "data=images or data=volumes"}
"""Sources that read no file, and what to type for those that do."""
OF_FOLDERS = ("tokens", "images", "volumes")
OF_IDS = ("tokens", "nanogpt", "megatron")
"""Sources that were tokenised before."""
OF_TABLES = ("parquet", "arrow")
TRACKERS = ("tensorboard", "wandb", "mlflow")
Rule = Callable[[RunSpec], Iterable[Problem]]


def check(spec: RunSpec) -> list[Problem]:
    """All problems that can be found without a machine."""
    rules: list[Rule] = [
        *MODEL_RULES,
        world_size,
        schedule,
        vocabulary,
        data_path,
        one_tokenizer,
        tokenizer,
        uncertainty,
        ownership,
        half_precision,
        largest_micro_batch,
        keys_of_wings,
    ]
    rules += [*RUN_RULES, *BATCHING_RULES, *COMM_RULES, *ELASTIC_RULES, *FABRIC_RULES, *KERNEL_RULES]
    rules += [*OPTIM_RULES, *POOL_RULES, *RELAYOUT_RULES, *SLURM_RULES, *TEXT_RULES, *OWN_CODE_RULES]
    with contextlib.suppress(UnknownTouched):
        rules += [rule for of_wing in parts_for(RULES, spec) for rule in of_wing]
    return [*forget_out_of_range(spec)[1], *apply(rules, spec)]


def check_machine(spec: RunSpec, machine: Machine) -> list[Problem]:
    """Return what this machine lacks for a recipe that is right in itself."""
    here: list[Rule] = [lambda spec: gpus(spec, machine), lambda spec: matrix_units(spec, machine)]
    here.append(lambda spec: check_kernels(spec, machine))
    return apply([*here, packages, compiler, shared_memory], spec)


def check_packages_of_data(spec: RunSpec) -> list[Problem]:
    """Return the packages that this machine lacks to read the data, whatever machine the recipe is for."""
    return [problem for problem in apply([packages], spec) if problem.path.startswith("data.")]


def apply(rules: Iterable[Rule], spec: RunSpec) -> list[Problem]:
    """Apply `rules` to the values that are in range; `check` reports the others one by one."""
    return apply_in_range(rules, forget_out_of_range(spec)[0])


def apply_in_range(rules: Iterable[Rule], known: RunSpec) -> list[Problem]:
    """Apply `rules` to values of which none is out of its range; searches do so for many layouts of one recipe."""
    problems: list[Problem] = []
    for rule in rules:
        with contextlib.suppress(UnknownTouched):
            problems.extend(rule(known))
    return problems


def world_size(spec: RunSpec) -> Iterator[Problem]:
    """The axes' product is the number of processes (of a replica group); where an axis is auto, the others' product
    divides it."""
    processes = count_processes(spec)
    sizes = _fixed_axes(spec)
    groups = fixed_groups(spec)
    if processes is not None and processes % groups == 0:
        processes //= groups
    product = math.prod(sizes.values())
    free = len(sizes) < len(MESH_AXES)
    if processes is None or product == processes or (free and processes % product == 0):
        return
    axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "every axis=1"
    over = f" / {groups}" if groups > 1 else ""
    nodes = f"{spec.cluster.num_nodes} x {spec.cluster.devices_per_node}{over} = {processes} processes"
    nodes += f" for each of {groups} replica groups" if groups > 1 else ""
    layout = f"{axes}, which does not divide them" if free else f"{axes}, which makes {product}"
    message = f"the cluster has {nodes} (nodes x devices), the layout asks for {layout}"
    path = _largest_axis(sizes)
    hint = _fitting(sizes, processes)
    yield Problem(code="not_divisible", path=path, message=message, hint=hint)


def count_processes(spec: RunSpec) -> int | None:
    """num_nodes x devices_per_node, or None where that is left to the machine."""
    devices = spec.cluster.devices_per_node
    return None if devices == AUTO else spec.cluster.num_nodes * devices


def _fixed_axes(spec: RunSpec) -> dict[str, int]:
    sizes = {axis: getattr(spec.layout, axis) for axis in MESH_AXES}
    return {axis: size for axis, size in sizes.items() if size != AUTO}


def _largest_axis(sizes: dict[str, int]) -> str:
    """The one to look at first; of axes that are all 1, the one that usually grows."""
    return f"layout.{max(sizes, key=lambda axis: (sizes[axis], axis == 'dp_shard'))}" if sizes else "layout"


def _fitting(sizes: dict[str, int], processes: int) -> str:
    axis = _largest_axis(sizes)
    others = math.prod(sizes.values()) // max(sizes.values())
    if processes % others:
        return f"choose axes whose product divides {processes}, or change cluster.devices_per_node"
    fitting = ", ".join(map(str, divisors(processes // others)))
    return f"type {axis}=auto; where the other axes stay, it may be {fitting}"


def schedule(spec: RunSpec) -> Iterator[Problem]:
    warmup = spec.optim.schedule.warmup_steps
    steps = spec.train.max_steps
    path = "optim.schedule.warmup_steps"
    if warmup >= steps >= 1:
        message = f"the learning rate would warm up for {warmup} steps in a run of {steps} (`train.max_steps`)"
        yield Problem(code="out_of_range", path=path, message=message, hint=f"type {path}={steps // 10}")
    decay = spec.optim.schedule.decay_fraction
    if warmup < steps and spec.optim.schedule.kind == "wsd" and warmup + decay * steps > steps:
        message = f"a warm-up of {warmup} steps and a decay over the last {decay:g} of {steps} steps overlap"
        hint = f"type optim.schedule.decay_fraction={math.floor((1 - warmup / steps) * 100) / 100:g} or less"
        yield Problem(code="out_of_range", path="optim.schedule.decay_fraction", message=message, hint=hint)


def vocabulary(spec: RunSpec) -> Iterator[Problem]:
    """Every token has a row in the embedding."""
    if spec.model.unit == "samples":
        return
    wanted = spec.data.tokenizer.vocab_size
    rows = spec.model.vocab_size
    if spec.data.source not in OF_IDS and spec.data.tokenizer.is_trained and wanted > rows:
        path = "data.tokenizer.vocab_size"
        message = f"a tokenizer of {wanted} tokens does not fit a model with `model.vocab_size` {rows}"
        hint = f"type model.vocab_size={wanted}, or {path}={rows}"
        yield Problem(code="out_of_range", path=path, message=message, hint=hint)


def data_path(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.source == "mixture":
        if not spec.data.mixture:
            hint = "type data.mixture.NAME.source=jsonl data.mixture.NAME.path=<path> data.mixture.NAME.weight=1"
            yield Problem("missing_value", "`data.mixture` names nothing to mix", "data.mixture", hint)
        elif spec.data.path is not None:
            message = "`data.path` is given, but each part of data=mixture has a path of its own"
            yield Problem("unsupported", message, "data.path", "type data.path=null")
    elif not spec.data.is_own:
        yield from _source_path(spec.data.source, spec.data.path, "data")
    for group in ("mixture", "validation"):
        for name, part in getattr(spec.data, group).items():
            if not part.is_own:
                yield from _source_path(part.source, part.path, f"data.{group}.{name}")
            if part.weight <= 0:
                message = f"`data.{group}.{name}.weight` is {part.weight:g}; a number of more than 0 is needed"
                yield Problem("out_of_range", message, f"data.{group}.{name}.weight")


def _source_path(source: str, path: str | None, where: str) -> Iterator[Problem]:
    chosen = f"data={source}" if where == "data" else source
    kind = "folder" if source in OF_FOLDERS else "file, folder or glob"
    if source in WITHOUT_PATH:
        if path is not None:
            message = f"`{where}.path` is {path}, but {chosen} reads no file of yours"
            yield Problem("unsupported", message, f"{where}.path", f"type {WITHOUT_PATH[source]}")
    elif path is None:
        message = f"`{where}.path` is null; {chosen} reads a {kind}"
        hint = f"type {where}.path=<path>"
        yield Problem(code="missing_value", path=f"{where}.path", message=message, hint=hint)
    elif not _exists(path, folder_only=source in OF_FOLDERS):
        yield _missing_file(f"{where}.path", path, kind)


def one_tokenizer(spec: RunSpec) -> Iterator[Problem]:
    """Parts of a mixture cannot each train a tokenizer of their own."""
    sources = {part.source for part in spec.data.mixture.values()}
    if spec.data.source == "mixture" and spec.data.tokenizer.is_trained and not sources <= set(OF_IDS):
        message = "the parts of a mixture are read with one tokenizer, and `data.tokenizer.path` is null"
        hint = "type data.tokenizer.path=<a tokenizer.json>, or begin with a checkpoint, which brings its own"
        yield Problem("missing_value", message, "data.tokenizer.path", hint)


def tokenizer(spec: RunSpec) -> Iterator[Problem]:
    path = spec.data.tokenizer.path
    if path is not None and not expand(path).is_file():
        yield _missing_file("data.tokenizer.path", path, "file")


def _exists(path: str, *, folder_only: bool) -> bool:
    expanded = expand(path)
    if folder_only:
        return expanded.is_dir()
    return expanded.exists() or any(glob.iglob(str(expanded), recursive=True))  # noqa: PTH207


def _missing_file(path: str, value: str, kind: str) -> Problem:
    place = "" if expand(value).is_absolute() else f" in {Path.cwd()}"
    message = f"`{path}` is {value}; there is no such {kind}{place}"
    if remote := how_to_copy(value):
        return Problem("missing_file", f"`{path}` is {value}, which is not on this machine", path, remote)
    return Problem(code="missing_file", path=path, message=message, hint=f"type {path}=<the {kind}'s path>")


def uncertainty(spec: RunSpec) -> Iterator[Problem]:
    """A value that is known within a factor is a number of its section, and the factor is at least 1."""
    for section in ("reliability", "site", "power", "cost"):
        values = getattr(spec.cluster, section)
        for key, factor in values.known_within.items():
            path = f"cluster.{section}.known_within.{key}"
            if not isinstance(getattr(values, key, ""), (int, float, type(None))):
                message = f"`{path}` speaks of a number that `cluster.{section}` does not have"
                yield Problem(code="unknown_key", path=path, message=message, hint=f"type ~{path}")
            elif factor < 1:
                message = f"`{path}` is {factor:g}; a factor of at least 1 is needed (2: between half and twice)"
                hint = f"type {path}={1 / factor:g}" if factor > 0 else ""
                yield Problem("out_of_range", message, path, hint)


def ownership(spec: RunSpec) -> Iterator[Problem]:
    if spec.cluster.cost.owned and spec.cluster.cost.device_price_usd is None:
        path = "cluster.cost.device_price_usd"
        message = f"`cluster.cost.owned` is true, and `{path}` has no value"
        yield Problem(code="missing_value", path=path, message=message, hint=f"type {path}=<dollars>, or cost=owned")


def half_precision(spec: RunSpec) -> Iterator[Problem]:
    """The planner counts the rates that a chip does not name from that of bf16, or of fp16 where it has no bf16."""
    chip = spec.cluster.accelerator
    path = "cluster.accelerator.bf16_tflops"
    if chip is not None and chip.bf16_tflops == chip.fp16_tflops == 0:
        message = f"`{path}` is 0, and `cluster.accelerator.fp16_tflops` too; one of them is needed"
        yield Problem("missing_value", message, path, f"type {path}=<the rate of the chip's data sheet>")


def largest_micro_batch(spec: RunSpec) -> Iterator[Problem]:
    """The scheduler cannot stay below the micro-batch that every rank begins with."""
    usual = spec.batching.micro_batch_size
    most = spec.scheduler.max_micro_batch_size
    if usual != AUTO and most != AUTO and most < usual:
        path = "scheduler.max_micro_batch_size"
        message = f"`{path}` is {most}, and `batching.micro_batch_size` is {usual} already"
        yield Problem("out_of_range", message, path, f"type {path}={usual} or more, or auto")


def gpus(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """GPUs that a recipe asks for, by `cluster.device` or by naming the accelerator, are there and can be used.

    Without this rule, a run on a node whose driver is broken would train on its CPUs for days unnoticed.
    """
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
        message = f"`{asked_by}` is {value}, and {machine.hostname} shows no GPU"
        hint = "type cluster.device=cpu to train on its CPUs, or run where there is one (nvidia-smi lists them)"
        yield _lacking("no_gpu", asked_by, message, hint)
    elif found and wanted != AUTO and wanted > found:
        message = f"`cluster.devices_per_node` is {wanted}, and {machine.hostname} has {found} GPUs"
        hint = f"type cluster.devices_per_node={found}, or auto"
        yield _lacking("too_few_gpus", "cluster.devices_per_node", message, hint)


def matrix_units(spec: RunSpec, machine: Machine) -> Iterator[Problem]:
    """A GPU multiplies a format or not; a CPU emulates it."""
    if spec.cluster.device == "cpu" or not machine.gpu_names:
        return
    if spec.precision.compute == "bf16" and not machine.bf16:
        got = f"`precision.compute` is bf16, which {machine.gpu_names[-1]} does not multiply (Ampere and later do)"
        yield _lacking("no_bf16", "precision.compute", got, "type precision=fp32, or precision.compute=auto")
    if spec.precision.matmul == "fp8" and not machine.fp8:
        got = f"`precision.matmul` is fp8, which {machine.gpu_names[0]} does not multiply (Ada, Hopper and later do)"
        yield _lacking("no_fp8", "precision.matmul", got, "type precision.matmul=compute")


def packages(spec: RunSpec) -> Iterator[Problem]:
    """The packages that an extra brings are installed."""
    tracked = [(f"tracking.{name}", "true", name, name) for name in TRACKERS if getattr(spec.tracking, name)]
    sources = {"data.source": spec.data.source}
    for group in ("mixture", "validation"):
        sources |= {f"data.{group}.{name}.source": part.source for name, part in getattr(spec.data, group).items()}
    tables = [(path, source, "pyarrow", "hf") for path, source in sources.items() if source in OF_TABLES]
    scaled = [("precision.matmul", "fp8", "torchao", "float8")] if spec.precision.matmul == "fp8" else []
    of_wings = [needed for of_wing in parts_for(PACKAGES, spec) for needed in of_wing]
    for path, value, package, extra in (*tracked, *tables, *scaled, *of_wings):
        if importlib.util.find_spec(package) is None:
            message = f"`{path}` is {value}, and the package {package} is not installed"
            yield _lacking("missing_package", path, message, f"type pip install 'trainspec[{extra}]'")


def compiler(spec: RunSpec) -> Iterator[Problem]:
    """torch.compile writes C++ for a CPU, and a C launcher for each GPU kernel."""
    if spec.compile and not find_compiler():
        message = "`compile` is true, and no C++ compiler (g++, clang++) is on the PATH"
        yield _lacking("missing_compiler", "compile", message, "type compile=false, or install one (apt install g++)")


def shared_memory(spec: RunSpec) -> Iterator[Problem]:
    """Copies of the state are kept in files that lie in memory."""
    path = "checkpoint.memory_interval_steps"
    if spec.checkpoint.memory_interval_steps is not None and not Path("/dev/shm").is_dir():
        yield _lacking("no_shared_memory", path, f"`{path}` needs /dev/shm, which this node lacks", f"type {path}=null")


def _lacking(code: str, path: str, message: str, hint: str) -> Problem:
    return Problem(code=code, path=path, message=message, hint=hint, environment=True)
