"""Convolutional networks: residual image classifiers, and U-Nets that classify every pixel or voxel.

Shapes: B samples, C channels, K classes, H rows, W columns; volumes have a depth dimension before H and W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.language_model import PublishedModel
from trainspec_cli.engine.models.layers import BatchNorm, precise
from trainspec_cli.recipe.keys.model import STEM_CHANNELS, ConvModel

HEAD_STD = 0.01


class ConvNet(PublishedModel):
    """Maps images (B, C, ...) to the summed loss for their labels (scalar, fp32), or to predictions if there are no
    labels.

    Only the samples are split over ranks.
    """

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Set convolutions to Normal(0, sqrt(2 / inputs)) (arXiv:1502.01852), norms to 1, biases to 0."""
        if full.dim() == 1:
            full.fill_(1.0 if name.endswith("weight") else 0.0)
        elif full.dim() == 2:
            full.normal_(0.0, HEAD_STD, generator=generator)
        else:
            full.normal_(0.0, math.sqrt(2.0 / full[0].numel()), generator=generator)

    def init_buffers(self) -> None:
        for norm in self.norm_modules():
            norm.running_mean.zero_()
            norm.running_variance.fill_(1.0)


# ResNet


class ConvNorm(nn.Module):
    """A convolution that preserves the spatial size (except for its stride), followed by batch normalisation."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = BatchNorm(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(self.conv(x_BCHW))


class BottleneckBlock(nn.Module):
    """A bottleneck block: 1x1, 3x3 and 1x1 convolutions, in parallel with a shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int, model: ConvModel):
        super().__init__()
        out = width * model.expansion
        self.narrow = ConvNorm(channels_in, width, 1)
        self.mix = ConvNorm(width, width, 3, stride, model.groups)
        self.widen = ConvNorm(width, out, 1)
        self.shortcut = ConvNorm(channels_in, out, 1, stride) if stride > 1 or channels_in != out else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        mixed = F.relu(self.mix(F.relu(self.narrow(x_BCHW))))
        return F.relu(self.widen(mixed) + (self.shortcut(x_BCHW) if self.shortcut else x_BCHW))


class ResNet(ConvNet):
    """An image classifier built from bottleneck blocks (arXiv:1512.03385); the loss is the cross-entropy of each image.

    As in version 1.5, the stride is in the 3x3 convolution, not in the 1x1 convolution before it.
    """

    def __init__(self, model: ConvModel):
        super().__init__()
        self.stem = ConvNorm(model.in_channels, STEM_CHANNELS, 7, stride=2)
        self.blocks = nn.ModuleList()
        channels = STEM_CHANNELS
        for stage, (width, count) in enumerate(zip(model.widths, model.blocks, strict=True)):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(BottleneckBlock(channels, width, stride, model))
                channels = width * model.expansion
        self.head = nn.Linear(channels, model.num_classes)

    def forward(self, images_BCHW: Tensor, classes_B: Tensor | None = None) -> Tensor:
        """Return the summed loss, or logits (B, classes) in fp32 if there are no labels."""
        x_BCHW = F.max_pool2d(F.relu(self.stem(images_BCHW)), 3, stride=2, padding=1)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits = precise(self.head(x_BCHW.mean(dim=(2, 3))))
        return logits if classes_B is None else F.cross_entropy(logits, classes_B, reduction="sum")

    def judge(self, logits: Tensor, classes_B: Tensor) -> dict[str, Tensor]:
        """Return the loss and top-1 accuracy of each sample, (B,)."""
        loss = F.cross_entropy(logits, classes_B, reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == classes_B).float()}

    def block_modules(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Make a block initially equal to its shortcut, by setting the scale of its last norm to 0 (arXiv:1706.02677,
        section 5.1)."""
        if name.endswith("widen.norm.weight"):
            full.zero_()
        else:
            super().init_parameter(name, full, generator)


# U-Net


CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
CONV_UP: dict[int, type[nn.ConvTranspose2d | nn.ConvTranspose3d]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class ConvNormRelu(nn.Module):
    """A convolution with kernel size 3, normalised by the statistics of each sample and channel (computed in fp32, in
    the kernel)."""

    def __init__(self, channels_in: int, channels: int, dims: int, stride: int = 1):
        super().__init__()
        self.conv = CONV[dims](channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Pair(nn.Module):
    """Two convolutions; the first may have a stride."""

    def __init__(self, channels_in: int, channels: int, dims: int, stride: int):
        super().__init__()
        self.first = ConvNormRelu(channels_in, channels, dims, stride)
        self.second = ConvNormRelu(channels, channels, dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Up(nn.Module):
    """Doubles the spatial size, concatenates the skip connection, and applies two convolutions."""

    def __init__(self, channels_in: int, channels: int, dims: int):
        super().__init__()
        self.widen = CONV_UP[dims](channels_in, channels, kernel_size=2, stride=2)
        self.join = Pair(2 * channels, channels, dims, stride=1)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.join(torch.cat((self.widen(x), beside), dim=1))


class UNet(ConvNet):
    """Segments voxels. The loss of a sample is its mean cross-entropy plus 1 - soft Dice (arXiv:1606.04797).

    U-Net (arXiv:1505.04597) in two or three dimensions, as in MLPerf Training: strided convolutions on the way down,
    transposed convolutions on the way up, instance normalisation (arXiv:1607.08022), and no cropping.
    """

    def __init__(self, model: ConvModel):
        super().__init__()
        dims = len(model.input_size)
        widths = model.widths
        self.down = nn.ModuleList([Pair(model.in_channels, widths[0], dims, stride=1)])
        self.down.extend(Pair(above, width, dims, stride=2) for above, width in pairwise(widths))
        self.bottom = Pair(widths[-1], widths[-1], dims, stride=2)
        self.up = nn.ModuleList(Up(below, width, dims) for below, width in pairwise([widths[-1], *reversed(widths)]))
        self.head = CONV[dims](widths[0], model.num_classes, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss of images (B, C, ...) for labels (B, ...), or logits (B, K, ...) if there are no
        labels."""
        beside = []
        x = images
        for pair in self.down:
            x = pair(x)
            beside.append(x)
        x = self.bottom(x)
        for up in self.up:
            x = up(x, beside.pop())
        logits = self.head(x)
        return logits if labels is None else segmentation_loss(logits, labels).sum()

    def judge(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and Dice of each sample, (B,)."""
        chosen = F.one_hot(logits.argmax(dim=1), logits.shape[1]).movedim(-1, 1).float()
        return {"loss": segmentation_loss(logits, labels), "dice": dice(chosen, labels, smooth=0.0)}

    def block_modules(self) -> Sequence[nn.Module]:
        return [*self.down, self.bottom, *self.up]


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample, (B,) in fp32."""
    logits = precise(logits)
    entropy = F.cross_entropy(logits, labels, reduction="none").flatten(1).mean(dim=1)
    return entropy + 1 - dice(logits.softmax(dim=1), labels, smooth=1.0)


def dice(weights: Tensor, labels: Tensor, smooth: float) -> Tensor:
    """Return 2 |A and B| / (|A| + |B|), averaged over all classes except the background: weights (B, K, ...) -> (B,).

    A class that is neither present nor predicted has a Dice of 1. `smooth` voxels are added to numerator and
    denominator to keep the gradient finite.
    """
    wanted = F.one_hot(labels, weights.shape[1]).movedim(-1, 1)
    weights, wanted = weights[:, 1:].flatten(2), wanted[:, 1:].flatten(2).to(weights.dtype)
    common = (weights * wanted).sum(dim=2)
    both = weights.sum(dim=2) + wanted.sum(dim=2)
    shares = (2 * common + smooth) / (both + smooth).clamp_min(1.0)
    return torch.where(both + smooth > 0, shares, torch.ones_like(shares)).mean(dim=1)


def build(model: ConvModel, _seq_len: int, _layers: range | None) -> ConvNet:
    return UNet(model) if model.segments else ResNet(model)
