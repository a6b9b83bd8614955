"""AdamW (arXiv:1711.05101) for one parameter at a time, for many at a time, or with torchao; equivalent to
`optim.optimizer.fused`.

All variants have the same state (`step`, `exp_avg`, `exp_avg_sq` for each parameter), so a run can resume with a
different variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.accelerators import KINDS


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that accepts `grad_scale` and `found_inf` like torch's fused kernel. The host waits to read `found_inf`."""

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        self.found_inf = self.grad_scale = None  # torch's own step rejects these arguments
        if found_inf is not None and found_inf.item():
            return
        if grad_scale is not None:
            torch._foreach_div_([p.grad for group in self.param_groups for p in group["params"]], grad_scale)
        self.update()

    def update(self) -> None:
        super().step()


class TorchaoAdamW(GuardedAdamW):
    """AdamW from torchao (BSD-3), which compiles it for each parameter shape."""

    def update(self) -> None:
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                rates = *group["betas"], group["weight_decay"], group["eps"]
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["step"] += 1
                    lr = torch.tensor(group["lr"], dtype=torch.float32)
                    moments = state["step"], state["exp_avg"], state["exp_avg_sq"], None
                    _torchao_update()(parameter.detach(), parameter.grad, *moments, lr, *rates, True, False)


@cache
def _torchao_update() -> Any:
    from torchao.optim.adam import single_param_adam

    return torch.compile(single_param_adam, fullgraph=True, dynamic=False)


Groups = Sequence[dict[str, Any]]


def looped(groups: Groups, lr: float, betas: tuple[float, float], eps: float, foreach: int) -> torch.optim.AdamW:
    """Update one parameter at a time or, with `foreach`, many in one call."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    # If the accelerator can keep the update count, the host does not have to wait for it.
    capturable = any(KINDS[kind].capturable for kind in kinds & KINDS.keys())
    return GuardedAdamW(groups, lr=lr, betas=betas, eps=eps, foreach=bool(foreach), capturable=capturable)


def torchao(groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    return TorchaoAdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False)
