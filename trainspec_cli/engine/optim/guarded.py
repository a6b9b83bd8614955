"""What optimizers written here share: the guard of `guarded_update`, and AdamW for what they leave to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

Group = dict[str, Any]


@dataclass(frozen=True)
class Guard:
    """Says whether an update is skipped, and what divides the gradients; on the device, so that the host never
    waits."""

    skipped: Tensor
    """True where something is not finite: then nothing changes."""
    scale: Tensor

    @staticmethod
    def take_from(optimizer: torch.optim.Optimizer, device: torch.device) -> Guard:
        """Return the guard that stands on the optimizer, where one does, for one step."""
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
        found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
        return Guard(found_inf > 0, torch.ones((), device=device) if scale is None else scale)

    def set_(self, target: Tensor, value: Tensor) -> None:
        """Set `target` in place, unless the update is skipped."""
        target.copy_(torch.where(self.skipped, target, value))


class GuardedOptimizer(torch.optim.Optimizer):
    """Updates by `update_group` the groups that have a `rule`, and by AdamW, in one kernel, those that have none."""

    def __init__(self, groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "rule": ""})

    def start_state(self, like: Callable[[Tensor], Tensor]) -> None:
        """Make the state that the first update would make; `like` makes a tensor of zeros of another's shape."""
        for group in self.param_groups:
            for parameter in group["params"]:
                start = self.start_rule if group["rule"] else start_adamw
                self.state[parameter] = start(parameter, like)

    def start_rule(self, parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError

    def update_group(self, group: Group, guard: Guard) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        guard = Guard.take_from(self, self.param_groups[0]["params"][0].device)
        for group in self.param_groups:
            if group["rule"]:
                self.update_group(group, guard)
            else:
                self._update_by_adamw(group, guard)

    def _update_by_adamw(self, group: Group, guard: Guard) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=guard.scale,
            found_inf=guard.skipped.float(),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def start_adamw(parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": like(parameter),
        "exp_avg_sq": like(parameter),
    }
