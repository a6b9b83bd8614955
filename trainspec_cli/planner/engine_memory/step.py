"""A step of the engine replayed: the pipeline's actions on blocks' profiles, with FSDP2's gathering and reducing.

What FSDP2 (torch 2.13) holds is as read from its source: a forward keeps its all-gather's buffer until the next one's
parameters are copied out, a backward gathers the block before while it works on its own, and the buffer of a
reduce-scatter lives until the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.engine_memory.blocks import BlockProfile, profile_block
from trainspec_cli.planner.engine_memory.shape import Shape, layer_of
from trainspec_cli.planner.engine_memory.units import Unit, block_units, outside_unit
from trainspec_cli.policy.pipeline import SPLIT_SCHEDULES, Action, actions, cut_layers, num_stages, stages_of_rank
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel, HybridModel, ModelSpec
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.run import Recompute

MASTER_WIDTH = 4.0
"""Bytes of a parameter as it is kept, of its gradient there and of each moment."""
WIDTHS = {"bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}
CHUNK_BYTES = 128 * 2**20
"""Of logits held at once, as fp32; a chunk has 64 tokens at least."""


CAUSES = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporaries")
"""Gradients: the sharded ones, that the optimizer sees. Unsharded ones and collectives' buffers are temporaries."""


@dataclass(frozen=True)
class EnginePeak:
    """Bytes of tensors at the fullest moment of a step."""

    by_cause: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.by_cause.values())


@dataclass(frozen=True)
class EngineRun:
    """What a step's memory follows from."""

    model: DecoderModel | HybridModel
    layout: Layout
    seq_len: int
    samples: int
    """Of a micro-batch."""
    micro_batches: int
    compute: str
    reduce: str
    recompute: Recompute
    optimizer: str
    matmul: str = "compute"


def run_of(plan: Plan) -> EngineRun:
    model, spec = plan.spec.model, plan.spec
    assert isinstance(model, (DecoderModel, HybridModel))
    return EngineRun(
        model,
        plan.layout,
        spec.data.seq_len,
        plan.micro_batch_size,
        plan.grad_accum_steps,
        plan.compute,
        spec.precision.reduce,
        plan.recompute,
        spec.optim.name,
        spec.precision.matmul,
    )


def tensors_by_cause(plan: Plan) -> dict[str, float] | None:
    """Bytes of the fullest stage's tensors, blocks eager; None where the engine's memory is not counted."""
    if not is_counted(plan.spec.model, plan.offload):
        return None
    peaks = [engine_peak(run_of(plan), rank) for rank in (0, plan.layout.pp - 1)]
    return max(peaks, key=lambda peak: peak.total_bytes).by_cause


def is_counted(model: ModelSpec, offload: str) -> bool:
    """Models of text without offloading; experts without a capacity."""
    if offload != "none" or not isinstance(model, (DecoderModel, HybridModel)):
        return False
    bounded = model.experts is not None and model.experts.capacity_factor is not None
    return not bounded and not getattr(model, "prediction_layers", 0)


def engine_peak(run: EngineRun, pipeline_rank: int) -> EnginePeak:
    """Of one rank of the pipeline, where `is_counted`. Blocks are counted eager: compiled ones keep no more."""
    return EnginePeak(_Replay(run, pipeline_rank).run())


def replayed_micro_batches(run: EngineRun) -> int:
    """Enough to fill a pipeline; what follows is the same again, but for GPipe, which holds them all."""
    layout, enough = run.layout, 4 * run.layout.pp
    grows = layout.pp > 1 and layout.pipeline_schedule == "gpipe"
    return run.micro_batches if grows or run.micro_batches % layout.pp else min(run.micro_batches, enough)


class _Account:
    """Live bytes by cause, and what they were at the peak."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(CAUSES, 0.0)
        self.at_peak = dict(self.live)
        self._total = self._peak = 0.0

    def add(self, cause: str, size: float) -> None:
        self.live[cause] += size
        self._total += size
        self.touch(0.0)

    def touch(self, temporaries: float) -> None:
        """`temporaries` more are live for a moment."""
        if self._total + temporaries > self._peak:
            self._peak = self._total + temporaries
            self.at_peak = {**self.live, "temporaries": self.live["temporaries"] + temporaries}


@dataclass
class _Sharded:
    """A unit's state."""

    unit: Unit
    is_gathered: bool = False
    prefetched: bool = False
    gradient_bytes: float = 0.0
    """Unsharded gradients, as autograd made them."""
    accumulated_bytes: float = 0.0
    """The same in the format of the exchange, waiting for the last micro-batch."""
    has_gradient: bool = False


@dataclass
class _Block:
    own: _Sharded
    experts: _Sharded | None
    """Those spread over ep, which are sharded by themselves."""
    profile: BlockProfile

    @property
    def parts(self) -> list[_Sharded]:
        """As a backward meets them."""
        return [self.own, *([self.experts] if self.experts else [])]


@dataclass
class _Stage:
    first: bool
    last: bool
    blocks: list[_Block]
    outside: _Sharded
    buffer_bytes: float = 0.0
    """Of the last forward's all-gather."""
    reduced_bytes: float = 0.0
    """Of the last reduce-scatter."""
    left: int = 0
    """Backwards still to come."""

    @property
    def parts(self) -> list[_Sharded]:
        return [*(part for block in self.blocks for part in block.parts), self.outside]


class _Replay:
    def __init__(self, run: EngineRun, pipeline_rank: int):
        self.given, self.model, self.layout, self.rank = run, run.model, run.layout, pipeline_rank
        self.micro_batches = replayed_micro_batches(run)
        self.width, self.reduce_width = WIDTHS[run.compute], WIDTHS[run.reduce]
        self.split = run.layout.pp > 1 and run.layout.pipeline_schedule in SPLIT_SCHEDULES
        own_seq, layout = run.seq_len // run.layout.cp, _without_data(run.layout)
        self.shape = Shape(run.model, layout, run.samples, own_seq, self.width, run.matmul == "fp8")
        self.account = _Account()
        self.stages = {stage: self._stage(stage) for stage in stages_of_rank(run.layout, pipeline_rank)}

    def _stage(self, stage: int) -> _Stage:
        stages = num_stages(self.layout)
        layers = cut_layers(self.model.num_layers, self.layout)[stage] if stages > 1 else range(self.model.num_layers)
        first, last = stage == 0, stage == stages - 1
        blocks = [self._block(layer) for layer in layers]
        outside = _Sharded(outside_unit(self.model, self.layout, first, last))
        return _Stage(first, last, blocks, outside, left=self.micro_batches)

    def _block(self, index: int) -> _Block:
        layer = layer_of(self.model, index)
        own, experts = block_units(self.model, self.layout, layer)
        profile = profile_block(self.shape, layer, self.given.recompute, self.split)
        return _Block(_Sharded(own), _Sharded(experts) if experts else None, profile)

    @property
    def message_bytes(self) -> float:
        """Hidden states between two stages, or two blocks."""
        return self.shape.outside_tokens * self.model.hidden_size * self.width

    def run(self) -> dict[str, float]:
        self._hold_state()
        for action in actions(self.layout, self.micro_batches)[self.rank]:
            _ACTIONS[action.kind](self, action)
        return self.account.at_peak

    def _hold_state(self) -> None:
        own = sum(part.unit.own for stage in self.stages.values() for part in stage.parts)
        moments = 2 * MASTER_WIDTH if self.given.optimizer == "adamw" else 0.0
        tables = (
            len(self.stages)
            * self.given.seq_len
            * (8 * self.shape.rotated_size + (8 if self.shape.rotated_size else 0))
        )
        self.account.add("parameters", own * MASTER_WIDTH + tables)
        self.account.add("optimizer", own * moments)
        self.account.add("temporaries", 16.0 * self.shape.tokens * self.given.micro_batches)
        if self.layout.pp > 1:  # one that came early, and one that was sent
            self.account.add("temporaries", 2 * self.message_bytes)

    # Actions

    def _forward(self, action: Action) -> None:
        stage, account = self.stages[action.stage], self.account
        self._gather(stage, stage.outside)
        account.add("activations", self.message_bytes + self._angles_bytes())
        for block in stage.blocks:
            for part in block.parts:
                self._gather(stage, part)
            account.touch(block.profile.forward_peak)
            account.add("activations", block.profile.kept)
            for part in block.parts:
                self._free_after_forward(part)
        if stage.last:
            self._loss(stage)
        account.add("temporaries", -stage.buffer_bytes)
        stage.buffer_bytes = 0.0

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        stage.left -= 1
        self._backpropagate(stage, self._exchanges_every_backward() or stage.left == 0)

    def _backward_input(self, action: Action) -> None:
        self._backpropagate(self.stages[action.stage], exchanges=False)

    def _backward_weight(self, action: Action) -> None:
        """The products that were put off, one after another; all that they need lives until the last."""
        stage, account = self.stages[action.stage], self.account
        for block in stage.blocks:
            self._make_gradient(block.own)
        account.add("activations", -sum(block.profile.put_off for block in stage.blocks))
        stage.left -= 1
        if stage.left == 0:
            for part in stage.parts:
                self._after_backward(stage, part, exchanges=True)
            self._end_backward(stage)

    # Parts of them

    def _angles_bytes(self) -> float:
        return 2.0 * self.shape.seq_len * self.shape.rotated_size * self.width if self.shape.rotates else 0.0

    def _loss(self, stage: _Stage) -> None:
        """Kept: the gradients of the hidden states, and in fp32 of the head."""
        account, hidden, width = self.account, self.model.hidden_size, self.width
        rows = self.model.vocab_size // self.layout.tp
        tokens = self.shape.tokens
        chunk = min(tokens, max(64, CHUNK_BYTES // (4 * rows)))
        entered = (tokens + (self.shape.outside_tokens if self.layout.tp > 1 else 0.0)) * hidden * width
        account.add("activations", tokens * hidden * width + rows * hidden * 4.0)
        logits = chunk * rows
        narrow = width < 4.0
        product = logits * (width if narrow else 4.0) + rows * hidden * width
        account.touch(entered + max(logits * (17.0 + (width if narrow else 0.0)), product))

    def _backpropagate(self, stage: _Stage, exchanges: bool) -> None:
        account = self.account
        if stage.last:
            self._prefetch(stage.blocks[-1].own if stage.blocks else None)
            self._loss_backward(stage)
        else:
            account.add("temporaries", self.message_bytes)
            self._prefetch(stage.blocks[-1].own if stage.blocks else None)
        for index in reversed(range(len(stage.blocks))):
            block, following = stage.blocks[index], stage.blocks[index - 1].own if index else None
            for part, prefetched in zip(block.parts, [*block.parts[1:], following], strict=True):
                self._gather_again(part)
                self._prefetch(prefetched)
            live = block.profile.kept
            if block.experts:
                live = self._backward_of_experts(stage, block, exchanges)
            account.touch(block.profile.backward_peak - live)
            account.add("activations", block.profile.put_off - live)
            if not self.split:
                self._make_gradient(block.own)
            self._after_backward(stage, block.own, exchanges)
        self._make_gradient(stage.outside)
        account.add("activations", -self.message_bytes - self._angles_bytes())
        if not stage.last:
            account.add("temporaries", -self.message_bytes)
        self._after_backward(stage, stage.outside, exchanges)
        if exchanges:
            self._end_backward(stage)

    def _backward_of_experts(self, stage: _Stage, block: _Block, exchanges: bool) -> float:
        """Experts that are sharded by themselves exchange their gradients in the midst of their block's backward.

        -> bytes of activations and temporaries that live then.
        """
        profile = block.profile
        assert block.experts is not None
        self.account.touch(profile.experts_peak - profile.kept)
        self.account.add("activations", profile.experts_live - profile.kept)
        self._make_gradient(block.experts)
        self._after_backward(stage, block.experts, exchanges)
        return profile.experts_live

    def _loss_backward(self, stage: _Stage) -> None:
        account, hidden, width = self.account, self.model.hidden_size, self.width
        table, states = self.model.vocab_size // self.layout.tp * hidden, self.shape.tokens * hidden * width
        scaled = table * (4.0 + (width if width < 4.0 else 0.0))
        account.touch(states + scaled)
        account.add("activations", -table * 4.0)
        account.touch(states)
        account.add("activations", -states)
        if not stage.outside.gradient_bytes:
            account.add("temporaries", table * width)
            stage.outside.gradient_bytes = table * width

    # FSDP2

    def _gather(self, stage: _Stage, part: _Sharded) -> None:
        """In a forward."""
        if part.is_gathered or not part.unit.full:
            return
        size, account = part.unit.gathered * self.width, self.account
        if part.unit.shards > 1:
            account.touch(size + part.unit.own * self.width)
            account.add("temporaries", size - stage.buffer_bytes)
            stage.buffer_bytes = size
        account.add("gathered", size)
        part.is_gathered = True

    def _free_after_forward(self, part: _Sharded) -> None:
        if self.layout.zero_stage == 3 and part.unit.shards > 1:
            self._free(part)

    def _free(self, part: _Sharded) -> None:
        if part.is_gathered:
            self.account.add("gathered", -part.unit.gathered * self.width)
            part.is_gathered = False

    def _prefetch(self, part: _Sharded | None) -> None:
        if part is None or part.is_gathered or part.prefetched or part.unit.shards == 1:
            return
        self.account.touch((part.unit.gathered + part.unit.own) * self.width)
        self.account.add("temporaries", part.unit.gathered * self.width)
        part.prefetched = True

    def _gather_again(self, part: _Sharded) -> None:
        """In a backward: the buffer is let go at once."""
        if part.is_gathered:
            return
        size = part.unit.gathered * self.width
        self.account.add("gathered", size)
        if part.prefetched:
            self.account.add("temporaries", -size)
        part.is_gathered, part.prefetched = True, False

    def _make_gradient(self, part: _Sharded) -> None:
        """A second one is added to the first, into new memory."""
        size = part.unit.full * self.width
        if part.gradient_bytes:
            self.account.touch(max((rows * row for rows, row in part.unit.matrices), default=0) * self.width)
        self.account.add("temporaries", size - part.gradient_bytes)
        part.gradient_bytes = size

    def _after_backward(self, stage: _Stage, part: _Sharded, exchanges: bool) -> None:
        """Where nothing is exchanged yet, gradients take the format of the exchange."""
        self._free(part)
        if not exchanges and part.gradient_bytes and self.reduce_width != self.width and not part.accumulated_bytes:
            part.accumulated_bytes = part.unit.full * self.reduce_width
            self.account.add("temporaries", part.accumulated_bytes)
        if part.accumulated_bytes:
            self.account.add("temporaries", -part.gradient_bytes)
            part.gradient_bytes = 0.0
        if exchanges:
            self._reduce(stage, part)

    def _reduce(self, stage: _Stage, part: _Sharded) -> None:
        """Copied into one buffer, summed over ranks; the own part stays."""
        waiting = part.gradient_bytes + part.accumulated_bytes
        if not waiting:
            return
        account, size = self.account, part.unit.gathered * self.reduce_width
        account.add("temporaries", -stage.reduced_bytes)
        account.add("temporaries", size)
        account.add("temporaries", -waiting)
        own = part.unit.own * MASTER_WIDTH
        account.touch(part.unit.own * (self.reduce_width if self.reduce_width < MASTER_WIDTH else 0.0) + own)
        account.add("gradients", 0.0 if part.has_gradient else own)
        part.gradient_bytes = part.accumulated_bytes = 0.0
        stage.reduced_bytes, part.has_gradient = size, True

    def _end_backward(self, stage: _Stage) -> None:
        self.account.add("temporaries", -stage.reduced_bytes)
        stage.reduced_bytes = 0.0

    def _exchanges_every_backward(self) -> bool:
        """ZeRO-2 and 3 without replicas keep gradients sharded from one micro-batch to the next."""
        layout = self.layout
        return layout.zero_stage >= 2 and layout.dp_shard > 1 and layout.dp_replicate == 1 and not self.split


def _without_data(layout: Layout) -> Layout:
    """What a block's sizes follow from, so that layouts share profiles."""
    return Layout(
        tp=layout.tp,
        cp=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        context_method=layout.context_method,
        ep=layout.ep,
    )


_ACTIONS = {
    "forward": _Replay._forward,
    "backward": _Replay._backward,
    "backward_input": _Replay._backward_input,
    "backward_weight": _Replay._backward_weight,
}
