"""What a checkpoint holds, as named parts of full tensors that any layout can read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainspec_cli.engine.shares import Share, unique_shares


@dataclass(frozen=True)
class TensorPart:
    """A rank's part of a full tensor: `tensor` is the live memory, and lies at `offsets` in `full_shape`."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    full_shape: tuple[int, ...]

    @staticmethod
    def whole(name: str, tensor: Tensor) -> TensorPart:
        return TensorPart(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Held:
    """What a rank saves and loads."""

    shares: Sequence[Share]
    modules: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer

    def parts(self) -> list[TensorPart]:
        """`model.*` and `optimizer.*`, of the live tensors; empty parts are left out."""
        return [part for part in self._parts() if part.tensor.numel()]

    def tensors(self) -> list[Tensor]:
        """The same in an order that the layout alone decides, for a rank that holds the same parts."""
        return [part.tensor for part in sorted(self.parts(), key=lambda part: (part.name, part.offsets))]

    def _parts(self) -> Iterator[TensorPart]:
        for share in unique_shares(self.shares):
            yield _part(f"model.{share.name}", share, share.local.detach())
            for key, value in self.optimizer.state[share.local].items():
                name = f"optimizer.state.{share.name}.{key}"
                yield _part(name, share, value) if value.dim() else TensorPart.whole(name, value)
        buffers = {name: buffer for module in self.modules for name, buffer in kept_buffers(module)}
        yield from (TensorPart.whole(f"model.{name}", buffer) for name, buffer in buffers.items())


def _part(name: str, share: Share, tensor: Tensor) -> TensorPart:
    return TensorPart(name, tensor, tuple(share.offsets), tuple(share.full_shape))


def kept_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that training changes; the same on every rank that holds them."""
    kept = module.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)


@torch.no_grad()
def copy_twins(shares: Sequence[Share], optimizer: torch.optim.Optimizer) -> None:
    """Give what was loaded to a second copy on this rank (a tied embedding on two stages)."""
    first = {share.name: share for share in unique_shares(shares)}
    for share in shares:
        source = first[share.name]
        if source is not share:
            share.local.copy_(source.local)
            for key, value in optimizer.state[share.local].items():
                value.copy_(optimizer.state[source.local][key])


def rng_parts(rank: int, device: torch.device) -> list[TensorPart]:
    """Copies of the states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [TensorPart.whole(f"rng.{rank}.{kind}", state) for kind, state in states.items()]


def set_rng(parts: Sequence[TensorPart], device: torch.device) -> None:
    """Give the generators what was loaded into `rng_parts`."""
    for part in parts:
        if part.name.endswith(".cpu"):
            torch.set_rng_state(part.tensor)
        else:
            torch.cuda.set_rng_state(part.tensor, device)
