"""A step of a convolutional network replayed: its parts one after another, forward and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import cast

from trainspec_cli.plan.memory.engine.blocks import BlockProfile, profile
from trainspec_cli.plan.memory.engine.conv import ConvPart, ConvTape, network
from trainspec_cli.plan.memory.engine.optimizer import state_bytes, update_bytes
from trainspec_cli.plan.memory.engine.run import WIDTHS, Account, EngineRun
from trainspec_cli.plan.memory.engine.sharding import MASTER_WIDTH, Sharded, Sharding
from trainspec_cli.plan.memory.engine.tape import INDEX
from trainspec_cli.plan.memory.engine.units import Unit
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import Recompute


@dataclass
class _ConvBlock:
    part: ConvPart
    profile: BlockProfile
    own: Sharded


def replay(run: EngineRun, _pipeline_rank: int) -> dict[str, float]:
    """Bytes by cause at the fullest moment of a step of a convolutional network."""
    return _ConvReplay(run).run()


class _ConvReplay:
    """Samples are divided over ranks, and nothing else is."""

    def __init__(self, run: EngineRun):
        self.given, self.model = run, cast("ConvModel", run.model)
        self.width = WIDTHS[run.compute]
        self.account = Account()
        keeps = run.layout.keeps_parameters
        self.sharding = Sharding(self.account, self.width, WIDTHS[run.reduce], keeps=keeps)
        net = network(self.model, run.samples)
        self.stem = _profiled(net.stem, self.width, "none") if net.stem else None
        self.head = _profiled(net.head, self.width, "none")
        self.blocks = [self._block(part) for part in net.blocks]
        outside = [part.unit.matrices for part in (net.stem, net.head) if part]
        self.outside = Sharded(Unit(sum(outside, ()), run.layout.dp_shard))

    def _block(self, part: ConvPart) -> _ConvBlock:
        unit = Unit(part.unit.matrices, self.given.layout.dp_shard)
        return _ConvBlock(part, _profiled(part, self.width, self.given.recompute), Sharded(unit))

    def run(self) -> dict[str, float]:
        self._hold_state()
        for left in reversed(range(self.given.micro_batches)):
            self._forward()
            self._backward(last=left == 0)
        self.account.touch(update_bytes(self.given.optimizer, [unit.unit for unit in self._units()], [], self.width))
        return self.account.at_peak

    def _hold_state(self) -> None:
        own = sum(unit.unit.own for unit in self._units())
        self.account.add("parameters", own * MASTER_WIDTH)
        name, outer_bytes = self.given.optimizer, self.given.outer_bytes
        kept = (state_bytes(name, unit.unit, in_block=True, outer_bytes=outer_bytes) for unit in self._units())
        self.account.add("optimizer", sum(kept))
        pixels, model = prod(self.model.input_size), self.model
        sample = model.in_channels * pixels * 4.0 + INDEX * (pixels if model.segments else 1)
        self.account.add("temporaries", sample * self.given.samples * self.given.micro_batches)

    def _units(self) -> list[Sharded]:
        return [*(block.own for block in self.blocks), self.outside]

    def _forward(self) -> None:
        self.sharding.gather(self.outside)
        self.account.add("activations", self._images_bytes())
        if self.stem:
            self._work(self.stem, forward=True)
        for block in self.blocks:
            self.sharding.gather(block.own)
            self._work(block.profile, forward=True)
            self.sharding.free_after_forward(block.own)
        self._work(self.head, forward=True)
        self.sharding.end_forward()

    def _images_bytes(self) -> float:
        """Bytes of the images' copy in the compute format; 0 in fp32, where the step reads those of the data."""
        narrow = self.width < MASTER_WIDTH
        return self.given.samples * self.model.in_channels * prod(self.model.input_size) * self.width * narrow

    def _backward(self, *, last: bool) -> None:
        exchanges = last or self.given.layout.exchanges_every_backward
        sharding, held = self.sharding, dict.fromkeys(range(len(self.blocks)), 0.0)
        sharding.prefetch(self.blocks[-1].own)
        self._work(self.head, forward=False)
        for index, block in reversed(list(enumerate(self.blocks))):
            sharding.gather_again(block.own)
            sharding.prefetch(self.blocks[index - 1].own if index else None)
            if held[index]:
                # The output was used twice, and its two gradients are added. The one from beside lies in one piece with
                # what it was joined with.
                self.account.touch(held[index])
                self.account.add("activations", -held[index])
            self._work(block.profile, forward=False)
            if block.part.beside is not None:
                held[block.part.beside] = 2 * block.part.entering[1] * self.width
                self.account.add("activations", held[block.part.beside])
            sharding.make_gradient(block.own)
            sharding.after_backward(block.own, exchanges=exchanges, last=last)
        if self.stem:
            self._work(self.stem, forward=False)
        sharding.make_gradient(self.outside)
        self.account.add("activations", -self._images_bytes())
        sharding.after_backward(self.outside, exchanges=exchanges, last=last)
        if exchanges:
            sharding.end_backward()

    def _work(self, profiled: BlockProfile, *, forward: bool) -> None:
        if forward:
            self.account.touch(profiled.forward[-1].peak)
            self.account.add("activations", profiled.kept)
        else:
            self.account.touch(profiled.backward[-1].peak - profiled.kept)
            self.account.add("activations", -profiled.kept)


@lru_cache(maxsize=256)
def _profiled(part: ConvPart, width: float, recompute: Recompute) -> BlockProfile:
    tape = ConvTape(width)
    sources = part.sources(tape)
    return profile(tape, lambda: part.forward(tape, sources), recompute)
