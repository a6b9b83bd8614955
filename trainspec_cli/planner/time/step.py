"""Time of one optimizer step, by phase: compute, exposed communication by axis, pipeline bubble, optimizer, host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import cast

from trainspec_cli.planner.hardware.rates import Efficiency, matmul_flops_per_s, memory_bytes_per_s
from trainspec_cli.planner.hardware.topology import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    axis_groups,
    group_of,
    latency_s,
    reduce_scatter_s,
    send_s,
)
from trainspec_cli.planner.pipeline import cut_layers
from trainspec_cli.planner.setup import UPDATE_BYTES, WIRE_BYTES, Recompute, Setup, matrix_share, newton_schulz_flops
from trainspec_cli.planner.time.compute import LayerTime, Rates, layer_time, rates_of, ungrouped
from trainspec_cli.planner.workload import embedding_work, head_work, layer_works
from trainspec_cli.planner.workload.work import Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import TextModel
from trainspec_cli.recipe.keys.training import WireFormat
from trainspec_cli.recipe.results.plan import StepTime

# The costs of data parallelism's exchanges in each format: bytes on the wire, and the encoding of what goes there.
#
# The bytes of a value are those of `engine/comm/codec.py`. Encoding is bound by memory: `ENCODING_BYTES` counts what
# the operations of one reduce-scatter move through it for each value, feedback and decoding included. On one core of
# an EPYC, which moves 6 GB/s, it took 21 ns a value in int8 and 25 ns in int4; counted are 14 and 21.


GRADIENT_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}
"""Bytes of a value, with its share of a block's scale."""
PARAMETER_BYTES: dict[WireFormat, float] = {"bf16": 2.0, "int8": 1 + 2 / 2048}
ENCODING_BYTES: dict[WireFormat, float] = {"bf16": 16.0, "int8": 85.0, "int4": 125.0}
SECOND_ENCODING = 0.5
"""Share of an all-reduce whose sums are encoded once more: each rank encodes its own part alone, and decodes all."""


def scatter_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of a reduce-scatter of gradients that have `full_bytes` in full."""
    return _gradients_s(group, full_bytes, setup, eff, passes=1, encodings=1.0)


def sum_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of an all-reduce of gradients."""
    return _gradients_s(group, full_bytes, setup, eff, passes=2, encodings=1 + SECOND_ENCODING)


def gather_s(group: Group, full_bytes: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of a gathering of parameters that have `full_bytes` in full, two for each."""
    chosen = setup.software.wire.parameters
    if chosen == "full":
        return all_gather_s(group, full_bytes, eff)
    values = full_bytes / 2.0
    return all_gather_s(group, values * PARAMETER_BYTES[chosen], eff) + _encoding_s(group, chosen, values, setup, eff)


def _gradients_s(
    group: Group, full_bytes: float, setup: Setup, eff: Efficiency, *, passes: int, encodings: float
) -> float:
    wire = setup.software.wire
    chosen = wire.across_nodes if group.crosses else wire.gradients
    if chosen == "full":
        full_s = reduce_scatter_s if passes == 1 else all_reduce_s
        return full_s(group, full_bytes, eff)
    values = full_bytes / setup.software.reduce_bytes
    exchange_s = all_gather_s(group, values * GRADIENT_BYTES[chosen], eff)
    return passes * exchange_s + encodings * _encoding_s(group, chosen, values, setup, eff)


def _encoding_s(group: Group, chosen: WireFormat, values: float, setup: Setup, eff: Efficiency) -> float:
    if group.size <= 1:
        return 0.0
    return ENCODING_BYTES[chosen] * values / memory_bytes_per_s(setup.fabric.chip, eff)


PACKET_BYTES = 2**20
"""Gradients that cross replica groups at once, at least (`LARGE_BYTES` of `engine/elastic/cross_group.py`)."""
BLOCK_MATRICES = 7
"""Weight matrices of a block: four of attention, three of a gated MLP."""
PASSES = {"tp": 2, "cp": 3, "ep": 2}
"""Number of times that a micro-batch exchanges in each layer what its forward does: once more in the backward, and for
context parallelism twice more, which gathers keys and values again and reduces their gradients."""


@dataclass(frozen=True)
class LayerComm:
    """Exposed communication inside layers, forward; a whole micro-batch takes `PASSES` times as long."""

    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def plus(self, other: LayerComm, times: float = 1.0) -> LayerComm:
        return LayerComm(self.tp + times * other.tp, self.cp + times * other.cp, self.ep + times * other.ep)


def layer_comm(work: Work, setup: Setup, groups: dict[str, Group], eff: Efficiency) -> LayerComm:
    """Exposed, forward, of one part of a layer."""
    copies = work.expert_copies if setup.software.grouped_experts else 1
    first = 1 / setup.layout.tp  # chunk of a ring, before there is anything to multiply
    hidden_tp = eff.tp_overlap * (1 - first) if setup.software.overlap_tp else 0.0
    tp = work.tp_exchanges * all_reduce_s(groups["tp"], work.tp_bytes, eff) * (1 - hidden_tp)
    cp = all_gather_s(groups["cp"], work.cp_bytes, eff) * (1 - eff.cp_overlap)
    hidden_ep = eff.ep_overlap
    if groups["ep"].crosses and setup.software.grouped_experts:
        hidden_ep = eff.ep_overlap_network
    # Tokens are sent to their experts, and the results back.
    ep = 2 * all_to_all_s(groups["ep"], work.ep_bytes, copies, eff) * (1 - hidden_ep)
    return LayerComm(tp, cp, ep * ungrouped(work, setup, eff))


@dataclass(frozen=True)
class LayersPart:
    """Some layers, one micro-batch: compute, communication, parameters of a rank."""

    time: LayerTime = field(default_factory=LayerTime)
    comm: LayerComm = field(default_factory=LayerComm)
    params: float = 0.0
    expert_params: float = 0.0

    def plus(self, other: LayersPart, times: float = 1.0) -> LayersPart:
        return LayersPart(
            self.time.plus(other.time, times),
            self.comm.plus(other.comm, times),
            self.params + times * other.params,
            self.expert_params + times * other.expert_params,
        )


def part_of(work: Work | None, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> LayersPart:
    if work is None:
        return LayersPart()
    comm = layer_comm(work, setup, groups, eff)
    return LayersPart(layer_time(work, setup, rates, eff), comm, work.params, work.expert_params)


def recompute_part_s(part: LayersPart, again: Recompute) -> float:
    """Forward work, and where matmuls are among it its communication, done again in the backward."""
    time = part.time
    work = again.matmul * time.matmul_f + again.attention * time.attention_f + again.elementwise * time.memory_f
    if again.full:
        work += part.comm.tp + part.comm.cp + part.comm.ep
    return again.layers * work


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch through each kind of layer, and through what stands before and after them.

    Depends on the axes that cut a layer (tp, cp, ep) and not on those that spread layers or samples, so that a
    search computes it once for many layouts.
    """

    kinds: tuple[LayersPart, ...]
    before: tuple[tuple[int, ...], ...]
    """The number of layers of each kind that stand before each layer, and in the whole model."""
    embedding: LayersPart
    head: LayersPart
    rates: Rates

    @classmethod
    def of(
        cls, kinds: Sequence[LayersPart], order: Sequence[int], embedding: LayersPart, head: LayersPart, rates: Rates
    ) -> MicroBatch:
        """`order`: the kind of each layer, by its number."""
        if len(kinds) == 1:
            before = [tuple(range(len(order) + 1))]
        else:
            before = [tuple(accumulate((kind == own for own in order), initial=0)) for kind in range(len(kinds))]
        return cls(tuple(kinds), tuple(before), embedding, head, rates)

    @property
    def num_layers(self) -> int:
        return len(self.before[0]) - 1

    @cached_property
    def layer(self) -> LayersPart:
        """The average over the model's layers."""
        return LayersPart().plus(self.layers(self.numbers([range(self.num_layers)])), 1.0 / self.num_layers)

    def numbers(self, stages: Iterable[range]) -> tuple[int, ...]:
        """Layers of each kind in some stages."""
        return tuple(sum(before[stage.stop] - before[stage.start] for stage in stages) for before in self.before)

    def layers(self, numbers: Sequence[int]) -> LayersPart:
        """Return the part with so many layers of each kind."""
        total = LayersPart()
        for part, number in zip(self.kinds, numbers, strict=True):
            total = total.plus(part, number)
        return total

    def kind_of(self, layer: int) -> int:
        return next(kind for kind, before in enumerate(self.before) if before[layer + 1] > before[layer])


def micro_batch(setup: Setup, groups: dict[str, Group], eff: Efficiency) -> MicroBatch:
    layout = setup.layout
    model = setup.model
    rates = rates_of(setup.fabric.chip, setup.matmul, setup.compute, eff)
    layers = layer_works(model, setup.tokens, setup.seq_len, layout)
    # `layer_works` has one object for each kind of layer: 100 equal layers are timed once.
    kinds = dict(zip(map(id, layers), layers, strict=True))
    parts = [sum_of(part_of(work, setup, rates, groups, eff) for work in works) for works in kinds.values()]
    places = {kind: place for place, kind in enumerate(kinds)}
    order = list(map(places.__getitem__, map(id, layers)))
    head = part_of(head_work(model, setup.tokens, layout), setup, rates, groups, eff)
    embedding = part_of(embedding_work(model, setup.tokens, layout), setup, rates, groups, eff)
    once = MicroBatch.of(parts, order, embedding, head, rates)
    head = with_prediction_layers(head, once.layer, setup)
    if setup.tabled:
        return MicroBatch.of((once.layer,), [0] * len(order), embedding, head, rates)
    return replace(once, head=head)


def sum_of(parts: Iterable[LayersPart]) -> LayersPart:
    total = LayersPart()
    for part in parts:
        total = total.plus(part)
    return total


def estimate_step(setup: Setup, eff: Efficiency) -> StepTime:
    """Predict one step. Its error on published runs: `trainspec backtest`."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    return assemble_step(setup, micro_batch(setup, groups, eff), groups, eff)


def assemble_step(setup: Setup, once: MicroBatch, groups: dict[str, Group], eff: Efficiency) -> StepTime:
    """Assemble a whole step under the setup's layout from the parts of a micro-batch."""
    return step_of_rank(slowest_rank(once, setup, eff), setup, once.rates, groups, eff)


def slowest_rank(once: MicroBatch, setup: Setup, eff: Efficiency) -> TimedRank:
    """Return the pipeline rank that the others wait for.

    While a pipeline fills and drains, the others wait for its kernels to be launched too: a small model's stages take
    as long as their launches.
    """
    ranks = rank_parts(once, setup.layout)
    # Most ranks of a long pipeline are one object (`rank_parts`), and a search times thousands of pipelines.
    distinct = {id(rank): rank for rank in ranks}
    device_s = {key: rank.time_s(setup) for key, rank in distinct.items()}
    launched_s = {
        key: device_s[key] + host_wait_s(rank.whole, device_s[key], setup, eff) for key, rank in distinct.items()
    }
    times = [launched_s[id(rank)] for rank in ranks]
    slowest = ranks[max(range(len(times)), key=times.__getitem__)]
    return TimedRank(slowest, device_s[id(slowest)], eff.bubble * bubble_s(times, setup.layout, setup.grad_accum))


def step_of_rank(timed: TimedRank, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> StepTime:
    """Return the step as one pipeline rank spends it."""
    part = timed.rank.whole
    micro = setup.grad_accum
    again = recompute_part_s(timed.rank.layers, setup.recompute)
    between = between_steps_s(setup, eff)
    sends = pipeline_sends_s(setup, groups["pp"], eff)
    busy = StepTime(
        matmul_s=micro * (part.time.matmul_f + part.time.matmul_b),
        attention_s=micro * (part.time.attention_f + part.time.attention_b),
        memory_bound_s=micro * (part.time.memory_f + part.time.memory_b),
        recompute_s=micro * again,
        tp_comm_s=micro * PASSES["tp"] * part.comm.tp,
        cp_comm_s=micro * PASSES["cp"] * part.comm.cp,
        ep_comm_s=micro * PASSES["ep"] * part.comm.ep,
        pp_comm_s=sends,
        bubble_s=timed.bubble_s,
        optimizer_s=optimizer_s(part, setup, rates, groups, eff),
        dp_comm_s=data_parallel_s(part, setup, groups, eff),
        host_s=micro * host_wait_s(part, timed.time_s, setup, eff) + between,
    )
    # Devices wait for the slowest one where they meet, which the host's pause between two steps does not lengthen.
    return replace(busy, host_s=busy.host_s + waiting_share(setup, eff) * (busy.total_s - between))


def between_steps_s(setup: Setup, eff: Efficiency) -> float:
    """Seconds of the host between two steps."""
    return eff.step_graphed_s if setup.software.graphs else eff.step_s


def waiting_share(setup: Setup, eff: Efficiency) -> float:
    """Share of a step's work that waiting for the slowest device adds."""
    return eff.jitter * math.log2(max(1.0, setup.fabric.num_devices / 8))


def with_prediction_layers(head: LayersPart, layer: LayersPart, setup: Setup) -> LayersPart:
    """Multi-token prediction repeats a layer and the head on the last stage."""
    model = setup.model
    if model.prediction_layers:
        once = head.plus(layer)
        return head.plus(once, model.prediction_layers)
    return head


@dataclass(frozen=True)
class RankParts:
    """One micro-batch through all stages of a pipeline rank."""

    layers: LayersPart
    beside: LayersPart = field(default_factory=LayersPart)
    """The embedding and the head, where they are; nothing of them is done again."""

    @property
    def whole(self) -> LayersPart:
        return self.layers.plus(self.beside)

    def time_s(self, setup: Setup) -> float:
        """Forward and backward."""
        again = self.whole if setup.tabled else self.layers
        return own_work_s(self.whole) + recompute_part_s(again, setup.recompute)

    def compute_s(self, setup: Setup) -> float:
        """The same without what layers exchange, except in the forward that is done again."""
        return self.whole.time.forward + self.whole.time.backward + recompute_part_s(self.layers, setup.recompute)


@dataclass(frozen=True)
class TimedRank:
    """A pipeline rank in a step."""

    rank: RankParts
    time_s: float
    """Of one micro-batch, forward and backward."""
    bubble_s: float
    """What it waits for the others in the whole step."""


def rank_parts(once: MicroBatch, layout: Layout) -> list[RankParts]:
    """Return each pipeline rank's part: of its stages' layers, and of the ends that it holds. Ranks without an end that
    have the same layers are one object."""
    stages = cut_layers(once.num_layers, layout)
    numbers = [once.numbers([stages[stage] for stage in layout.stages_of_rank(rank)]) for rank in range(layout.pp)]
    parts = {number: RankParts(once.layers(number)) for number in set(numbers)}
    ranks = [parts[number] for number in numbers]
    for stage, end in ((0, once.embedding), (layout.num_stages - 1, once.head)):
        rank = layout.rank_of_stage(stage)
        ranks[rank] = RankParts(ranks[rank].layers, ranks[rank].beside.plus(end))
    return ranks


def own_work_s(part: LayersPart) -> float:
    """One micro-batch through it and back, nothing done again."""
    work_s = part.time.forward + part.time.backward
    return work_s + PASSES["tp"] * part.comm.tp + PASSES["cp"] * part.comm.cp + PASSES["ep"] * part.comm.ep


def layer_s(part: LayersPart, again: Recompute) -> float:
    """One micro-batch through layers and back, with what the backward recomputes."""
    return own_work_s(part) + recompute_part_s(part, again)


def bubble_s(stage_s: Sequence[float], layout: Layout, micro_batches: int) -> float:
    """Return how long a step's slowest stage waits while the pipeline fills and drains."""
    return layout.bubble_of(micro_batches) * (sum(stage_s) - max(stage_s))


def pipeline_sends_s(setup: Setup, group: Group, eff: Efficiency) -> float:
    """Exposed sends of activations and their gradients between stages."""
    layout = setup.layout
    if layout.pp == 1:
        return 0.0
    # With sequence parallelism a tensor-parallel rank has a part of the sequence, and sends no more than that.
    parts = layout.tp if layout.sequence_parallel or setup.software.split_sends else 1
    message = 2.0 * setup.tokens * setup.model.hidden_size / parts
    one = send_s(group, message, eff) * (1 - eff.pp_overlap)
    # Sends that fill and drain the pipeline have no work to hide behind, unlike those of each micro-batch.
    return 2 * layout.virtual_stages * setup.grad_accum * one + 2 * (layout.pp - 1) * send_s(group, message, eff)


def host_wait_s(part: LayersPart, device_s: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds by which launching a micro-batch's kernels takes longer than running them."""
    if setup.software.graphs:
        return 0.0
    kernels = part.time.kernels + (0 if setup.software.grouped_experts else 6 * part.time.experts)
    # A backward launches about two kernels for each one of the forward.
    launches = kernels * (3.0 + setup.recompute.matmul * setup.recompute.layers)
    if setup.software.fused_kernels:
        launches *= 0.7
    return max(0.0, launches * eff.launch_s - device_s)


def optimizer_s(part: LayersPart, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> float:
    """Gradients, master weights and moments through memory once each way; over the host link when offloaded. Where an
    update is several operations, what each of them reads and writes."""
    layout = setup.layout
    software = setup.software
    params = setup.trainable * (part.params / layout.shards + part.expert_params / layout.expert_shards)
    traffic = params * (software.grad_bytes + 2 * software.master_bytes + 2 * software.moment_bytes + 2)
    if setup.offload_optimizer:
        # Gradients go to the host and bf16 weights come back; the update runs there, at 100 GB/s of its memory.
        return params * (software.grad_bytes + 2) / (setup.fabric.host_link_gb_per_s * 1e9) + traffic / 100e9
    if software.optimizer == "adamw8bit":
        traffic += params * UPDATE_BYTES["adamw8bit"]
    usual_s = eff.optimizer_passes * traffic / rates.memory
    return usual_s + (orthogonalise_s(params, setup, rates, groups, eff) if software.optimizer == "muon" else 0.0)


def orthogonalise_s(params: float, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> float:
    """Seconds of muon's own: operations on this rank's `params`, matrices that travel to the rank that has them whole
    and back, and Newton-Schulz on those that it has. The ranks of dp_shard, cp and tp divide a model's matrices among
    them, and each stage has its own; experts are whole."""
    layout = setup.layout
    model = cast("TextModel", setup.model)
    dense, experts = newton_schulz_flops(model)
    spread = layout.expert_ranks if layout.ep > 1 else layout.shards
    flops = (dense / (layout.shards * layout.tp) + experts / spread) / layout.pp
    hidden = params * matrix_share(model)
    sent_bytes = 2 * WIRE_BYTES * hidden
    travel_s = sum(all_to_all_s(groups[axis], sent_bytes, 1, eff) for axis in ("dp_shard", "tp"))
    rate = matmul_flops_per_s(setup.fabric.chip, "bf16", eff)
    return UPDATE_BYTES["muon"] * hidden / rates.memory + flops / rate + travel_s


@dataclass(frozen=True)
class DataParallelExchange:
    """What data parallelism sends in a step, in seconds when nothing runs beside it."""

    forward_s: float
    """Gathering parameters, beside the forward of a micro-batch."""
    backward_s: float
    """Gathering them again and reducing gradients, beside its backward."""
    times: int = 1
    """Micro-batches that exchange: all of them under ZeRO-3, else one."""
    across_s: float = 0.0
    """Reducing over replicas, once, beside half of a backward."""


def exchanges_of(
    params: float, expert_params: float, setup: Setup, groups: dict[str, Group], eff: Efficiency
) -> DataParallelExchange:
    """Return what is exchanged for so many parameters of a rank, `groups` being those of the setup's layout.

    Replica groups exchange as they run: each has its own data parallelism, and then the ranks of one number sum over
    the groups what each of them has summed.
    """
    layout = setup.group_layout
    number = setup.layout.dp_replicate // layout.dp_replicate
    groups_s = 0.0
    if setup.replica_groups != 1 and number > 1:
        own = params / layout.shards + expert_params / layout.expert_shards
        groups_s = across_groups_s(own, number, setup, eff)
        groups = axis_groups(layout, setup.fabric, eff)
    gradients = setup.trainable * setup.software.reduce_bytes
    if layout.shards_parameters:
        shard = groups["dp_shard"]
        expert = groups["expert_dp"]
        gather = gather_s(shard, 2.0 * setup.sharded * params, setup, eff)
        gather += gather_s(expert, 2.0 * expert_params, setup, eff)
        scatter = setup.trainable * scatter_s(shard, setup.software.reduce_bytes * params, setup, eff)
        scatter += setup.trainable * scatter_s(expert, setup.software.reduce_bytes * expert_params, setup, eff)
        across = sum_s(groups["dp_replicate"], gradients * params / shard.size, setup, eff)
        return DataParallelExchange(gather, gather + scatter, setup.grad_accum, across + groups_s)
    dense = groups["dp"]
    expert = groups["expert_dp"]
    if layout.dp_shard == 1:  # DDP
        reduce = sum_s(dense, params * gradients, setup, eff) + sum_s(expert, expert_params * gradients, setup, eff)
        return DataParallelExchange(0.0, reduce, across_s=groups_s)
    reduce = scatter_s(dense, params * gradients, setup, eff)
    reduce += scatter_s(expert, expert_params * gradients, setup, eff)
    gather = gather_s(dense, params * setup.trainable * 2.0, setup, eff)
    gather += gather_s(expert, expert_params * setup.trainable * 2.0, setup, eff)
    return DataParallelExchange(gather, reduce, across_s=groups_s)


def across_groups_s(params: float, number: int, setup: Setup, eff: Efficiency) -> float:
    """Seconds of summing the gradients of a rank's `params` over so many replica groups, on the devices' own backend.

    A group's ranks follow one another. Each packet (`engine/elastic/cross_group.py`) waits for the one before it, so
    that each has the latency of a sum; matrices of `PACKET_BYTES` or more go alone. Offloaded gradients are brought to
    the device, and back.
    """
    group = group_of(setup.fabric, number, max(1, setup.fabric.num_devices // number), eff)
    kept_bytes = 4.0 * setup.trainable * params
    matrices = BLOCK_MATRICES * setup.model.num_layers / setup.layout.pp
    packets = max(1.0, kept_bytes / max(PACKET_BYTES, kept_bytes / matrices))
    summed_bytes = setup.trainable * setup.software.reduce_bytes * params
    copied_s = 2 * summed_bytes / (setup.fabric.host_link_gb_per_s * 1e9) if setup.offload_optimizer else 0.0
    return sum_s(group, summed_bytes, setup, eff) + (packets - 1) * 2 * latency_s(group, eff) + copied_s


def data_parallel_s(part: LayersPart, setup: Setup, groups: dict[str, Group], eff: Efficiency) -> float:
    """Exposed time of gradients' reduction and parameters' gathering."""
    forward = part.time.forward + part.comm.tp + part.comm.ep
    backward = part.time.backward + part.comm.tp + part.comm.ep + recompute_part_s(part, setup.recompute)
    sent = exchanges_of(part.params, part.expert_params, setup, groups, eff)
    each = exposed_s(sent.forward_s, forward, setup, eff) + exposed_s(sent.backward_s, backward, setup, eff)
    return sent.times * each + exposed_s(sent.across_s, backward / 2, setup, eff)


def exposed_s(comm: float, beside: float, setup: Setup, eff: Efficiency) -> float:
    """Seconds of `comm` that are not hidden beside work of length `beside`, and what the rest costs that work."""
    if not setup.software.overlap_dp:
        return comm
    # Collectives and kernels share the chip: what is hidden still slows the work that hides it.
    hidden = min(comm, eff.dp_overlap * beside)
    return comm - hidden + eff.contention * hidden
