"""Convolutional networks, layer by layer: residual classifiers, detectors on a feature pyramid, and U-Nets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from trainspec_cli.planner.workload import Gemm, Layers, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import STEM_CHANNELS, ConvModel


@dataclass(frozen=True)
class Conv:
    """One convolution with `positions` outputs per sample, followed by a norm and an activation if `normed`."""

    positions: float
    in_channels: int
    out_channels: int
    taps: int
    groups: int = 1
    in_positions: float = 0.0
    normed: bool = True
    frozen: bool = False

    @property
    def params(self) -> int:
        return self.in_channels // self.groups * self.out_channels * self.taps

    @property
    def all_params(self) -> int:
        """Count all parameters, including the norm's scale and shift or, without a norm, the bias."""
        return self.params + self.out_channels * (2 if self.normed else 1)

    @property
    def flops(self) -> float:
        return 2.0 * self.positions * self.params


def bottleneck(positions: float, channels_in: int, width: int, stride: int, groups: int, expansion: int) -> list[Conv]:
    """Return the 1x1, 3x3 (strided) and 1x1 convolutions, and the shortcut's 1x1 convolution if shapes change."""
    out = width * expansion
    before = positions * stride**2
    convs = [
        Conv(before, channels_in, width, 1),
        Conv(positions, width, width, 9, groups, in_positions=before),
        Conv(positions, width, out, 1),
    ]
    if stride > 1 or channels_in != out:
        convs.append(Conv(positions, channels_in, out, 1, in_positions=before))
    return convs


def detector_backbone(model: ConvModel) -> list[Conv]:
    """Return a pretrained ResNet whose stem and first stage are frozen, as trained in detectors (MLPerf, torchvision).

    All of its norms are frozen: a scale and a bias, which cost the same as a bias."""
    convs = [replace(conv, normed=False) for conv in resnet(model)]
    first = 1 + 3 * model.blocks[0] + 1
    return [replace(conv, frozen=True) for conv in convs[:first]] + convs[first:]


def resnet(model: ConvModel) -> list[Conv]:
    """Return the stem and the stages. Widths are those inside the bottlenecks; for the same output, ResNeXt's are twice
    as large as ResNet's."""
    area = math.prod(model.input_size)
    convs = [Conv(area / 4, model.in_channels, STEM_CHANNELS, 49, in_positions=area)]
    channels = STEM_CHANNELS
    positions = area / 16
    for stage, (width, count) in enumerate(zip(model.widths, model.blocks, strict=True)):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            positions /= stride**2
            convs += bottleneck(positions, channels, width, stride, model.groups, model.expansion)
            channels = width * model.expansion
    return convs


def pyramid(model: ConvModel, outputs: list[int], levels: list[int]) -> list[Conv]:
    """Return the feature pyramid: 1x1 lateral convolutions from the backbone's stages, and a 3x3 smoothing convolution
    with 256 channels on each level."""
    area = math.prod(model.input_size)
    laterals = [Conv(area / 4 ** (2 + i), c, 256, 1, normed=False) for i, c in enumerate(outputs) if c]
    return laterals + [Conv(area / 4**level, 256, 256, 9, normed=False) for level in levels]


def retinanet(model: ConvModel) -> list[Conv]:
    """Return RetinaNet's heads: two towers of four 3x3 convolutions on levels 3 to 7, with 9 anchors
    (arXiv:1708.02002)."""
    area = math.prod(model.input_size)
    levels = [3, 4, 5, 6, 7]
    outputs = [0] + [width * model.expansion for width in model.widths[1:]]
    convs = detector_backbone(model) + pyramid(model, outputs, levels)
    positions = sum(area / 4**level for level in levels)
    convs += [Conv(positions, 256, 256, 9, normed=False)] * 8
    convs += [Conv(positions, 256, 9 * model.num_classes, 9, normed=False), Conv(positions, 256, 36, 9, normed=False)]
    return convs


def maskrcnn(model: ConvModel) -> list[Conv]:
    """Return Mask R-CNN's pyramid, proposals, two dense layers for 512 boxes, and four layers for 128 masks
    (arXiv:1703.06870)."""
    area = math.prod(model.input_size)
    levels = [2, 3, 4, 5, 6]
    outputs = [width * 4 for width in model.widths]
    convs = detector_backbone(model) + pyramid(model, outputs, levels)
    positions = sum(area / 4**level for level in levels)
    convs += [Conv(positions, 256, 256, 9, normed=False), Conv(positions, 256, 15, 1, normed=False)]
    convs += [Conv(512, 256 * 49, 1024, 1, normed=False), Conv(512, 1024, 1024, 1, normed=False)]
    convs += [Conv(128 * 196, 256, 256, 9, normed=False)] * 4
    masks = 128 * 784
    return [*convs, Conv(masks, 256, 256, 4, normed=False), Conv(masks, 256, model.num_classes, 1, normed=False)]


def unet(model: ConvModel) -> list[Conv]:
    """Return a U-Net's convolutions: two per level on the way down and up. Each level halves every extent, and kernels
    have size 3 in every dimension."""
    dims = len(model.input_size)
    taps = 3**dims
    half = 2**dims
    positions = float(math.prod(model.input_size))
    convs: list[Conv] = []
    channels = model.in_channels
    for level, width in enumerate(model.widths):
        here = positions / half**level
        above = positions / half ** max(0, level - 1)
        convs += [Conv(here, channels, width, taps, in_positions=above), Conv(here, width, width, taps)]
        channels = width
    bottom = positions / half ** len(model.widths)
    convs += [Conv(bottom, channels, channels, taps)] * 2
    for level in reversed(range(len(model.widths))):
        width = model.widths[level]
        here = positions / half**level
        convs += [Conv(here, channels, width, half, normed=False)]
        convs += [Conv(here, 2 * width, width, taps), Conv(here, width, width, taps)]
        channels = width
    return [*convs, Conv(positions, channels, model.num_classes, 1, normed=False)]


PROPOSAL_KERNELS = 1000
"""Number of a two-stage detector's small kernels: best boxes per level, suppression of overlaps, matching, sampling,
pooling."""
BUILDERS = {"resnet": resnet, "retinanet": retinanet, "maskrcnn": maskrcnn, "unet": unet}


@lru_cache(maxsize=64)
def convolutions(model: ConvModel) -> tuple[Conv, ...]:
    return tuple(BUILDERS[model.architecture](model))


def count_params(model: ConvModel, *, active: bool = False) -> int:
    """Count all parameters; every sample uses all of them, so `active` has no effect."""
    features = model.widths[-1] * model.expansion
    head = (features + 1) * model.num_classes if model.architecture == "resnet" else 0
    return sum(conv.all_params for conv in convolutions(model)) + head


def flops_per_token(model: ConvModel, _seq_len: int) -> float:
    """Return the FLOPs of one sample's forward pass, plus twice that for the backward pass; a multiply-add counts as
    two."""
    return 3.0 * sum(conv.flops for conv in convolutions(model))


def mixing_flops_per_token(_model: ConvModel, _seq_len: int) -> float:
    return 0.0


@lru_cache(maxsize=1024)
def layer_works(model: ConvModel, samples: float, _seq_len: int, _layout: Layout) -> Layers:
    """Return the full network as one layer. A norm and its activation are one kernel, which keeps its input, and reads
    and writes memory once."""
    works: list[Work] = []
    for conv in convolutions(model):
        out = samples * conv.positions * conv.out_channels
        gemm = Gemm(
            samples * conv.positions,
            conv.out_channels / conv.groups,
            conv.in_channels / conv.groups * conv.taps,
            conv.groups,
            wide=False,
        )
        into = samples * (conv.in_positions or conv.positions) * conv.in_channels
        works.append(
            Work(
                gemms=(gemm,),
                pass_bytes=2.0 * (into + out + (2 * out if conv.normed else out)),
                tensor_bytes=2.0 * out,
                kernels=4 if conv.normed else 2,
                params=conv.all_params,
                saved_bytes=2.0 * out * (2 if conv.normed else 1),
                input_bytes=2.0 * into,
                leaf=not works,
                frozen=conv.frozen,
                convolves=True,
            )
        )
    if model.architecture == "maskrcnn":
        works.append(Work(serial_kernels=PROPOSAL_KERNELS, frozen=True))
    return (tuple(works),)
