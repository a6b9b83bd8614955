"""The memory of a step of a transformers module: FSDP2's units, and activations from a trace of its parts
(`engine/tools/count_module.py`)."""

from __future__ import annotations

from typing import cast

from trainspec_cli.planner.memory.engine.step import (
    MASTER_WIDTH,
    WIDTHS,
    Account,
    EngineRun,
    PeakMemory,
    Sharded,
    Sharding,
)
from trainspec_cli.planner.memory.engine.units import Unit, state_bytes, update_bytes
from trainspec_cli.planner.workload import traced_adapters
from trainspec_cli.recipe.keys.model import TracedPart, TransformersModel


def replay(run: EngineRun, _pipeline_rank: int) -> PeakMemory:
    """Return the memory in bytes, by cause, at the peak of the step."""
    return _TracedReplay(run).run()


class _TracedReplay:
    """Replays a step with data parallelism only."""

    def __init__(self, run: EngineRun):
        self.given = run
        model = cast("TransformersModel", run.model)
        self.width = WIDTHS[run.compute]
        # Traces are made at the recipe's length and format; others are estimated from them.
        self.scale = run.seq_len / model.traced_seq_len * self.width / model.traced_width
        self.account = Account()
        reduce_width = WIDTHS[run.reduce]
        self.sharding = Sharding(self.account, self.width, reduce_width, keeps=run.layout.keeps_parameters)
        self.outside_part = model.outside
        self.outside = Sharded(self._unit(model.outside, in_block=False))
        self.blocks = [
            (part, Sharded(unit)) for part in model.blocks for unit in [self._unit(part)] for _ in range(part.count)
        ]

    def _unit(self, part: TracedPart, *, in_block: bool = True) -> Unit:
        lora = self.given.lora
        shards = self.given.layout.dp_shard
        if not lora.rank:
            return Unit(part.matrices, shards)
        adapters = tuple(traced_adapters(part, lora)) if in_block else ()
        return Unit(part.matrices + adapters, shards, adapters=adapters)

    def run(self) -> PeakMemory:
        blocks = [block.unit for _, block in self.blocks]
        outside = self.outside.unit
        name, outer_bytes = self.given.optimizer, self.given.outer_bytes
        account = self.account
        account.add("parameters", MASTER_WIDTH * sum(unit.own for unit in (*blocks, outside)))
        account.add("optimizer", sum(state_bytes(name, one, in_block=True, outer_bytes=outer_bytes) for one in blocks))
        account.add("optimizer", state_bytes(name, outside, in_block=False, outer_bytes=outer_bytes))
        account.add("temporaries", 16.0 * self.given.samples * self.given.seq_len * self.given.micro_batches)
        for left in reversed(range(self.given.micro_batches)):
            self._pass(last=left == 0)
        account.touch(update_bytes(name, blocks, [outside], self.width))
        return account.at_peak

    def _pass(self, *, last: bool) -> None:
        """Run a micro-batch forward and backward."""
        account, sharding, recompute = self.account, self.sharding, self.given.recompute
        exchanges = last or self.given.layout.exchanges_every_backward
        ends = self.outside_part
        sharding.gather(self.outside)
        before = self._forward(ends, "before")
        for part, block in self.blocks:
            sharding.gather(block)
            self._forward(part, recompute)
            sharding.free_after_forward(block)
        self._forward(ends, "after", "logits")
        sharding.end_forward()

        sharding.gather_again(self.outside)
        sharding.prefetch(self.blocks[-1][1])
        self._backward(ends, "after", "logits")
        # The head's gradient remains. What the loss also frees or leaves is counted with it.
        held = self.outside.gradient_bytes
        self.outside.gradient_bytes = held or self.scale * ends.backward_bytes("before", self.given.samples)
        account.add("gradients", self.outside.gradient_bytes - held)
        for index, (part, block) in reversed(list(enumerate(self.blocks))):
            sharding.gather_again(block)
            sharding.prefetch(self.blocks[index - 1][1] if index else None)
            self._backward(part, recompute)
            sharding.make_gradient(block)
            sharding.after_backward(block, exchanges=exchanges, last=last)
        sharding.make_gradient(self.outside)
        account.add("activations", -before)
        sharding.after_backward(self.outside, exchanges=exchanges, last=last)
        if exchanges:
            sharding.end_backward()

    def _forward(self, part: TracedPart, kind: str, cause: str = "temporaries") -> float:
        """Run a part's forward pass; return the bytes that it keeps."""
        kept = self.scale * part.kept_bytes(kind, self.given.samples)
        self.account.touch(self.scale * part.forward_bytes(kind, self.given.samples), cause)
        self.account.add("activations", kept)
        return kept

    def _backward(self, part: TracedPart, kind: str, cause: str = "temporaries") -> None:
        self.account.touch(self.scale * part.backward_bytes(kind, self.given.samples), cause)
        self.account.add("activations", -self.scale * part.kept_bytes(kind, self.given.samples))
