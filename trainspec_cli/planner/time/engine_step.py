"""Predict a step of trainspec's engine with eager blocks on GPUs: FSDP2's exchanges block by block, and the schedule
pass by pass.

The closed forms in `step.py` describe any framework. They assume that exchanges and computation overlap evenly over a
pass, and that pipeline ranks differ only in their time per micro-batch. This module instead simulates each rank's
passes with separate clocks for the compute stream and for communication, and then replays the schedule with the
resulting pass durations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import cast

from trainspec_cli.planner.hardware.cluster import (
    Group,
    all_reduce_s,
    axis_groups,
    group_of,
    group_of_ranks,
    latency_s,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.engine.blocks import experts_kernels
from trainspec_cli.planner.memory.engine.conv import conv_units
from trainspec_cli.planner.memory.engine.units import Unit, block_unit, experts_unit, outside_unit, whole_experts
from trainspec_cli.planner.pipeline import Action, Kind, actions, alike_ranks, cut_layers, ends_of_ranks_s
from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Setup
from trainspec_cli.planner.time.data_parallel import gather_s, scatter_s, sum_s
from trainspec_cli.planner.time.step import (
    PASSES,
    LayersPart,
    MicroBatch,
    RankParts,
    between_steps_s,
    eager_shape,
    host_wait_s,
    kernels_s,
    moved_s,
    optimizer_s,
    rank_parts,
    recompute_part_s,
    waiting_share,
)
from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    HybridModel,
    Layer,
    TextModel,
    embeds_at_both_ends,
    has_layer_list,
)
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import StepTime

# Memory traffic of FSDP2's copies in bytes per parameter, for a 2-byte compute format and gradients summed in fp32.
CAST_BYTES = 10.0
"""Traffic needed to cast a shard to the compute format and copy it into the all-gather buffer."""
COPY_OUT_BYTES = 4.0
"""Traffic needed to copy gathered parameters out of the buffer."""
COPY_IN_BYTES = (2.0, 4.0)
"""Traffic needed to cast gradients while copying them into the buffer of their reduce-scatter, which has room for the
padding."""
COPY_SUMS_IN_BYTES = (4.0, 4.0)
"""The same for gradients that were summed in fp32 over several micro-batches."""
FIRST_SUM_BYTES = 6.0
"""Traffic needed to cast the first micro-batch's gradients, if they are accumulated before the exchange."""
SUM_BYTES = 10.0
"""Traffic needed to add a later micro-batch's gradients to them."""
SHARD_SUM_BYTES = 12.0
"""Traffic needed to add reduced gradients to those of earlier micro-batches, in fp32."""
LATE_SUM_BYTES = 32.0
"""Traffic needed to stack, sum, join and copy back, in fp32, the gradients of parameters that all tp ranks hold."""
LATE_KERNELS = 3
"""Kernels that sum the gradient of a norm or router whose tokens are spread over tp, once per step."""
ADAMW_BYTES = (4.0, 28.0)
"""Gradients are read for their norm; then AdamW reads them, and reads and writes parameters and moments."""
GRADIENTS_DONE: tuple[Kind, ...] = ("backward", "backward_weight")
LAUNCHES: dict[Kind, float] = {"forward": 1 / 3, "backward": 2 / 3, "backward_input": 1 / 3, "backward_weight": 1 / 3}
"""Fraction of a micro-batch's kernel launches in each kind of pass (`host_wait_s`)."""
AGREEMENT_KERNELS = 36
"""Number of small kernels between two steps, for the loss, the gradient norm and the report."""


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together: those of a block, or those of a stage outside its blocks."""

    group: str
    """The group of ranks that share the parameters: `dp_shard` or `expert_dp`."""
    gather_s: float
    reduce_s: float
    across_s: float
    """Time to sum the gradients over replicas."""
    copy_out_s: float
    copy_in_s: float
    copy_sums_in_s: float
    first_sum_s: float
    sum_s: float
    shard_sum_s: float
    own: float
    """Number of parameters on the rank with the largest part."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    """Includes recomputation. If the schedule splits the backward pass, this covers only the input gradients."""
    weights_s: float = 0.0
    """Time for the weight gradients, if the schedule splits the backward pass."""
    forward_waits_s: float = 0.0
    """Time of exposed exchanges inside the layer (tp, cp, ep)."""
    backward_waits_s: float = 0.0
    before_statistics_s: float = 0.0
    """Time of the backward pass before the first exchange of a batch norm's statistics, if that exchange uses the same
    communicator; otherwise 0."""
    early_s: float = 0.0
    """Time of the backward pass, including exchanges, before the block's experts need their parameters."""
    early_share: float = 0.0
    """Fraction of the parameters whose gradients are computed with the input gradients even if the schedule splits the
    backward pass."""

    def share(self, kind: Kind) -> float:
        """Return the fraction of the parameters whose gradients a pass of this kind computes."""
        return {"backward_input": self.early_share, "backward_weight": 1.0 - self.early_share}.get(kind, 1.0)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its blocks, and the embedding or head if it has one. `root` holds the parameters outside the
    blocks."""

    blocks: tuple[tuple[FsdpUnit, ...], ...]
    """The units of each block: the block itself, then its experts if they are spread over ranks."""
    root: FsdpUnit
    before_s: tuple[float, float]
    """Forward and backward time of the embedding, including waits."""
    after_s: tuple[float, float]


@dataclass(frozen=True)
class RankRun:
    """The times of one pipeline rank's passes."""

    passes_s: tuple[float, ...]
    waited_s: float
    """Time spent waiting for FSDP2's exchanges."""
    sent_s: float
    """Total duration of these exchanges."""
    launches_s: float = 0.0
    """How long the device waits for kernel launches."""

    @property
    def busy_s(self) -> float:
        return sum(self.passes_s) + self.launches_s


@dataclass(frozen=True)
class StepRun:
    ranks: list[RankRun]
    ends_s: list[float]
    """When each rank finishes its passes."""
    alone_s: list[float]
    """The same if messages between stages took no time."""


class RankClock:
    """Simulates the passes of one pipeline rank, as if the other stages were always ready."""

    def __init__(self, stages: dict[int, Stage], setup: Setup, eff: Efficiency):
        self.stages = stages
        self.layout = setup.group_layout
        self.overlaps = setup.software.overlap_dp
        self.eff = eff
        self.now_s = 0.0
        """The compute stream's clock."""
        self.free_s = dict.fromkeys(("gather", "reduce", "dp_shard", "expert_dp"), 0.0)
        """When each of FSDP2's streams and each communicator becomes free; an exchange occupies one stream and one
        communicator."""
        self.across_s = 0.0
        """The same for the communicator between replicas."""
        self.reduced_s = 0.0
        """When the last reduce-scatter ends."""
        self.waited_s = 0.0
        self.sent_s = 0.0
        """Total duration of the exchanges."""
        self.has_root = dict.fromkeys(stages, False)
        self.has_blocks = dict.fromkeys(stages, False)
        self.sums: Counter[tuple[int, Kind]] = Counter()
        """Number of passes, per stage and kind, whose gradients have been accumulated in the exchange format."""
        self.unsummed = dict.fromkeys(stages, False)
        """Whether a stage has gradients from a weight-gradient pass that are still in the compute format."""
        self.exchanged = dict.fromkeys(stages, 0)

    def run(self, order: Sequence[Action]) -> RankRun:
        left = Counter(action.stage for action in order if action.kind in GRADIENTS_DONE)
        passes_s = []
        for action in order:
            began_s = self.now_s
            left[action.stage] -= action.kind in GRADIENTS_DONE
            if action.kind == "forward":
                self._forward(action.stage)
            else:
                self._backward(action, last=left[action.stage] == 0)
            passes_s.append(self.now_s - began_s)
        return RankRun(tuple(passes_s), self.waited_s, self.sent_s)

    def _wait(self, until_s: float) -> None:
        self.waited_s += max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)

    def _exchange(self, stream: str, unit: FsdpUnit, after_s: float) -> float:
        """Return the end of an exchange that may begin at `after_s` at the earliest."""
        seconds = unit.gather_s if stream == "gather" else unit.reduce_s
        if not seconds:
            return after_s
        end_s = max(self.free_s[stream], self.free_s[unit.group], after_s) + seconds
        self.free_s[stream] = self.free_s[unit.group] = end_s
        self.sent_s += seconds
        if not self.overlaps:
            self._wait(end_s)
        return end_s

    def _gather_root(self, stage: Stage, after_s: float) -> float:
        """Gather the parameters outside the blocks. Return when they have arrived, in seconds."""
        self._wait(self._exchange("gather", stage.root, after_s))
        arrived_s = self.now_s
        self.now_s += stage.root.copy_out_s
        return arrived_s

    def _forward(self, number: int) -> None:
        stage = self.stages[number]
        # FSDP2's streams wait for the compute stream at the start of a stage's pass.
        after_s = self.now_s
        if not self.has_root[number]:
            after_s = self._gather_root(stage, after_s)
            self.has_root[number] = True
        self.now_s += stage.before_s[0]
        # A unit's parameters are gathered while the previous unit computes.
        copied_out_s = after_s
        for unit in (unit for block in stage.blocks for unit in block):
            if not self.has_blocks[number]:
                ready_s = self._exchange("gather", unit, after_s)
                after_s = copied_out_s
                self._wait(ready_s)
                self.now_s += unit.copy_out_s
                copied_out_s = self.now_s
            self.now_s += unit.forward_s + unit.forward_waits_s
        self.has_blocks[number] = self.layout.keeps_parameters
        self.now_s += stage.after_s[0]

    def _backward(self, action: Action, *, last: bool) -> None:
        number = action.stage
        stage = self.stages[number]
        blocks = stage.blocks[::-1]
        units = [unit for block in blocks for unit in block]
        if action.kind == "backward_weight":
            self.now_s += sum(unit.weights_s for unit in units)
            if self.unsummed[
                number
            ]:  # a sum in the compute format moves as many bytes as a cast to the exchange format
                self.now_s += sum(unit.share(action.kind) * unit.first_sum_s for unit in units)
            self.unsummed[number] = True
            if last:
                self._reduce_all([*units, stage.root], action)
            return
        exchanges = action.kind == "backward" and (last or self.layout.exchanges_every_backward)
        # FSDP2 accumulates gradients at the end of a block's backward pass, including those of earlier weight passes.
        kept: list[Kind] = ["backward_weight", action.kind] if self.unsummed[number] else [action.kind]
        gathers = not self.has_blocks[number]
        waiting = units[::-1] if gathers else []
        # Another micro-batch's backward pass may have freed the root's parameters. FSDP2's hooks gather them again: in
        # the stage with the head before its last block, and in the other stages after that block.
        lacks_root = not self.has_root[number]
        after_s = 0.0
        if lacks_root and number == self.layout.num_stages - 1:
            after_s = self._gather_root(stage, 0.0)
            lacks_root = False
        ready_s = self._exchange("gather", waiting[-1], after_s) if waiting else 0.0
        self.now_s += stage.after_s[1]
        for block in blocks:
            for unit in block:
                if gathers:
                    self._wait(ready_s)
                    self.now_s += unit.copy_out_s
                    # The next gather starts only after these parameters have been copied out.
                    waiting.pop()
                    ready_s = self._exchange("gather", waiting[-1], self.now_s) if waiting else 0.0
                if lacks_root:
                    self._gather_root(stage, self.now_s)
                    lacks_root = False
                self.now_s += unit.early_s
            for unit in reversed(block):
                if unit.before_statistics_s:
                    self._wait(max(self.free_s[unit.group], self.across_s) - unit.before_statistics_s)
                self.now_s += unit.backward_s + unit.backward_waits_s
                if exchanges:
                    self._reduce(unit, action)
                else:
                    self._keep(unit, number, kept)
        self.now_s += stage.before_s[1]
        if exchanges:
            self._reduce_all([stage.root], action)
        else:
            self._keep(stage.root, number, kept)
            self.sums.update((number, kind) for kind in kept)
            self.unsummed[number] = False
        keeps = self.layout.keeps_parameters and not (last and action.kind == "backward")
        self.has_blocks[number] = self.has_root[number] = keeps

    def _keep(self, unit: FsdpUnit, number: int, kinds: Sequence[Kind]) -> None:
        """Add the gradients from passes of these kinds to those of earlier micro-batches."""
        for kind in kinds:
            self.now_s += unit.share(kind) * (unit.sum_s if self.sums[number, kind] else unit.first_sum_s)

    def _reduce(self, unit: FsdpUnit, action: Action) -> None:
        number = action.stage
        # A split schedule exchanges gradients after its passes, when part of them is already in the exchange format.
        has_sums = self.sums[number, action.kind] > 0 or action.kind == "backward_weight"
        if has_sums:
            self._keep(unit, number, [action.kind])
        # The reduce-scatter buffer is reused, so the previous reduce-scatter must have ended.
        self._wait(self.reduced_s)
        self.now_s += unit.copy_sums_in_s if has_sums else unit.copy_in_s
        self.reduced_s = self._exchange("reduce", unit, self.now_s)
        self.across_s = max(self.across_s, self.reduced_s) + unit.across_s
        self.sent_s += unit.across_s
        if self.exchanged[number]:
            self.across_s += unit.shard_sum_s

    def _reduce_all(self, units: Sequence[FsdpUnit], action: Action) -> None:
        """Reduce the last gradients of a stage, and wait for all of its reductions."""
        for unit in units:
            self._reduce(unit, action)
        self.exchanged[action.stage] += 1
        self._wait(max(self.reduced_s, self.across_s))


@dataclass(frozen=True)
class EngineStep:
    setup: Setup
    once: MicroBatch
    groups: dict[str, Group]
    eff: Efficiency

    @cached_property
    def parts(self) -> list[RankParts]:
        return rank_parts(self.once, self.setup.layout)

    @cached_property
    def _inside(self) -> dict[str, Group]:
        """Return the process groups inside one replica group."""
        if self.setup.replica_groups == 1:
            return self.groups
        return axis_groups(self.setup.group_layout, self.setup.fabric, self.eff)

    def _unit(self, unit: Unit, group: str = "dp_shard", early_share: float = 0.0) -> FsdpUnit:
        """`unit`: its rows are divided among the shards, and padded if they do not divide evenly."""
        setup = self.setup
        shard = self._inside[group]
        reduce_bytes = setup.software.reduce_bytes
        params = unit.full
        padded = unit.gathered
        own = unit.own
        # A single rank casts and copies its tensors one by one. The tensors of text models are so large that this is
        # not counted for them.
        more_kernels = 0 if has_layer_list(setup.model) else 2 * len(unit.matrices) - 1
        cast_s = self._moved_s(CAST_BYTES * own)
        gathered_s = gather_s(shard, self.once.rates.element_bytes * padded, setup, self.eff)
        return FsdpUnit(
            group,
            gather_s=gathered_s + cast_s if gathered_s else 0.0,
            reduce_s=scatter_s(shard, reduce_bytes * padded, setup, self.eff),
            across_s=sum_s(self._inside["dp_replicate"], reduce_bytes * own, setup, self.eff),
            # A single rank casts and copies its shard instead of gathering it.
            copy_out_s=self._moved_s(COPY_OUT_BYTES * padded)
            if gathered_s
            else cast_s + more_kernels * self.eff.kernel_s,
            copy_in_s=self._moved_s(COPY_IN_BYTES[0] * params + COPY_IN_BYTES[1] * padded),
            copy_sums_in_s=self._moved_s(COPY_SUMS_IN_BYTES[0] * params + COPY_SUMS_IN_BYTES[1] * padded),
            first_sum_s=self._moved_s(FIRST_SUM_BYTES * params),
            sum_s=self._moved_s(SUM_BYTES * params),
            shard_sum_s=self._moved_s(SHARD_SUM_BYTES * own),
            own=own,
            early_share=early_share,
        )

    def _moved_s(self, moved_bytes: float) -> float:
        return moved_s(moved_bytes, self.once.rates, self.eff)

    @property
    def _layer_list(self) -> tuple[Layer, ...]:
        model = self.setup.model
        return model.layer_list if has_layer_list(model) else ()

    def _block(self, kind: int, mixers: Sequence[LayersPart]) -> tuple[FsdpUnit, ...]:
        layout = self.setup.group_layout
        model = self.setup.model
        if not has_layer_list(model):
            whole = LayersPart.total(mixers)
            return (self._with_work(self._unit(self._plain_unit(whole, kind)), whole),)
        layer = next(layer for number, layer in enumerate(model.layer_list) if self.once.kind_of(number) == kind)
        whole_unit = block_unit(model, layer, layout, self.setup.lora)
        unit = self._unit(whole_unit, early_share=whole_unit.early / whole_unit.full)
        if layout.ep == 1 or "experts" not in layer.mixers:
            return (self._with_work(unit, LayersPart.total(mixers)),)
        *others, experts = mixers
        outer = self._with_work(unit, LayersPart.total(others))
        held = experts_unit(model, layout, self.setup.lora)
        inner = self._with_work(self._unit(held, "expert_dp", early_share=1.0), experts)
        # Half of the work outside the experts' products sends the tokens, and half combines the results. Neither needs
        # the experts' parameters.
        kernels = experts_kernels(eager_shape(layer, self.setup))
        needed_f, needed_b = (kernels_s(one, self.once.rates, self.eff) for one in kernels)
        send_f = max(0.0, experts.memory_f - needed_f) / 2
        send_b = max(0.0, experts.memory_b - needed_b) / 2
        waits_f = inner.forward_waits_s / 2
        again_s, again_waits_s = self._repeated(experts)
        waits_b = (inner.backward_waits_s - again_waits_s) / 2
        repeats = again_s > 0
        # A repeated forward pass sends the tokens first; otherwise, the backward pass starts with the gradients of the
        # results.
        early_again_s = sum(self._repeated(LayersPart.total(others))) if repeats else 0.0
        repeated_f = (send_f + waits_f) * repeats
        return (
            replace(
                outer,
                forward_s=outer.forward_s + send_f,
                forward_waits_s=outer.forward_waits_s + waits_f,
                backward_s=outer.backward_s + send_b + waits_b - early_again_s,
                early_s=early_again_s + repeated_f if repeats else send_b + waits_b,
            ),
            replace(
                inner,
                forward_s=inner.forward_s - send_f,
                forward_waits_s=inner.forward_waits_s - waits_f,
                backward_s=inner.backward_s - send_b - (repeated_f if repeats else send_b),
                backward_waits_s=inner.backward_waits_s - waits_b - (0.0 if repeats else waits_b),
            ),
        )

    @cached_property
    def _again(self) -> Recompute:
        """Return what the engine recomputes. `selective` keeps the results of matrix multiplications and attention, and
        recomputes everything else, including the exchanges."""
        again = self.setup.recompute
        return Recompute(elementwise=1.0, layers=again.layers) if again == RECOMPUTE["selective"] else again

    def _repeated(self, part: LayersPart) -> tuple[float, float]:
        """Return the time, in seconds, of the forward work and of the exchanges that are repeated in these layers'
        backward pass."""
        work_s = recompute_part_s(
            replace(part, tp=0.0, tp_again=0.0, cp=0.0, cp_again=0.0, ep=0.0, dp=0.0), self._again
        )
        work_s -= self._again.full * self._again.layers * part.unrepeated
        waits_s = part.tp + part.tp_again + part.cp + part.cp_again + part.ep + part.dp
        return work_s, (self._again.elementwise > 0) * self._again.layers * waits_s

    def _with_work(self, unit: FsdpUnit, part: LayersPart) -> FsdpUnit:
        again_s, again_waits_s = self._repeated(part)
        # A split backward pass computes the input gradients first.
        weights_s = part.weights_b if self.setup.layout.splits_backward else 0.0
        return replace(
            unit,
            forward_s=part.forward,
            backward_s=part.backward - weights_s + again_s,
            weights_s=weights_s,
            # With both shards and replicas, statistics have a separate communicator.
            before_statistics_s=part.before_dp * (1 in (self.setup.layout.dp_shard, self.setup.layout.dp_replicate)),
            forward_waits_s=part.tp + part.cp + part.ep + part.dp,
            backward_waits_s=again_waits_s + sum((PASSES[axis] - 1) * getattr(part, axis) for axis in PASSES),
        )

    @cached_property
    def _stages(self) -> list[dict[int, Stage]]:
        """Return the stages of each pipeline rank, by number."""
        layout = self.setup.layout
        layers = cut_layers(self.once.num_layers, layout)
        blocks = [self._block(kind, mixers) for kind, mixers in enumerate(self.once.mixers)]
        return [self._stages_of(rank, layers, blocks) for rank in range(layout.pp)]

    def _stages_of(
        self, rank: int, layers: Sequence[range], blocks: Sequence[tuple[FsdpUnit, ...]]
    ) -> dict[int, Stage]:
        layout = self.setup.layout
        stages = {}
        for number in layout.stages_of_rank(rank):
            outside = LayersPart()
            before_s = after_s = (0.0, 0.0)
            if number == 0:
                outside = outside.plus(self.once.embedding)
                first = self.once.embedding
                summed_s = PASSES["tp"] * first.tp
                again_s = summed_s / 2 if layout.sequence_parallel else 0.0  # gathered in the backward pass
                before_s = (first.forward + summed_s - again_s + first.dp, first.backward + again_s + first.dp)
            if number == layout.num_stages - 1:
                head = self.once.head
                outside = outside.plus(head)
                # The loss computes its gradients in the forward pass (`engine/models/cross_entropy.py`).
                after_s = (head.forward + head.backward + PASSES["tp"] * head.tp, 0.0)
            stages[number] = Stage(
                tuple(blocks[self.once.kind_of(layer)] for layer in layers[number]),
                self._unit(self._outside(number, outside), early_share=1.0),
                before_s,
                after_s,
            )
        return stages

    def _outside(self, stage: int, part: LayersPart) -> Unit:
        """Return the parameters of a stage that are outside its blocks."""
        layout = self.setup.group_layout
        model = self.setup.model
        if has_layer_list(model):
            return outside_unit(model, layout, stage == 0, stage == layout.num_stages - 1)
        return self._plain_unit(part, None)

    def _plain_unit(self, part: LayersPart, block: int | None) -> Unit:
        """Return the parameters of a block, or those outside the blocks, of a model without a list of its layers. The
        individual tensors are known only for convolutional networks."""
        shards = self.setup.group_layout.shards
        if not isinstance(self.setup.model, ConvModel):
            return Unit(((round(part.params), 1),), shards)
        blocks, outside = conv_units(self.setup.model, shards)
        return outside if block is None else blocks[block]

    def _optimizer_s(self, rank: int) -> float:
        setup = self.setup
        agreement_s = AGREEMENT_KERNELS * self.eff.kernel_s
        if setup.software.optimizer != "adamw":
            return agreement_s + optimizer_s(self.parts[rank].whole, setup, self.once.rates, self.groups, self.eff)
        stages = self._stages[rank].values()
        own = sum(unit.own for stage in stages for unit in (stage.root, *itertools.chain(*stage.blocks)))
        return agreement_s + sum(self._moved_s(each * own) for each in ADAMW_BYTES)

    def _late_sums_s(self, rank: int, part: LayersPart) -> tuple[float, float]:
        """Return the times in seconds of copies and of exchanges for gradients that are summed only once per step,
        after the passes. These are the gradients of experts that all tp ranks hold; those of a tied embedding, which
        are summed between the first and the last stage; and, with sequence parallelism, those of norms and routers,
        where only the kernels take time."""
        layout = self.setup.layout
        model = self.setup.model
        exchange_s = copies_s = 0.0
        if layout.tp > 1 and layout.sequence_parallel:
            cut = cut_layers(self.once.num_layers, layout)
            layers = [
                layer
                for stage in layout.stages_of_rank(rank)
                for layer in self._layer_list[cut[stage].start : cut[stage].stop]
            ]
            vectors = sum(len(layer.mixers) + ("experts" in layer.mixers) for layer in layers)
            copies_s += LATE_KERNELS * vectors * self.eff.kernel_s
        if layout.tp > 1 and layout.ep == 1 and part.expert_params:
            layer = next(layer for layer in self._layer_list if "experts" in layer.mixers)
            experts = whole_experts(cast("TextModel", model), layer, layout, LoraSpec())
            own = part.expert_params / experts.full * experts.own
            copies_s += self._moved_s(LATE_SUM_BYTES * own)
            exchange_s += all_reduce_s(self.groups["tp"], 4.0 * own, self.eff)
        ends = [layout.rank_of_stage(stage) for stage in (0, layout.num_stages - 1)]
        if (
            rank in ends
            and isinstance(model, DecoderModel | HybridModel)
            and embeds_at_both_ends(model)
            and layout.pp > 1
        ):
            own = model.vocab_size * model.hidden_size / layout.tp / layout.shards
            copies_s += self._moved_s(LATE_SUM_BYTES * own)
            per_stage = layout.world_size // layout.pp
            group = group_of_ranks(self.setup.fabric, sorted({end * per_stage for end in ends}), self.eff)
            exchange_s += all_reduce_s(group, 4.0 * own, self.eff)
        return copies_s, exchange_s

    def _run(self, micro_batches: int) -> StepRun:
        """Simulate this many micro-batches on each rank, and replay the schedule with the resulting pass durations."""
        layout = self.setup.layout
        orders = actions(layout, micro_batches)
        stages = self._stages
        known: dict[object, RankRun] = {}
        ranks = []
        alike = alike_ranks(layout, micro_batches)
        for rank, order in enumerate(orders):
            # Middle ranks of a long pipeline have equal stages in the same order, so they share one simulation.
            key = (alike[rank], tuple(stages[rank].values()))
            if key not in known:
                known[key] = RankClock(stages[rank], self.setup, self.eff).run(order)
            ranks.append(known[key])
        per_stage = layout.world_size // layout.pp
        parts = layout.tp if layout.sequence_parallel else 1
        message_bytes = self.once.rates.element_bytes * self.setup.tokens * self.setup.model.hidden_size / parts

        @cache
        def hand_over_s(sender: int, receiver: int) -> float:
            pair = group_of_ranks(self.setup.fabric, (sender * per_stage, receiver * per_stage), self.eff)
            return send_s(pair, message_bytes, self.eff)

        # If launching a pass's kernels takes longer than running them, the launches determine its duration.
        device_s = [rank.busy_s / micro_batches for rank in ranks]
        launches_s = [
            host_wait_s(part.whole, seconds, self.setup, self.eff) / layout.chunks_per_rank
            for part, seconds in zip(self.parts, device_s, strict=True)
        ]
        ranks = [
            replace(rank, launches_s=wait_s * micro_batches * layout.chunks_per_rank)
            for rank, wait_s in zip(ranks, launches_s, strict=True)
        ]
        action_s = {
            action: pass_s + LAUNCHES[action.kind] * launches_s[rank]
            for rank, order in enumerate(orders)
            for action, pass_s in zip(order, ranks[rank].passes_s, strict=True)
        }

        ends_s = ends_of_ranks_s(layout, micro_batches, action_s.__getitem__, hand_over_s)
        return StepRun(ranks, ends_s, ends_of_ranks_s(layout, micro_batches, action_s.__getitem__))

    def time(self) -> StepTime:
        """Return the step time by part, based on the rank with the most work."""
        setup = self.setup
        layout = setup.layout
        eff = self.eff
        micro = setup.grad_accum
        # The schedule repeats itself after some micro-batches, so simulate only a few and extrapolate.
        few = 3 * layout.num_stages + setup.grad_accum % layout.pp
        counts = [setup.grad_accum] if few + layout.pp >= setup.grad_accum else [few, few + layout.pp]
        runs = [self._run(count) for count in counts]
        times = (setup.grad_accum - counts[0]) / layout.pp

        def whole(of_run: Callable[[StepRun], float]) -> float:
            first_s = of_run(runs[0])
            return first_s + times * (of_run(runs[-1]) - first_s)

        late_s = [self._late_sums_s(rank, part.whole) for rank, part in enumerate(self.parts)]

        def busy_of(rank: int) -> float:
            return whole(lambda run: run.ranks[rank].busy_s) + sum(late_s[rank])

        busy_s = [busy_of(rank) for rank in range(layout.pp)]
        slowest = max(range(layout.pp), key=busy_s.__getitem__)

        def end_s(ends: Callable[[StepRun], Sequence[float]]) -> float:
            """Return when the last rank finishes its passes and late sums."""

            def of_rank(rank: int) -> float:
                return whole(lambda run: ends(run)[rank]) + sum(late_s[rank])

            return max(map(of_rank, range(layout.pp)))

        alone_s = end_s(lambda run: run.alone_s)
        waits_s = whole(lambda run: run.ranks[slowest].waited_s)
        slowed_s = eff.contention * max(0.0, whole(lambda run: run.ranks[slowest].sent_s) - waits_s)
        part = self.parts[slowest].whole
        launches_s = whole(lambda run: run.ranks[slowest].launches_s)
        between = between_steps_s(setup, eff)
        agreement_s = 2 * latency_s(group_of(setup.fabric, layout.world_size, 1, eff), eff)
        layers = self.parts[slowest].layers
        repeats = self._again.layers * (self._again.elementwise > 0)
        busy = StepTime(
            matmul_s=micro * (part.matmul_f + part.matmul_b),
            attention_s=micro * (part.attention_f + part.attention_b),
            recompute_s=micro * self._repeated(layers)[0],
            tp_comm_s=micro * (PASSES["tp"] * part.tp + repeats * (layers.tp + layers.tp_again)),
            cp_comm_s=micro * (PASSES["cp"] * part.cp + repeats * (layers.cp + layers.cp_again)),
            ep_comm_s=micro * (PASSES["ep"] * part.ep + repeats * layers.ep),
            dp_comm_s=micro * (PASSES["dp"] * part.dp + repeats * layers.dp),
        )
        busy = replace(
            busy,
            # The remainder consists of norms, gates, losses and FSDP2's copies.
            memory_bound_s=busy_s[slowest] - launches_s - waits_s - late_s[slowest][1] - busy.total_s,
            dp_comm_s=busy.dp_comm_s + waits_s + slowed_s + late_s[slowest][1] + agreement_s,
            bubble_s=alone_s - busy_s[slowest],
            pp_comm_s=end_s(lambda run: run.ends_s) - alone_s,
            optimizer_s=self._optimizer_s(slowest),
            host_s=launches_s + between,
        )
        return replace(busy, host_s=busy.host_s + waiting_share(setup, eff) * (busy.total_s - between))
