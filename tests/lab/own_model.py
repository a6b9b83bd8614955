"""User-defined blocks and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import TrainSection


class Averager(nn.Module):
    """The running mean of the tokens so far, through a gated feed-forward."""

    decay: Tensor

    def __init__(self, hidden_size: int, layer: int, width: int = 2):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.gate = nn.Linear(hidden_size, width * hidden_size)
        self.up = nn.Linear(hidden_size, width * hidden_size, bias=False)
        self.down = nn.Linear(width * hidden_size, hidden_size, bias=False)
        self.scale = nn.Parameter(torch.full((hidden_size,), 1.0 + layer))
        self.register_buffer("decay", torch.linspace(0.5, 1.0, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        so_far = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        mean = (self.norm(x).cumsum(1) / so_far * self.decay).to(x.dtype)
        return x + self.scale * self.down(F.silu(self.gate(mean)) * self.up(mean))


def smoothed(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")


HIDDEN, WIDTH = 64, 2
BLOCK_PARAMS = HIDDEN + 3 * WIDTH * HIDDEN * HIDDEN + WIDTH * HIDDEN + HIDDEN
OWN = OwnModel(
    num_layers=4,
    hidden_size=HIDDEN,
    vocab_size=256,
    block=f"{__file__}:Averager",
    block_params=BLOCK_PARAMS,
    options={"width": WIDTH},
)
OWN_LOSS = TrainSection(max_steps=20, loss=f"{__file__}:smoothed", loss_options={"smoothing": 0.2})
