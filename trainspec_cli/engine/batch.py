"""What passes between the data, the models and the step, which do not know one another."""

from __future__ import annotations

from torch import Tensor

MicroBatch = tuple[Tensor, Tensor]
"""(tokens, targets), each (B, S) of int64, on the device."""

IGNORED_TARGET = -1
"""A target that takes no part in the loss."""
