"""Virtual time: the duration of an operation or exchange on a chip, from the planner's rates for the chip and its
links. For matmuls and convolutions, the planner gives the time for their dimensions; for attention, the time for its
FLOPs. Any other operation takes the time to read and write its bytes at the chip's memory bandwidth."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.planner.hardware.cluster import (
    Fabric,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_of_ranks,
    latency_s,
    reduce_scatter_s,
    send_s,
    usual_gbit,
)
from trainspec_cli.planner.hardware.rates import Efficiency, build_accelerator, load_group, peak_flops_per_s
from trainspec_cli.planner.time.step import Rates, gemm_s, moved_s, product_s, rates_of
from trainspec_cli.planner.workload import Gemm
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.wings.emulated import DeviceDisturbance, Settings
from trainspec_cli.wings.emulated.engine.streams import HOST, Stream, current_stream

FIRST_FACTOR = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0}
"""Matmuls -> the index of the first operand in their arguments."""
GROUPED = "_grouped_mm"
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": (0, 4), ATTENTION_BACKWARD: (1, 7)}
"""The kernels that stand for all attention kernels (device.py) -> the indices of their arguments `query` and
`is_causal`."""
BACKWARD_FLOPS = 2.5
"""Ratio of the FLOPs of attention's backward pass to those of its forward pass (FlashAttention-2, arXiv:2307.08691)."""
CONVOLUTIONS = {"convolution": 0, "convolution_backward": 1}
"""Convolutions -> the index of their input in their arguments, which is followed by the weight."""
LOOKUPS = ("embedding", "index", "index_select", "gather")
"""Operations that read only those rows of their first tensor that they return."""
SCATTERS = ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
"""Operations that change only some rows of their first tensor."""
WRITES = ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
"""Operations that overwrite their first tensor without reading it."""
FREE = ("empty", "new_empty", "resize_", "set_")
"""Name prefixes of operations that do not access memory."""


@dataclass
class ChipCosts:
    """Durations in seconds on one rank's chip."""

    chip: AcceleratorSpec
    fabric: Fabric
    rank: int = 0
    disturbances: tuple[DeviceDisturbance, ...] = ()
    node_ranks: int = 1
    world_size: int = 1
    eff: Efficiency = field(default_factory=Efficiency)
    attention_generation: int = 2
    """Tensor core generation that torch's attention kernels are written for (`Rates.generation`)."""
    retried_s: float = -math.inf
    """Virtual host time when the allocator last released its unused memory."""
    _present: tuple[tuple[DeviceDisturbance, ...], float, float, list[DeviceDisturbance]] | None = None
    """The disturbances of this rank, and the interval of virtual time in which they do not change."""
    sources: dict[int, random.Random] = field(default_factory=dict)
    """Stream number -> the stream's noise generator. With separate generators, the noise does not depend on the order
    of the threads."""

    def rates(self, dtype: torch.dtype) -> Rates:
        if dtype.itemsize == 1 and dtype.is_floating_point:
            # The planner uses the same rate for e4m3 and e5m2, and assumes bf16 results.
            return rates_of(self.chip, "fp8", "bf16", self.eff)
        name = format_of(dtype)
        return rates_of(self.chip, name, name, self.eff)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the chip's peak FLOP/s according to its data sheet."""
        return peak_flops_per_s(self.chip, format_of(dtype))

    def memory_s(self, nbytes: float) -> float:
        """Return the time of a kernel that reads and writes a total of `nbytes` (planner/time/step.py)."""
        if not nbytes:
            return self.eff.kernel_s
        return moved_s(nbytes, self.rates(torch.bfloat16), self.eff)

    def _product_s(self, gemm: Gemm, dtype: torch.dtype, contiguous: Collection[int] = ()) -> float:
        """`contiguous`: the sizes of the dimensions that are contiguous in the factors and the result; if empty, these
        are the inner dimension and the columns. The kernel loads tiles along them."""
        if not gemm.flops:
            return 0.0
        loaded = replace(gemm, n=max(contiguous), k=min(contiguous)) if contiguous else gemm
        return product_s(gemm.m, gemm.n, gemm.k, loaded, self.rates(dtype), self.eff)

    def operation_s(self, op: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return the time of an operation. It depends on the shapes of its arguments and results."""
        name = op.overloadpacket.__name__
        if name.startswith(FREE):
            return 0.0
        if name in FIRST_FACTOR:
            first, second = args[FIRST_FACTOR[name] : FIRST_FACTOR[name] + 2]
            count = first.shape[0] if first.dim() == 3 else 1
            gemm = Gemm(first.shape[-2], second.shape[-1], first.shape[-1], count, wide=first.dtype.itemsize == 1)
            sides = [one.shape[-1] if one.stride(-1) == 1 else one.shape[-2] for one in (first, second)]
            return self._product_s(gemm, first.dtype, {*sides, second.shape[-1]})
        if name == GROUPED:
            # One launch runs the matmuls of all experts, each with the same number of rows: rows times weights (E, K,
            # N) or, for the gradient of the weights, transposed rows times rows.
            first, second = args[:2]
            experts = len(args[2])
            rows = first.shape[0] / experts if second.dim() == 3 else first.shape[0]
            inner = first.shape[1] if second.dim() == 3 else first.shape[1] / experts
            return self._product_s(Gemm(rows, second.shape[-1], inner, experts, wide=False), first.dtype)
        if name in ATTENTION:
            at, causal = ATTENTION[name]
            query, key = args[at : at + 2]
            batch, heads, length, width = query.shape
            flops = 4.0 * batch * heads * length * key.shape[2] * width * (0.5 if args[causal] else 1.0)
            rates = self.rates(query.dtype)
            older = self.eff.attention_older ** max(0, rates.generation - self.attention_generation)
            softmax_s = self.eff.exponentials * flops / (4.0 * width * rates.exponentials)
            if name == ATTENTION_BACKWARD:
                arithmetic_s = BACKWARD_FLOPS * flops / (older * rates.plain_matmul * self.eff.attention_backward)
            else:
                arithmetic_s = flops / (older * rates.plain_matmul * self.eff.attention_forward)
            return arithmetic_s + softmax_s + self.eff.kernel_s
        if name in CONVOLUTIONS:
            at = CONVOLUTIONS[name]
            image, weight = args[at : at + 2]
            is_transposed, _, groups = args[at + 6 : at + 9]
            outputs = result if name == "convolution" else args[0]
            gemm = convolution_gemm(image, weight, outputs, groups, is_transposed=is_transposed)
            once_s, *_ = gemm_s(gemm, self.rates(image.dtype), self.eff)
            if name == "convolution":
                return once_s
            *products, sums_gradient = args[-1]
            return sum(products) * once_s + sums_gradient * self.memory_s(nbytes_of(outputs))
        return self.memory_s(traffic_bytes(op, args, kwargs, result))

    def exchange_s(self, kind: str, ranks: Sequence[int], nbytes: float) -> float:
        """Return the time of an exchange among these global ranks; `nbytes` is the most that any rank sends or
        receives."""
        group = group_of_ranks(self.fabric, ranks, self.eff)
        if kind == "allreduce":
            return all_reduce_s(group, nbytes, self.eff)
        if kind == "allgather":
            return all_gather_s(group, nbytes, self.eff)
        if kind == "reducescatter":
            return reduce_scatter_s(group, nbytes, self.eff)
        if kind == "alltoall":
            return all_to_all_s(group, nbytes, 1, self.eff)
        if kind in ("send", "recv"):
            return send_s(group, nbytes, self.eff)
        return latency_s(group, self.eff) + nbytes / group.ring_bytes_per_s if group.size > 1 else 0.0

    def disturbances_at(self, at_s: float) -> list[DeviceDisturbance]:
        """Return the disturbances that affect this rank at a virtual host time."""
        if (known := self._present) is not None and known[0] is self.disturbances and known[1] <= at_s < known[2]:
            return known[3]
        # This is called for every operation, but the answer only changes when a disturbance starts or ends.
        own = [one for one in self.disturbances if one.concerns(self.rank, self.node_ranks)]
        present = [one for one in own if one.lasts_at(at_s)]
        end_s = min((one.changes_after_s(at_s) for one in own), default=math.inf)
        self._present = self.disturbances, at_s, end_s, present
        return present

    def factor(self, stream: Stream, at_s: float) -> float:
        """Return the slowdown factor of a stream's next operation if the operation is queued at `at_s`."""
        factor = 1.0
        jitter = 0.0
        for one in self.disturbances_at(at_s):
            factor *= one.slowness
            jitter = max(jitter, one.jitter)
        if jitter:
            source = self.sources.get(stream.number)
            if source is None:  # creating a seeded generator is the slowest part here
                source = self.sources[stream.number] = random.Random(f"{self.rank}/{stream.number}")
            factor *= source.lognormvariate(0.0, jitter)
        return factor

    def host_s(self, at_s: float, seconds: float = 0.0, work: str = "") -> float:
        """Return the host time for work that usually takes `seconds`, or for the work named `work`."""
        slowness = 1.0
        for one in self.disturbances_at(at_s):
            slowness *= one.host_slowness
            seconds += {"read": one.read_ms, "write": one.write_ms}.get(work, 0.0) / 1e3
        return slowness * seconds

    def attention_slowness(self, at_s: float) -> float:
        return math.prod(one.attention_slowness for one in self.disturbances_at(at_s))

    def retry_s(self, at_s: float) -> float:
        """Return how long fragmentation keeps this rank's host busy in an allocation; 0 if the allocator finds memory
        immediately."""
        present = [one for one in self.disturbances_at(at_s) if one.retry_ms]
        if not present or at_s - self.retried_s < min(one.retry_every_ms for one in present) / 1e3:
            return 0.0
        return sum(one.retry_ms for one in present) / 1e3

    def disturbed_exchange_s(self, kind: str, ranks: Sequence[int], nbytes: float, at_s: float, name: str) -> float:
        """Return the duration of an exchange that starts at `at_s`, which is the same on all ranks. `name` identifies
        the exchange within the run, and seeds its noise."""
        seconds = self.exchange_s(kind, ranks, nbytes)
        jitter = 0.0
        for one in self.disturbances:
            if not one.lasts_at(at_s) or not one.is_crossed_by(ranks, self.node_ranks, self.world_size):
                continue
            jitter = max(jitter, one.link_jitter)
            if one.link_slowness != 1.0:  # only the transfer slows down, not the latency
                seconds += (one.link_slowness - 1.0) * (seconds - self.exchange_s(kind, ranks, 1))
            seconds += messages_in_a_row(kind, len(ranks)) * one.link_delay_us / 1e6
        if jitter:
            seconds *= random.Random(name).lognormvariate(0.0, jitter)
        return seconds


def convolution_gemm(image: Tensor, weight: Tensor, outputs: Tensor, groups: int, *, is_transposed: bool) -> Gemm:
    """Return the implicit matrix multiplication of a convolution, which applies the weights at each position of its
    outputs or, if it is transposed, of its inputs."""
    rows = weight.shape[0]
    row = math.prod(weight.shape[1:])
    if is_transposed:
        return Gemm(image.numel() / rows, row, rows / groups, groups, wide=False, image=image.numel())
    return Gemm(outputs.numel() / rows, rows / groups, row, groups, wide=False, image=image.numel())


def format_of(dtype: torch.dtype) -> str:
    """Return the planner's name for the format in which a chip multiplies matrices of this type."""
    wide = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, wide)


def messages_in_a_row(kind: str, ranks: int) -> int:
    """Return how many messages an exchange sends one after another in a ring."""
    return {"allreduce": 2 * (ranks - 1), "allgather": ranks - 1, "reducescatter": ranks - 1}.get(kind, 1)


def nbytes_of(values: Any) -> int:
    """Return the total size of the tensors in `values`. Expanded dimensions count once."""
    return sum(
        leaf.dtype.itemsize
        * math.prod(size for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride or not size)
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor)
    )


def allowed_share(mask: Tensor) -> float:
    """Return the fraction of token pairs that an attention mask allows, given the mask's memory; 1 if the mask has no
    values."""
    if mask.is_meta:
        return 1.0
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        return float(allowed.float().mean())


def traffic_bytes(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    name = op.overloadpacket.__name__
    if name in LOOKUPS:
        return 2 * nbytes_of(result) + nbytes_of(args[1:])
    if name in SCATTERS:
        return 3 * nbytes_of(args[1:])
    if name.endswith("_like") or name.startswith("new_"):
        return nbytes_of(result)
    given = nbytes_of(args) + nbytes_of(kwargs)
    if not op._schema.is_mutable:
        return given + nbytes_of(result)
    if name.removeprefix("_foreach_") in WRITES:
        return given
    changed = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        # Optimizers write gradients only if they scale them.
        and (argument.name != "grads" or kwargs.get("grad_scale") is not None)
    ]
    return given + nbytes_of(changed)


def costs_of(settings: Settings, environment: Mapping[str, str]) -> ChipCosts | None:
    """Return the costs on the chip of a worker with this environment; None if there is no virtual time. Raises
    RecipeError if the chip is not in the catalogue."""
    if settings.time is None:
        return None
    chips = load_group("accelerator", build_accelerator)
    if settings.time not in chips:
        message = f"{EMULATED}: conf/accelerator has no chip `{settings.time}`"
        raise RecipeError(Problem("unknown_value", message, EMULATED, f"available chips: {', '.join(sorted(chips))}"))
    chip = chips[settings.time]
    rank = int(environment.get("RANK", "0"))
    world_size = int(environment.get("WORLD_SIZE", "1"))
    per_node = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    fabric = Fabric(chip, world_size, per_node, per_node, chip.link_gb_per_s, usual_gbit(chip))
    return ChipCosts(chip, fabric, rank, settings.disturbances, per_node, world_size)


def _shapes(args: Any) -> str:
    return " ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


class VirtualTime:
    """The virtual time of operations in this process."""

    costs: ChipCosts | None = None

    def start(self, settings: Settings) -> None:
        self.use(costs_of(settings, os.environ), settings)

    def use(self, costs: ChipCosts | None, settings: Settings) -> None:
        """Start virtual time with these costs. None turns it off."""
        self.costs = costs
        if self.costs is not None:
            HOST.is_virtual = True
            HOST.launch_s = self.costs.eff.launch_s if settings.launch_us is None else settings.launch_us / 1e6
            HOST.duration_s = self.costs.host_s

    def spend(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Queue an operation's duration in the current stream."""
        if self.costs is not None:
            stream = current_stream()
            HOST.launch()
            seconds = self.costs.operation_s(op, args, kwargs, result)
            name = op.overloadpacket.__name__
            factor = self.costs.factor(stream, HOST.now_s)
            slowness = self.costs.attention_slowness(HOST.now_s) if name in ATTENTION else 1.0
            mask = kwargs.get("attn_mask")
            allowed = partial(allowed_share, mask.memory) if mask is not None and slowness != 1.0 else None
            stream.spend(seconds * factor * slowness, name, lambda: _shapes(args), allowed)

    def copy_s(self, nbytes: int, *, inside: bool) -> float:
        """Return the duration of copying `nbytes` inside the device, or between host and device."""
        if self.costs is None:
            return 0.0
        HOST.launch()
        if inside:
            return self.costs.memory_s(nbytes) * self.costs.factor(current_stream(), HOST.now_s)
        return nbytes / (self.costs.fabric.host_link_gb_per_s * 1e9)


TIME = VirtualTime()
