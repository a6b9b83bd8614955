"""Record convolutional networks on a tape: the parts of ResNets and U-Nets, with the engine's operations.

The workspace of convolution kernels depends on the library and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from trainspec_cli.planner.memory.engine.tape import INDEX, PRECISE, Kernels, Tape, Value
from trainspec_cli.planner.memory.engine.units import Matrix, Unit, state_bytes, update_bytes
from trainspec_cli.planner.workload import Gemm, Layers, Work
from trainspec_cli.recipe.keys.model import STEM_CHANNELS, ConvModel
from trainspec_cli.recipe.keys.run import Recompute

STATISTICS_KERNELS = (10, 3)
"""Kernels of an accelerator's batch norm that access only its statistics (`engine/models/layers.py`), without casts."""
SAMPLE_KERNELS = (14, 14)
"""Kernels of a segmentation's loss with one value per sample or class."""
UPDATE_KERNELS = 13
"""Kernels that update the running statistics of all norms with those of a micro-batch."""


class ConvTape(Tape):
    """A tape that records the parameters used on it."""

    def __init__(self, width: float):
        super().__init__(width)
        self.matrices: list[Matrix] = []
        self.products: list[Gemm] = []
        self.normed: list[int] = []
        """Channels of each batch norm."""

    def parameter(self, rows: int, row: int = 1) -> Value:
        self.matrices.append((rows, row))
        return self.leaf(rows * row)

    def conv(self, x: Value, weight: Matrix, elements: float, groups: int = 1, *, has_bias: bool = False) -> Value:
        """Record a convolution with as many outputs as `weight` has rows."""
        rows, row = weight
        self.products.append(Gemm(elements / rows, rows / groups, row, groups, wide=False, image=x.elements))
        return self._convolved(x, weight, elements, rows * has_bias)

    def widen(self, x: Value, weight: Matrix, elements: float, channels: int) -> Value:
        """Record a transposed convolution with a bias and as many inputs as `weight` has rows."""
        rows, row = weight
        self.products.append(Gemm(x.elements / rows, row, rows, wide=False, image=x.elements))
        return self._convolved(x, weight, elements, channels)

    def _convolved(self, x: Value, weight: Matrix, elements: float, bias: int) -> Value:
        inputs = [x, self.parameter(*weight), *([self.parameter(bias)] if bias else [])]
        sums_gradient = [elements * self.width] if bias else []
        return self.apply(inputs, elements, saved=(x,), costly=True, kernels=((), sums_gradient))

    def relu(self, x: Value) -> Value:
        return self.apply((x,), x.elements, saves_output=True)

    def batch_norm(self, x: Value, channels: int) -> Value:
        """Record a batch norm: two kernels per direction that access `x`, and others for its statistics."""
        self.normed.append(channels)
        casts = 2 * (x.width < PRECISE)
        forward = (x.size, 2 * x.size, *(0.0,) * STATISTICS_KERNELS[0])
        backward = (2 * x.size, 3 * x.size, *(0.0,) * (STATISTICS_KERNELS[1] + casts))
        return self._normed(x, channels, (forward, backward))

    def group_norm(self, x: Value, channels: int) -> Value:
        return self._normed(x, channels, ((2 * x.size,), (3 * x.size,)))

    def _normed(self, x: Value, channels: int, kernels: tuple[Kernels, Kernels]) -> Value:
        inputs = (x, self.parameter(channels), self.parameter(channels))
        return self.apply(inputs, x.elements, saved=(x,), kernels=kernels)


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


@lru_cache(maxsize=64)
def conv_units(model: ConvModel, shards: int) -> tuple[tuple[Unit, ...], Unit]:
    """Return the parameters of each block, and those outside the blocks."""
    net = network(model, samples=1)
    outside = [part.unit.matrices for part in (net.stem, net.head) if part]
    return tuple(Unit(block.unit.matrices, shards) for block in net.blocks), Unit(sum(outside, ()), shards)


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
    chosen = tape.new(pooled, INDEX)
    forward = x.size + pooled * tape.width + chosen.size
    return tape.apply((x,), pooled, saved=(x, chosen), kernels=((forward,), (forward + x.size,)))


def conv_norm(tape: ConvTape, x: Value, channels: int, pixels: float, fan_in: int, groups: int = 1) -> Value:
    return tape.batch_norm(tape.conv(x, (channels, fan_in), pixels * channels, groups), channels)


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
        groups = self.model.groups
        return tape.relu(conv_norm(tape, narrow, self.width, self.pixels_out, self.width * 9 // groups, groups))

    def shortcut(self, tape: ConvTape, x: Value, channels: int) -> Value:
        if self.stride == 1 and self.channels_in == channels:
            return x
        return conv_norm(tape, x, channels, self.pixels_out, self.channels_in)


def _classify(tape: ConvTape, x: Value, channels: int, samples: int, classes: int) -> Value:
    pooled = tape.apply((x,), samples * channels)
    logits = tape.linear(pooled, tape.parameter(classes, channels), samples * classes)
    tape.products.append(Gemm(samples, classes, channels, wide=False))
    tape.parameter(classes)
    logits = tape.cast(logits, PRECISE)
    # Softmax and its logarithm, then the loss. The backward pass begins with the loss's gradient, and sums that of the
    # bias.
    kernels = ((2 * logits.size, logits.size), (0.0, logits.size, 3 * logits.size, logits.size))
    return tape.apply((logits,), 1, saves_output=True, kernels=kernels)


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
    weight = (channels, channels_in * 3**dims)
    return tape.relu(tape.group_norm(tape.conv(x, weight, voxels * channels), channels))


def _up(below: int, width: int, dims: int, voxels: float, beside: int) -> ConvPart:
    above = voxels * 2**dims

    def forward(tape: ConvTape, entering: Sequence[Value]) -> Value:
        x, held = entering
        joined = tape.cat(tape.widen(x, (below, width * 2**dims), above * width, width), held)
        return pair(tape, joined, 2 * width, width, dims, above)

    return ConvPart(forward, (voxels * below, above * width), beside)


def _segment(tape: ConvTape, x: Value, channels: int, voxels: float, classes: int) -> Value:
    """Record cross-entropy and soft Dice in fp32."""
    logits = tape.conv(x, (classes, channels), voxels * classes, has_bias=True)
    logits = tape.cast(logits, PRECISE)
    entropy = tape.apply((logits,), logits.elements, saves_output=True, width=PRECISE)
    labels_bytes = INDEX * voxels
    losses_bytes = PRECISE * voxels
    picked_bytes = logits.size + labels_bytes + losses_bytes
    kernels = ((picked_bytes, losses_bytes), (picked_bytes + logits.size, losses_bytes))
    entropy = tape.apply((entropy,), voxels, width=PRECISE, kernels=kernels)
    chosen = tape.apply((logits,), logits.elements, saves_output=True, width=PRECISE)
    wanted, seen = dice_targets(tape, voxels, classes), chosen.elements * (classes - 1) / classes
    seen_bytes = PRECISE * seen
    # The product of probabilities and targets, and the sums of all three.
    combining = ((3 * seen_bytes, *3 * (seen_bytes,)), (2 * seen_bytes, 2 * seen_bytes))
    common = tape.apply((tape.part(chosen, seen),), seen, saved=(wanted,), width=PRECISE, kernels=combining)
    small = ((0.0,) * SAMPLE_KERNELS[0], (0.0,) * SAMPLE_KERNELS[1])
    return tape.apply((common, entropy), 1, kernels=small)


def dice_targets(tape: Tape, voxels: float, classes: int) -> Value:
    """Return the one-hot classes of each voxel, which are created from indices."""
    indices = tape.new(voxels * classes, INDEX)
    wanted = tape.new(voxels * (classes - 1), PRECISE)
    tape.move(indices.size, 3 * INDEX * voxels, (INDEX + PRECISE) * wanted.elements)  # zeros, ones, a cast
    del indices
    return wanted


# The work of a micro-batch, counted by operation


@lru_cache(maxsize=64)
def conv_works(model: ConvModel, samples: int, width: float) -> tuple[Layers, tuple[Work, ...], tuple[Work, ...]]:
    """Return the work of each block, of what comes before the blocks, and of what comes after them.
    `width`: bytes per element in the compute format."""
    net = network(model, samples)
    layers = tuple(_works_of(block, width) for block in net.blocks)
    last = _works_of(net.head, width)
    if net.stem is None:
        return layers, (), last
    updates = Work(counted_kernels=({0.0: UPDATE_KERNELS}, {}), kernels=UPDATE_KERNELS / 3)
    return layers, _works_of(net.stem, width), (*last, updates)


def _works_of(part: ConvPart, width: float) -> tuple[Work, ...]:
    tape = ConvTape(width)
    y = part.forward(tape, part.sources(tape))
    assert y.node is not None
    tape.backward(y.node, tape.new(y.elements))
    forward, in_backward = tape.kernels
    if part.beside is not None:  # the gradient of the skip connection is added to another one
        in_backward.append(3 * width * part.entering[1])

    def stated(kernels: Kernels) -> Counter[float]:
        """Return the number of kernels by traffic, converted to 2 bytes per element as in `Work`."""
        return Counter(2.0 / width * size for size in kernels)

    first, *others = tape.products
    launches = len(forward) + len(in_backward) + 2 * len(tape.products)
    work = Work(
        gemms=(first, *others),
        counted_kernels=(stated(forward), stated(in_backward)),
        kernels=launches / 3,
        params=sum(rows * row for rows, row in tape.matrices),
        normed=tuple(tape.normed),
        # In the backward pass, a norm's first kernel precedes its sum; its second one and those of its statistics
        # follow it.
        before_statistics=stated(in_backward[: in_backward.index(0.0) - 1]) if tape.normed else None,
    )
    if not part.is_first:
        return (work,)
    # The input is data, which needs no gradient.
    return Work(gemms=(first,), leaf=True), replace(work, gemms=tuple(others))


# Replay a step of a convolutional network: its parts one after another, forward and backward.


@dataclass
class _ConvBlock:
    part: ConvPart
    profile: BlockProfile
    own: Sharded


def replay(run: EngineRun, _pipeline_rank: int) -> PeakMemory:
    """Return the memory in bytes, by cause, at the peak of a convolutional network's step."""
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
        units, outside = conv_units(self.model, run.layout.dp_shard)
        self.blocks = [
            _ConvBlock(part, _profiled(part, self.width, run.recompute), Sharded(unit))
            for part, unit in zip(net.blocks, units, strict=True)
        ]
        self.outside = Sharded(outside)

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
