"""A step of the engine replayed: the pipeline's actions on blocks' profiles, with FSDP2's gathering and reducing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from trainspec_cli.planner.memory.engine.blocks import BlockProfile, profile_block
from trainspec_cli.planner.memory.engine.run import (
    MASTER_WIDTH,
    WIDTHS,
    Account,
    EngineRun,
    Shape,
    Sharded,
    Sharding,
    state_bytes,
    update_bytes,
)
from trainspec_cli.planner.memory.engine.tape import Event, Stretch
from trainspec_cli.planner.memory.engine.units import (
    Unit,
    block_unit,
    experts_unit,
    freeze,
    outside_unit,
    whole_experts,
)
from trainspec_cli.planner.pipeline import Action, actions, cut_layers
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import Layer, TextModel, loss_chunk_tokens


def replay(run: EngineRun, pipeline_rank: int) -> dict[str, float]:
    """Bytes by cause at the fullest moment of a step of a model of text."""
    return _Replay(run, cast("TextModel", run.model), pipeline_rank).run()


def shape_of(run: EngineRun, model: TextModel, layer: Layer) -> Shape:
    layout, width = _without_data(run.layout), WIDTHS[run.compute]
    seq_len, is_fp8 = run.seq_len // run.layout.cp, run.matmul == "fp8"
    return Shape(model, layer, layout, run.samples, seq_len, width, is_fp8, run.lora, run.compiled)


@dataclass
class _Block:
    profile: BlockProfile
    own: Sharded
    experts: Sharded | None
    """Experts, where they are spread and sharded by themselves."""
    whole_experts: Unit
    """Experts, where they are not."""

    @property
    def units(self) -> list[Sharded]:
        """Return the units in the order in which their forwards end."""
        return [self.experts, self.own] if self.experts else [self.own]


@dataclass
class _Stage:
    first: bool
    last: bool
    blocks: list[_Block]
    outside: Sharded
    sharding: Sharding
    left: int
    """Backwards still to come."""

    @cached_property
    def units(self) -> list[Sharded]:
        return [*(unit for block in self.blocks for unit in block.units), self.outside]

    @cached_property
    def before(self) -> dict[int, Sharded | None]:
        """Unit's id -> the unit whose forward ended before it: its backward comes next."""
        return {id(unit): before for before, unit in zip([None, *self.units], self.units, strict=False)}


class _Replay:
    def __init__(self, run: EngineRun, model: TextModel, pipeline_rank: int):
        self.given, self.model, self.layout, self.rank = run, model, run.layout, pipeline_rank
        self.micro_batches = run.micro_batches
        if (run.layout.pp == 1 or run.layout.pipeline_schedule != "gpipe") and run.micro_batches % run.layout.pp == 0:
            # These fill a pipeline, and what follows is the same again; but GPipe holds all micro-batches.
            self.micro_batches = min(run.micro_batches, 3 * run.layout.pp)
        self.width, self.reduce_width = WIDTHS[run.compute], WIDTHS[run.reduce]
        self.split = run.layout.splits_backward
        self.layers = model.layer_list
        self.shape = shape_of(run, model, self.layers[0])
        self.account = Account()
        self.message_bytes = self.shape.outside_tokens * model.hidden_size * self.width
        """Hidden states between two stages, or two blocks."""
        self.angles_bytes = 2.0 * self.shape.seq_len * model.rotated_size * self.width if model.rotates else 0.0
        self.stages = {stage: self._stage(stage) for stage in run.layout.stages_of_rank(pipeline_rank)}

    def _stage(self, stage: int) -> _Stage:
        stages = self.layout.num_stages
        held = cut_layers(self.model.num_layers, self.layout)[stage] if stages > 1 else range(self.model.num_layers)
        first, last = stage == 0, stage == stages - 1
        outside = Sharded(freeze(outside_unit(self.model, self.layout, first, last), self.given.lora))
        sharding = Sharding(self.account, self.width, self.reduce_width, keeps=self.layout.keeps_parameters)
        held_layers = [self.layers[layer] for layer in held]
        makers = {layer: self._maker(layer) for layer in set(held_layers)}
        blocks = [makers[layer]() for layer in held_layers]
        return _Stage(first, last, blocks, outside, sharding, self.micro_batches)

    def _maker(self, layer: Layer) -> Callable[[], _Block]:
        """Return what makes blocks of one kind: all of it is theirs together but what is gathered."""
        model, layout, lora = self.model, self.layout, self.given.lora
        profile = profile_block(shape_of(self.given, model, layer), self.given.recompute, self.split)
        spread = layout.ep > 1 and "experts" in layer.mixers
        experts = freeze(experts_unit(model, layout), lora) if spread else None
        own, whole = block_unit(model, layer, layout, lora), freeze(whole_experts(model, layer, layout), lora)
        return lambda: _Block(profile, Sharded(own), Sharded(experts) if experts else None, whole)

    def run(self) -> dict[str, float]:
        self._hold_state()
        for action in actions(self.layout, self.micro_batches)[self.rank]:
            _ACTIONS[action.kind](self, action)
        if self.layout.tp > 1 and self.layout.ep == 1:
            # Each rank of tp holds experts whole. Their gradients are summed after the passes: all are copied, and then
            # into one piece.
            shares = sum(block.whole_experts.trained.own for stage in self.stages.values() for block in stage.blocks)
            self.account.touch(2 * shares * MASTER_WIDTH, "gradients")
        self._update()
        return self.account.at_peak

    def _hold_state(self) -> None:
        units = [unit for stage in self.stages.values() for unit in stage.units]
        own = sum(part.unit.own for part in units)
        # Each stage keeps a table of a token's cosines and sines in fp32, and of its place.
        angles_bytes = 2 * 4 * self.model.rotated_size + 8 if self.model.rotated_size else 0.0
        tables = len(self.stages) * self.given.seq_len * angles_bytes
        quantised = sum(part.unit.quantised_bytes for part in units)
        self.account.add("parameters", own * MASTER_WIDTH + quantised + tables)
        self.account.add("optimizer", self._optimizer_bytes())
        self.account.add("temporaries", 16.0 * self.shape.tokens * self.given.micro_batches)
        if self.layout.pp > 1:  # one that came early, and one that was sent
            self.account.add("collectives", 2 * self.message_bytes)

    def _optimizer_bytes(self) -> float:
        blocks, outside = self._trained()
        name, outer_bytes = self.given.optimizer, self.given.outer_bytes
        own = sum(state_bytes(name, unit, in_block=True, outer_bytes=outer_bytes) for unit in blocks)
        return own + sum(state_bytes(name, unit, in_block=False, outer_bytes=outer_bytes) for unit in outside)

    def _trained(self) -> tuple[list[Unit], list[Unit]]:
        """Return (the units of the blocks that the rank holds, those outside of them)."""
        stages = self.stages.values()
        blocks = [sharded.unit for stage in stages for block in stage.blocks for sharded in block.units]
        return blocks, [stage.outside.unit for stage in stages]

    def _update(self) -> None:
        """Count the update, at which gradients are left of the passes, besides what lasts."""
        self.account.touch(update_bytes(self.given.optimizer, *self._trained(), self.width))

    # Actions

    def _forward(self, action: Action) -> None:
        stage, account = self.stages[action.stage], self.account
        stage.sharding.gather(stage.outside)
        account.add("activations", self.message_bytes + self.angles_bytes)
        for block in stage.blocks:
            stage.sharding.gather(block.own)
            self._work(stage, block, block.profile.forward)
            stage.sharding.free_after_forward(block.own)
        if stage.last:
            self._loss(stage)
        stage.sharding.end_forward()

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        stage.left -= 1
        self._backpropagate(stage, self.layout.exchanges_every_backward or stage.left == 0)

    def _backward_input(self, action: Action) -> None:
        self._backpropagate(self.stages[action.stage], exchanges=False)

    def _backward_weight(self, action: Action) -> None:
        """The products that were put off, one after another; all that they need lives until the last."""
        stage, account = self.stages[action.stage], self.account
        for block in stage.blocks:
            stage.sharding.make_gradient(block.own, put_off=True)
        account.add("activations", -sum(block.profile.put_off for block in stage.blocks))
        stage.left -= 1
        if stage.left == 0:
            for part in stage.units:
                stage.sharding.after_backward(part, exchanges=True, last=True)
            stage.sharding.end_backward()

    # Parts of them

    @property
    def _trains_head(self) -> bool:
        return not self.given.lora.rank

    def _loss(self, stage: _Stage) -> None:
        """Kept: the gradients of the hidden states, and in fp32 of the head."""
        account, hidden, width = self.account, self.model.hidden_size, self.width
        rows, tokens, trained = self.model.vocab_size // self.layout.tp, self.shape.tokens, self._trains_head
        entered = (tokens + (self.shape.outside_tokens if self.layout.tp > 1 else 0.0)) * hidden * width
        account.add("activations", tokens * hidden * width)
        account.add("gradients", trained * rows * hidden * 4.0)
        account.add("activations", entered)
        account.touch(loss_bytes(self.given, self.model), "logits")
        account.add("activations", -entered)

    def _backpropagate(self, stage: _Stage, exchanges: bool) -> None:
        account, sharding = self.account, stage.sharding
        sharding.prefetch(stage.blocks[-1].own if stage.blocks else None)
        if stage.last:
            self._loss_backward(stage)
        else:
            account.add("collectives", self.message_bytes)
        for block in reversed(stage.blocks):
            sharding.gather_again(block.own)
            sharding.prefetch(stage.before[id(block.own)])
            account.add("activations", -block.profile.kept)
            self._work(stage, block, block.profile.backward, exchanges)
            account.add("activations", block.profile.put_off - block.profile.backward[-1].live)
            if self.split:
                sharding.make_early_gradient(block.own)
            else:
                sharding.make_gradient(block.own)
            sharding.after_backward(block.own, exchanges=exchanges, last=stage.left == 0)
        sharding.make_gradient(stage.outside)
        account.add("activations", -self.message_bytes - self.angles_bytes)
        if not stage.last:
            account.add("collectives", -self.message_bytes)
        sharding.after_backward(stage.outside, exchanges=exchanges, last=stage.left == 0)
        if exchanges:
            sharding.end_backward()

    def _work(
        self, stage: _Stage, block: _Block, stretches: tuple[Stretch, ...], exchanges: bool | None = None
    ) -> None:
        """A block's forward, or its backward, which `exchanges` gradients or not."""
        live = 0.0
        for stretch in stretches:
            self.account.touch(stretch.peak - live)
            self.account.add("activations", stretch.live - live)
            live = stretch.live
            if stretch.then and block.experts:
                self._shard_experts(stage, block.experts, stretch.then, exchanges)

    def _shard_experts(self, stage: _Stage, experts: Sharded, event: Event, exchanges: bool | None) -> None:
        """A forward that runs again within a backward ends with them, and leaves them gathered."""
        sharding = stage.sharding
        if event == "gather":
            sharding.gather(experts)
        elif event == "free" and exchanges is None:
            sharding.free_after_forward(experts)
        elif event == "free":
            sharding.end_forward()
        elif event == "gather_again":
            sharding.gather_again(experts)
            sharding.prefetch(stage.before[id(experts)])
        elif event == "reduce":
            sharding.make_gradient(experts)
            sharding.after_backward(experts, exchanges=exchanges is True, last=stage.left == 0)

    def _loss_backward(self, stage: _Stage) -> None:
        account, hidden, width = self.account, self.model.hidden_size, self.width
        table = self._trains_head * (self.model.vocab_size // self.layout.tp) * hidden
        states = self.shape.tokens * hidden * width
        scaled = table * (4.0 + (width if width < 4.0 else 0.0))
        account.touch(states + scaled, "gradients")
        account.add("gradients", -table * 4.0)
        account.touch(states)
        account.add("activations", -states)
        if not stage.outside.gradient_bytes:
            account.add("gradients", table * width)
            stage.outside.gradient_bytes = table * width


def loss_bytes(run: EngineRun, model: TextModel) -> float:
    """Return the bytes of a chunk of logits and of what the loss makes of them, or of its product with the hidden
    states. A chunk's gradient lives into the next chunk."""
    width, rows = WIDTHS[run.compute], model.vocab_size // run.layout.tp
    tokens = run.samples * (run.seq_len // run.layout.cp)
    chunk = min(tokens, loss_chunk_tokens(rows))
    logits = chunk * rows
    narrow = width < 4.0
    product = logits * (width if narrow else 4.0) + (not run.lora.rank) * rows * model.hidden_size * width
    before = logits * width if tokens > chunk else 0.0
    in_place = run.layout.tp == 1 and not run.compiled
    precise = 8.0 if in_place else 17.0
    return max(before + logits * (precise + (width if narrow else 0.0)), product)


def _without_data(layout: Layout) -> Layout:
    """Return the part of the layout that a block's sizes follow from, so that layouts share profiles."""
    return Layout(
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        context_method=layout.context_method,
    )


_ACTIONS = {
    "forward": _Replay._forward,
    "backward": _Replay._backward,
    "backward_input": _Replay._backward_input,
    "backward_weight": _Replay._backward_weight,
}
