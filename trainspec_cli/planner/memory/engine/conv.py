"""Record convolutional networks on a tape: the parts of ResNets and U-Nets, with the engine's operations.

The workspace of convolution kernels depends on the library and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import cast

from trainspec_cli.planner.memory.engine.blocks import BlockProfile, profile
from trainspec_cli.planner.memory.engine.step import (
    MASTER_WIDTH,
    WIDTHS,
    Account,
    EngineRun,
    PeakMemory,
    Sharded,
    Sharding,
)
from trainspec_cli.planner.memory.engine.tape import INDEX, PRECISE, Tape, Value
from trainspec_cli.planner.memory.engine.units import Matrix, Unit, state_bytes, update_bytes
from trainspec_cli.recipe.keys.model import STEM_CHANNELS, ConvModel
from trainspec_cli.recipe.keys.run import Recompute


class ConvTape(Tape):
    """A tape that records the parameters used on it."""

    def __init__(self, width: float):
        super().__init__(width)
        self.matrices: list[Matrix] = []

    def parameter(self, rows: int, row: int = 1) -> Value:
        self.matrices.append((rows, row))
        return self.leaf(rows * row)

    def conv(self, x: Value, weight: Value, elements: float, bias: int = 0) -> Value:
        inputs = (x, weight, self.parameter(bias)) if bias else (x, weight)
        return self.apply(inputs, elements, saved=(x,), costly=True)

    def relu(self, x: Value) -> Value:
        return self.apply((x,), x.elements, saves_output=True)

    def batch_norm(self, x: Value, channels: int) -> Value:
        """Record a batch norm. Statistics are in fp32: narrower inputs are copied, and so is the gradient in the
        backward pass."""
        size, narrow = x.elements * PRECISE, x.width < PRECISE
        forward = 2 * size - x.elements * x.width if narrow else 0.0
        backward = 4 * size - x.elements * x.width if narrow else 2 * size
        inputs = (x, self.parameter(channels), self.parameter(channels))
        return self.apply(inputs, x.elements, saved=(x,), scratch=(forward, backward))

    def group_norm(self, x: Value, channels: int) -> Value:
        return self.apply((x, self.parameter(channels), self.parameter(channels)), x.elements, saved=(x,))


@dataclass(frozen=True)
class ConvPart:
    """A part of a network: either one that is sharded and recomputed as a unit, or what comes before or after these
    units."""

    forward: Callable[[ConvTape, Sequence[Value]], Value]
    entering: tuple[float, ...]
    """Number of elements of the two inputs: one from the previous part, one from an earlier part (skip connection)."""
    beside: int | None = None
    """Index of that earlier part."""
    is_first: bool = False
    """True if the input needs no gradient."""

    def sources(self, tape: Tape) -> list[Value]:
        leaves = [tape.leaf(elements) for elements in self.entering]
        for leaf in leaves if self.is_first else []:
            leaf.node = None
        return leaves

    @property
    def unit(self) -> Unit:
        """Return the parameters of the part on one rank."""
        tape = ConvTape(2.0)
        self.forward(tape, self.sources(tape))
        return Unit(tuple(tape.matrices), 1)

    @property
    def leaving(self) -> float:
        tape = ConvTape(2.0)
        return self.forward(tape, self.sources(tape)).elements


@dataclass(frozen=True)
class ConvParts:
    stem: ConvPart | None
    blocks: tuple[ConvPart, ...]
    head: ConvPart
    """The last part, which ends in the loss."""


@lru_cache(maxsize=64)
def network(model: ConvModel, samples: int) -> ConvParts:
    return _unet(model, samples) if model.segments else _resnet(model, samples)


# ResNet


def _resnet(model: ConvModel, samples: int) -> ConvParts:
    halved = float(samples * prod(-(-extent // 2) for extent in model.input_size))
    stem = ConvPart(lambda tape, x: _stem(tape, x[0], model, halved), (4 * halved * model.in_channels,), is_first=True)
    blocks, channels, pixels = [], STEM_CHANNELS, halved / 4
    for stage, (width, count) in enumerate(zip(model.widths, model.blocks, strict=True)):
        for block in range(count):
            shape = BottleneckSizes(channels, width, 2 if stage > 0 and block == 0 else 1, pixels, model)
            blocks.append(ConvPart(shape.forward, (pixels * channels,)))
            pixels, channels = shape.pixels_out, width * model.expansion
    head = ConvPart(lambda tape, x: _classify(tape, x[0], channels, samples, model.num_classes), (pixels * channels,))
    return ConvParts(stem, tuple(blocks), head)


def _stem(tape: ConvTape, images: Value, model: ConvModel, pixels: float) -> Value:
    x = tape.relu(conv_norm(tape, images, STEM_CHANNELS, pixels, model.in_channels * 49))
    pooled = x.elements / 4
    return tape.apply((x,), pooled, saved=(x, tape.new(pooled, INDEX)))


def conv_norm(tape: ConvTape, x: Value, channels: int, pixels: float, fan_in: int) -> Value:
    return tape.batch_norm(tape.conv(x, tape.parameter(channels, fan_in), pixels * channels), channels)


@dataclass(frozen=True)
class BottleneckSizes:
    channels_in: int
    width: int
    stride: int
    pixels: float
    model: ConvModel

    @property
    def pixels_out(self) -> float:
        return self.pixels / self.stride**2

    def forward(self, tape: ConvTape, entering: Sequence[Value]) -> Value:
        x, width, out = entering[0], self.width, self.width * self.model.expansion
        mixed = self.mixed(tape, tape.relu(conv_norm(tape, x, width, self.pixels, self.channels_in)))
        return tape.relu(tape.add(conv_norm(tape, mixed, out, self.pixels_out, width), self.shortcut(tape, x, out)))

    def mixed(self, tape: ConvTape, narrow: Value) -> Value:
        return tape.relu(conv_norm(tape, narrow, self.width, self.pixels_out, self.width * 9 // self.model.groups))

    def shortcut(self, tape: ConvTape, x: Value, channels: int) -> Value:
        if self.stride == 1 and self.channels_in == channels:
            return x
        return conv_norm(tape, x, channels, self.pixels_out, self.channels_in)


def _classify(tape: ConvTape, x: Value, channels: int, samples: int, classes: int) -> Value:
    pooled = tape.apply((x,), samples * channels)
    logits = tape.linear(pooled, tape.parameter(classes, channels), samples * classes)
    tape.parameter(classes)
    return tape.apply((tape.cast(logits, PRECISE),), 1, saves_output=True)


# U-Net


def _unet(model: ConvModel, samples: int) -> ConvParts:
    dims, voxels, widths = len(model.input_size), float(samples * prod(model.input_size)), model.widths
    blocks = [_pair(model.in_channels, widths[0], dims, voxels, 1, is_first=True)]
    for above, width in pairwise(widths):
        blocks.append(_pair(above, width, dims, voxels, 2))
        voxels /= 2**dims
    blocks.append(_pair(widths[-1], widths[-1], dims, voxels, 2))
    voxels /= 2**dims
    for level, (below, width) in enumerate(pairwise([widths[-1], *reversed(widths)])):
        blocks.append(_up(below, width, dims, voxels, beside=len(widths) - 1 - level))
        voxels *= 2**dims
    head = ConvPart(lambda tape, x: _segment(tape, x[0], widths[0], voxels, model.num_classes), (voxels * widths[0],))
    return ConvParts(None, tuple(blocks), head)


def _pair(
    channels_in: int, channels: int, dims: int, voxels: float, stride: int, *, is_first: bool = False
) -> ConvPart:
    def forward(tape: ConvTape, entering: Sequence[Value]) -> Value:
        return pair(tape, entering[0], channels_in, channels, dims, voxels / stride**dims)

    return ConvPart(forward, (voxels * channels_in,), is_first=is_first)


def pair(tape: ConvTape, x: Value, channels_in: int, channels: int, dims: int, voxels: float) -> Value:
    """Record two convolutions of width 3, the first of which may be strided."""
    first = conv_norm_relu(tape, x, channels_in, channels, dims, voxels)
    return conv_norm_relu(tape, first, channels, channels, dims, voxels)


def conv_norm_relu(tape: ConvTape, x: Value, channels_in: int, channels: int, dims: int, voxels: float) -> Value:
    weight = tape.parameter(channels, channels_in * 3**dims)
    return tape.relu(tape.group_norm(tape.conv(x, weight, voxels * channels), channels))


def _up(below: int, width: int, dims: int, voxels: float, beside: int) -> ConvPart:
    above = voxels * 2**dims

    def forward(tape: ConvTape, entering: Sequence[Value]) -> Value:
        x, held = entering
        weight = tape.parameter(below, width * 2**dims)
        joined = tape.cat(tape.conv(x, weight, above * width, bias=width), held)
        return pair(tape, joined, 2 * width, width, dims, above)

    return ConvPart(forward, (voxels * below, above * width), beside)


def _segment(tape: ConvTape, x: Value, channels: int, voxels: float, classes: int) -> Value:
    """Record cross-entropy and soft Dice in fp32."""
    logits = tape.conv(x, tape.parameter(classes, channels), voxels * classes, bias=classes)
    logits = tape.cast(logits, PRECISE)
    entropy = tape.apply((logits,), logits.elements, saves_output=True, width=PRECISE)
    entropy = tape.apply((entropy,), voxels, width=PRECISE)
    chosen = tape.apply((logits,), logits.elements, saves_output=True, width=PRECISE)
    wanted, seen = dice_targets(tape, voxels, classes), chosen.elements * (classes - 1) / classes
    common = tape.apply((tape.part(chosen, seen),), seen, saved=(wanted,), width=PRECISE)
    return tape.apply((common, entropy), 1)


def dice_targets(tape: Tape, voxels: float, classes: int) -> Value:
    """Return the one-hot classes of each voxel, which are created from indices."""
    indices = tape.new(voxels * classes, INDEX)
    wanted = tape.new(voxels * (classes - 1), PRECISE)
    del indices
    return wanted


# Replay a step of a convolutional network: its parts one after another, forward and backward.


@dataclass
class _ConvBlock:
    part: ConvPart
    profile: BlockProfile
    own: Sharded


def replay(run: EngineRun, _pipeline_rank: int) -> PeakMemory:
    """Return the bytes by cause at the memory peak of a convolutional network's step."""
    return _ConvReplay(run).run()


class _ConvReplay:
    """Replays a step with data parallelism only."""

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

    def run(self) -> PeakMemory:
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
        """Return the size in bytes of the images' copy in the compute format; 0 in fp32, because the step then reads
        the data directly."""
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
                # The output was used twice, so its two gradients are added. The skip connection's gradient is a view of
                # the gradient of the concatenated tensor.
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
