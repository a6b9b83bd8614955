"""Rules for the formats in which gradients and parameters travel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from trainspec_cli.core.errors import Problem, closest
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import IN_BLOCKS, KERNELS, TORCH, Backend
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import FaultSyntaxError, parse_faults
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.layout import LAYOUT_RULES, size_of
from trainspec_cli.recipe.structure import UNKNOWN

GRADIENTS = "comm.gradients"
PARAMETERS = "comm.parameters"
ACROSS = "comm.across_nodes"
BUCKETS = "comm.bucket_bytes"
LEFT_OPEN = ("full", AUTO, None)
"""Values that ask for no fewer bits."""


def fp32_sums(spec: RunSpec) -> Iterator[Problem]:
    """Compressed gradients are summed in fp32."""
    asked = [path for path in (GRADIENTS, ACROSS) if getattr(spec.comm, path.rpartition(".")[2]) not in ("full", None)]
    if asked and spec.precision.reduce != "fp32":
        value = getattr(spec.comm, asked[0].rpartition(".")[2])
        message = f"`{asked[0]}` is {value}, whose sums are made in fp32, and `precision.reduce` is bf16"
        yield Problem("unsupported", message, "precision.reduce", f"type precision.reduce=fp32, or {asked[0]}=full")


def parameter_format(spec: RunSpec) -> Iterator[Problem]:
    """Four bits hold differences from the weights of the step before, which each rank would have to keep whole."""
    if spec.comm.parameters == "int4":
        message = (
            f"`{PARAMETERS}` is int4; whole weights lose too much in 4 bits, and no rank keeps those of a step ago"
        )
        yield Problem("unsupported", message, PARAMETERS, f"type {PARAMETERS}=int8")


def several_nodes(spec: RunSpec) -> Iterator[Problem]:
    if spec.comm.across_nodes is not None and spec.cluster.num_nodes == 1 and not spec.cluster.pools:
        message = f"`{ACROSS}` is {spec.comm.across_nodes}, and `cluster.num_nodes` is 1"
        yield Problem("unsupported", message, ACROSS, f"type {ACROSS}=null, or {GRADIENTS}={spec.comm.across_nodes}")


def exchanged(spec: RunSpec, layout: Layout, replica_groups: int) -> Iterator[Problem]:
    """Refuse formats of exchanges that the layout does not have."""
    comm = spec.comm
    described = layout.describe()
    fewer_bits = [
        path for path, value in ((GRADIENTS, comm.gradients), (ACROSS, comm.across_nodes)) if value not in LEFT_OPEN
    ]
    if fewer_bits and layout.shards * layout.dp_replicate * replica_groups == 1:
        value = getattr(comm, fewer_bits[0].rpartition(".")[2])
        message = f"`{fewer_bits[0]}` is {value}, and in this layout ({described}) no ranks sum gradients"
        hint = f"type {fewer_bits[0]}=full, or choose a layout with dp_shard or dp_replicate of 2 or more"
        yield Problem("unsupported", message, fewer_bits[0], hint)
    if comm.parameters != "full" and layout.shards == 1:
        message = f"`{PARAMETERS}` is {comm.parameters}, and in this layout ({described}) no rank gathers parameters"
        yield Problem("unsupported", message, PARAMETERS, f"type {PARAMETERS}=full, or layout.dp_shard=2 (or more)")


def joined(spec: RunSpec, layout: Layout, device: str) -> Iterator[Problem]:
    """Refuse a size of buckets where the gradients of several blocks never go together."""
    size = spec.comm.bucket_bytes
    why = ""
    if not size:
        return
    if device == "cuda":
        why = "on GPUs FSDP2 sums the gradients of each block by themselves"
    elif layout.shards * layout.dp_replicate == 1:
        why = f"in this layout ({layout.describe()}) no ranks sum gradients"
    elif spec.comm.gradients not in LEFT_OPEN or spec.comm.across_nodes not in LEFT_OPEN:
        why = "in fewer bits each block's gradients travel by themselves"
    if why:
        yield Problem("unsupported", f"`{BUCKETS}` is {size:,}, and {why}", BUCKETS, f"type {BUCKETS}=null")


COMM_RULES = (fp32_sums, parameter_format, several_nodes)


# Rules for replica groups and injected faults.


ELASTIC_WITHOUT_NUMBER = 2
"""Groups where neither `resilience.replica_groups` nor `layout.dp_replicate` says how many."""


def wanted_groups(spec: RunSpec) -> int:
    """Replica groups of a launch."""
    if spec.resilience.mode != "elastic":
        return 1
    if spec.resilience.replica_groups != AUTO:
        return int(spec.resilience.replica_groups)
    replicas = spec.layout.dp_replicate
    return ELASTIC_WITHOUT_NUMBER if replicas in (AUTO, 1) else int(replicas)


def fixed_groups(spec: RunSpec) -> int:
    """Count the groups beside the layout's own axes: `layout.dp_replicate` may count the groups itself."""
    counted_by_layout = spec.resilience.replica_groups == AUTO and spec.layout.dp_replicate not in (AUTO, 1)
    return 1 if counted_by_layout else wanted_groups(spec)


def groups(spec: RunSpec) -> Iterator[Problem]:
    """Two groups at least, of equally many processes."""
    path = "resilience.replica_groups"
    number = spec.resilience.replica_groups
    if spec.resilience.mode != "elastic":
        if number not in (AUTO, 1):
            message = f"`{path}` is {number}, and `resilience.mode` is {spec.resilience.mode}, which has no groups"
            yield Problem("unsupported", message, path, "type resilience=elastic")
        return
    number = wanted_groups(spec)
    if number == 1:
        message = f"`{path}` is 1; one group has no other to heal from"
        yield Problem("out_of_range", message, path, f"type {path}=2 or more, or resilience=restart")
    if spec.resilience.min_groups > number:
        path = "resilience.min_groups"
        message = f"`{path}` is {spec.resilience.min_groups}, and there are {number} replica groups"
        yield Problem("out_of_range", message, path, f"type {path}={number} or less")


def group_processes(spec: RunSpec) -> Iterator[Problem]:
    devices = spec.cluster.devices_per_node
    number = wanted_groups(spec)
    if devices == AUTO or spec.cluster.num_nodes * devices % number == 0:
        return
    processes = spec.cluster.num_nodes * devices
    message = f"{processes} processes do not divide over {number} replica groups"
    hint = f"type cluster.devices_per_node={max(1, devices // number) * number}, or another resilience.replica_groups"
    yield Problem("not_divisible", message, "resilience.replica_groups", hint)


def whole_hosts(num_nodes: int, number: int) -> Iterator[Problem]:
    """The loss of a node must not take parts of several replica groups along."""
    if number == 1 or num_nodes % number == 0 or number % num_nodes == 0:
        return
    path = "resilience.replica_groups"
    message = f"{num_nodes} nodes do not divide over {number} replica groups, nor the groups over the nodes"
    fitting = [n for n in range(2, 2 * num_nodes + 1) if num_nodes % n == 0 or n % num_nodes == 0]
    near = sorted(fitting, key=lambda n: abs(n - number))[:3]
    yield Problem("not_divisible", message, path, f"type {path}={' or '.join(map(str, sorted(near)))}")


def faults(spec: RunSpec) -> Iterator[Problem]:
    try:
        parsed = parse_faults(spec.fault)
    except FaultSyntaxError as error:
        yield Problem("bad_fault", f"`fault`: {error}", "fault", "type fault='kill(group=1,step=40)'")
        return
    number = wanted_groups(spec)
    for fault in parsed:
        if fault.group >= number:
            message = f"`fault` is for replica group {fault.group}, and the groups are numbered 0 to {number - 1}"
            yield Problem("out_of_range", message, "fault", "type fault='kill(group=0,step=40)'")
        if fault.kind in ("lighthouse", "bitflip") and number == 1:
            message = f"`fault` {fault.kind} is felt by replica groups alone"
            yield Problem("unsupported", message, "fault", "type resilience=elastic")


ELASTIC_RULES = (groups, group_processes, faults)


# Which backends a run may have, and what its machine must bring for them.


def known_backends(spec: RunSpec) -> Iterator[Problem]:
    for op, backend in spec.kernels.by_op.items():
        path = f"kernels.{op}"
        allowed = (AUTO, *KERNELS[op])
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
        path = f"kernels.{op}"
        backend = KERNELS[op][name]
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
    backend = KERNELS[op][name]
    compiles = plan.spec.compile
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


# Rules for a layout that changes while the run goes on.


PATH = "scheduler.changes"


def changed_specs(spec: RunSpec) -> list[RunSpec]:
    """Return the recipe as it would be with each of the layouts that it changes to from the start on."""
    if spec.layout is UNKNOWN:
        return []
    return [replace(spec, layout=change.of(spec.layout)) for change in spec.scheduler.changes]


def changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """Each layout that the run changes to is legal in itself."""
    for place, (changed, change) in enumerate(zip(changed_specs(spec), spec.scheduler.changes, strict=False)):
        for problem in (found for rule in LAYOUT_RULES for found in rule(changed)):
            field = problem.path.rpartition(".")[2]
            path = f"{PATH}.{place}.{field}" if hasattr(change, field) else problem.path
            message = f"the layout from step {change.step} on: {problem.message}"
            hint = problem.hint and f"in {PATH}.{place}: {problem.hint.replace('layout.', '')}"
            yield replace(problem, message=message, path=path, hint=hint)


def order_of_changes(spec: RunSpec) -> Iterator[Problem]:
    """Changes come one after another, before the last step."""
    changes = spec.scheduler.changes
    for place, (before, change) in enumerate(pairwise(changes), 1):
        if change.step <= before.step:
            message = f"`{PATH}.{place}.step` is {change.step}, and the change before it comes at {before.step}"
            hint = f"put the changes in their order, each at a later step: {before.step + 1} or more"
            yield Problem("out_of_range", message, f"{PATH}.{place}.step", hint)
    late = [place for place, change in enumerate(changes) if change.step >= spec.train.max_steps]
    if late and spec.batching.schedule.kind == "constant":
        message = f"`{PATH}.{late[0]}.step` is {changes[late[0]].step}, in a run of {spec.train.max_steps} steps"
        yield Problem("out_of_range", message, f"{PATH}.{late[0]}.step", f"type {spec.train.max_steps - 1} or less")


def one_replica_group(spec: RunSpec) -> Iterator[Problem]:
    """Replica groups heal from one another part by part, and so keep one layout."""
    if spec.scheduler.changes and spec.resilience.mode == "elastic":
        message = "replica groups (`resilience.mode` is elastic) keep their layout: they heal from one another"
        yield Problem("unsupported", message, PATH, f"type resilience=restart, or ~{PATH}")


def closed_axes(spec: RunSpec) -> Iterator[Problem]:
    """A change builds on axes that are known before the search for a layout."""
    for place, (changed, change) in enumerate(zip(changed_specs(spec), spec.scheduler.changes, strict=False)):
        open_axes = [axis for axis in ("cp", "tp", "pp", "ep") if getattr(changed.layout, axis) == AUTO]
        if open_axes:
            message = f"the layout from step {change.step} on leaves {', '.join(open_axes)} to the planner"
            hint = f"name {open_axes[0]} in {PATH}.{place}, or type layout.{open_axes[0]}=1"
            yield Problem("unsupported", message, f"{PATH}.{place}.{open_axes[0]}", hint)


RELAYOUT_RULES = (changed_layouts, order_of_changes, one_replica_group, closed_axes)
