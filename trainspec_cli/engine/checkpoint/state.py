"""What a checkpoint holds, as one flat dictionary of tensors that any layout can read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`model.*` and `optimizer.*`: views of the live tensors, sharded as they are."""
    model_state = {f"model.{key}": value for key, value in get_model_state_dict(model).items()}
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return model_state | {
        f"optimizer.{key}": value for key, value in optimizer_state.items() if isinstance(value, Tensor)
    }


def restore_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a loaded state into place. Hyper-parameters come from the recipe, not from the checkpoint."""
    set_model_state_dict(model, _below(state, "model."))
    current = get_optimizer_state_dict(model, optimizer, options=FLAT)
    set_optimizer_state_dict(model, optimizer, current | _below(state, "optimizer."), options=FLAT)


def _below(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
