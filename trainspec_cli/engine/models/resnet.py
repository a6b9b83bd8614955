"""ResNet of bottlenecks (arXiv:1512.03385), in version 1.5: the 3x3 convolution strides, not the 1x1 before it.

Shapes: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.batch_norm import BatchNorm, precise
from trainspec_cli.engine.models.conv import ConvNet
from trainspec_cli.spec.recipe.model import ConvModel

STEM_CHANNELS = 64


class ConvNorm(nn.Module):
    """A convolution that keeps the extent (but for its stride), and batch normalisation."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = BatchNorm(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(self.conv(x_BCHW))


class BottleneckBlock(nn.Module):
    """Narrow, mix, widen, beside a shortcut."""

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
    """Classes of images; the loss is the cross-entropy of each."""

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
        """-> the summed loss, or logits (B, classes) in fp32."""
        x_BCHW = F.max_pool2d(F.relu(self.stem(images_BCHW)), 3, stride=2, padding=1)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits = precise(self.head(x_BCHW.mean(dim=(2, 3))))
        return logits if classes_B is None else F.cross_entropy(logits, classes_B, reduction="sum")

    def judge(self, logits: Tensor, classes_B: Tensor) -> dict[str, Tensor]:
        """Loss and top-1 accuracy of each sample, (B,)."""
        loss = F.cross_entropy(logits, classes_B, reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == classes_B).float()}

    def block_modules(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """A block begins as its shortcut: the last norm's scale is 0 (arXiv:1706.02677, section 5.1)."""
        if name.endswith("widen.norm.weight"):
            full.zero_()
        else:
            super().init_parameter(name, full, generator)
