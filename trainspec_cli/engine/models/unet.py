"""U-Net (arXiv:1505.04597) in two or three dimensions, as in MLPerf Training.

Strided convolutions go down, transposed ones up; instance normalisation (arXiv:1607.08022), no cropping.

Shapes: B samples, C channels, K classes, then the extents of space.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.batch_norm import precise
from trainspec_cli.engine.models.conv import ConvNet
from trainspec_cli.spec.recipe.model import ConvModel

CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
CONV_UP: dict[int, type[nn.ConvTranspose2d | nn.ConvTranspose3d]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class ConvNormRelu(nn.Module):
    """A convolution of width 3, normalised by each sample's and channel's own statistics (in fp32, in the kernel)."""

    def __init__(self, channels_in: int, channels: int, dims: int, stride: int = 1):
        super().__init__()
        self.conv = CONV[dims](channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Pair(nn.Module):
    """Two convolutions; the first may stride."""

    def __init__(self, channels_in: int, channels: int, dims: int, stride: int):
        super().__init__()
        self.first = ConvNormRelu(channels_in, channels, dims, stride)
        self.second = ConvNormRelu(channels, channels, dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Up(nn.Module):
    """Doubles the extent, concatenates the skip connection, and applies two convolutions."""

    def __init__(self, channels_in: int, channels: int, dims: int):
        super().__init__()
        self.widen = CONV_UP[dims](channels_in, channels, kernel_size=2, stride=2)
        self.join = Pair(2 * channels, channels, dims, stride=1)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.join(torch.cat((self.widen(x), beside), dim=1))


class UNet(ConvNet):
    """Segments voxels; the loss of a sample is its mean cross-entropy plus 1 - soft Dice (arXiv:1606.04797)."""

    def __init__(self, model: ConvModel):
        super().__init__()
        dims, widths = len(model.input_size), model.widths
        self.down = nn.ModuleList([Pair(model.in_channels, widths[0], dims, stride=1)])
        self.down.extend(Pair(above, width, dims, stride=2) for above, width in pairwise(widths))
        self.bottom = Pair(widths[-1], widths[-1], dims, stride=2)
        self.up = nn.ModuleList(Up(below, width, dims) for below, width in pairwise([widths[-1], *reversed(widths)]))
        self.head = CONV[dims](widths[0], model.num_classes, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss of labels (B, ...), or logits (B, K, ...) without labels, of images (B, C, ...)."""
        beside, x = [], images
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
    """Return 2 |A and B| / (|A| + |B|), the mean over all classes but the background: weights (B, K, ...) -> (B,).

    A class that is neither present nor predicted gives 1. `smooth` voxels in both terms keep the gradient finite.
    """
    wanted = F.one_hot(labels, weights.shape[1]).movedim(-1, 1)
    weights, wanted = weights[:, 1:].flatten(2), wanted[:, 1:].flatten(2).to(weights.dtype)
    common, both = (weights * wanted).sum(dim=2), weights.sum(dim=2) + wanted.sum(dim=2)
    shares = (2 * common + smooth) / (both + smooth).clamp_min(1.0)
    return torch.where(both + smooth > 0, shares, torch.ones_like(shares)).mean(dim=1)
