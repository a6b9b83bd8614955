"""Describe the part of each parameter that a rank holds, for initialising, saving, measuring and digesting.

A parameter is first split by tensor or expert parallelism (`Cut`: this rank's module holds a smaller plain tensor), and
the part is then sharded by FSDP2 (a DTensor over one mesh axis). A share also records how many ranks hold copies of the
same part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trainspec_cli.engine.nf4 import Nf4, Place, dequantise, magnitude_table, pair_table, quantise


@dataclass(frozen=True)
class Cut:
    """A split along `dim` into `count` parts of about `full_size` / `count`. This rank holds part `index`."""

    dim: int
    full_size: int
    index: int
    count: int
    group: dist.ProcessGroup
    """The ranks that hold the parts, in order."""

    @property
    def start(self) -> int:
        return min(self.full_size, self.index * self._part)

    @property
    def size(self) -> int:
        return min(self.full_size, (self.index + 1) * self._part) - self.start

    @property
    def _part(self) -> int:
        return -(-self.full_size // self.count)

    def part_of(self, parameter: Tensor) -> nn.Parameter:
        """Return a copy of this rank's part of a full tensor."""
        part = parameter.detach().narrow(self.dim, self.start, self.size).contiguous()
        return nn.Parameter(part, parameter.requires_grad)


@dataclass(frozen=True)
class Split:
    """A tensor whose parts along `dim` are on the ranks of `group`, in order. Each part has the size `size` / ranks,
    rounded up; the last parts may be shorter or empty."""

    dim: int
    size: int
    group: dist.ProcessGroup

    @property
    def sizes(self) -> list[int]:
        ranks = self.group.size()
        part = -(-self.size // ranks)
        return [max(0, min(part, self.size - rank * part)) for rank in range(ranks)]


@dataclass(frozen=True)
class Share:
    name: str
    """The parameter's name in the full model, which does not depend on the layout."""
    parameter: nn.Parameter
    """The parameter in the module: a DTensor with FSDP2."""
    cut: Cut | None = None
    copies: int = 1
    """Number of ranks of the job that hold this part, including this one."""

    @cached_property
    def local(self) -> nn.Parameter:
        """The same memory as a plain tensor, which the optimizer updates."""
        return nn.Parameter(local_part(self.parameter.detach()), requires_grad=False)

    @property
    def is_trained(self) -> bool:
        """False if adapters are trained instead."""
        return self.parameter.requires_grad

    @property
    def gradient(self) -> Tensor | None:
        """Return the local part's gradient."""
        return None if self.parameter.grad is None else local_part(self.parameter.grad)

    @property
    def full_shape(self) -> torch.Size:
        shape = list(self.parameter.shape)
        if self.cut:
            shape[self.cut.dim] = self.cut.full_size
        return torch.Size(shape)

    @property
    def offsets(self) -> torch.Size:
        """Return the indices at which the local part begins in the full parameter."""
        offsets = [0] * self.parameter.dim()
        if self.cut:
            offsets[self.cut.dim] = self.cut.start
        if isinstance(self.parameter, DTensor):
            (placement,) = self.parameter.placements
            assert isinstance(placement, Shard), "FSDP2 shards over one axis"
            size = self.parameter.shape[placement.dim]
            mesh = self.parameter.device_mesh
            chunk = -(-size // mesh.size())  # FSDP2 splits like torch.chunk
            offsets[placement.dim] += min(size, mesh.get_local_rank() * chunk)
        return torch.Size(offsets)

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return how the full parameter is assembled from local parts, with the innermost split first."""
        found = []
        if isinstance(self.parameter, DTensor):
            (placement,) = self.parameter.placements
            assert isinstance(placement, Shard), "FSDP2 shards over one axis"
            size = self.parameter.shape[placement.dim]
            found.append(Split(placement.dim, size, self.parameter.device_mesh.get_group()))
        if self.cut:
            found.append(Split(self.cut.dim, self.cut.full_size, self.cut.group))
        return tuple(split for split in found if split.group.size() > 1)

    def place_of(self, state: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offsets, full shape) of an optimizer state tensor. It has the shape of the local part, or its last
        dimension is different (one scale per block of a row) and is split only by a `Cut`."""
        if state.shape == self.local.shape:
            return tuple(self.offsets), tuple(self.full_shape)
        rows = state.dim() - 1
        values = state.shape[-1]
        index, count = (self.cut.index, self.cut.count) if self.cut and self.cut.dim >= rows else (0, 1)
        return (*self.offsets[:rows], index * values), (*self.full_shape[:rows], count * values)

    def part_of(self, full: Tensor) -> Tensor:
        """Return the local part of `full` as a view."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.local.shape, strict=True)):
            full = full.narrow(dim, start if size else 0, size)
        return full

    def gather(self, tensor: Tensor | None = None) -> Tensor:
        """Return the full parameter, or `tensor` (for example its gradient) assembled in the same way. Called
        collectively by all ranks that hold parts of it."""
        tensor = self.parameter if tensor is None else tensor
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        return gather_cut(whole, self.cut) if self.cut else whole


def unique_shares(shares: Sequence[Share]) -> list[Share]:
    """Return each share once. A tied embedding may be on two stages of one rank, but is only saved and digested
    once."""
    return list({share.name: share for share in shares}.values())


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_cut(part: Tensor, cut: Cut) -> Tensor:
    """Return the parts of all ranks of the split, concatenated along its dimension. The last parts may be smaller."""
    size = -(-cut.full_size // cut.count)
    padded = part.new_zeros((size, *part.movedim(cut.dim, 0).shape[1:]))
    padded[: cut.size] = part.movedim(cut.dim, 0)
    gathered = [torch.empty_like(padded) for _ in range(cut.count)]
    dist.all_gather(gathered, padded, group=cut.group)
    return torch.cat(gathered)[: cut.full_size].movedim(0, cut.dim).contiguous()


# Fill a rank's parts of quantised matrices from full matrices.


ADAPTERS = ("lora_a", "lora_b", "lora_m")
"""Ends of the names of parameters that a run can add to those of its first weights."""
TENSORS = ("nf4_codes", "nf4_magnitudes", "nf4_scales")
"""The buffers that replace a layer's `weight`, in the order of `Nf4`."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A rank's part of a quantised matrix. Full matrices are quantised, so that values do not depend on the layout."""

    name: str
    """The name of the matrix if it is not quantised."""
    parts: tuple[Share, ...]
    """This rank's part of each buffer, in the order of `Nf4`."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        *rows, half = self.parts[0].full_shape
        return (*rows, 2 * half)

    @torch.no_grad()
    def fill(self, full_FD: Tensor) -> None:
        for share, tensor in zip(self.parts, quantise(full_FD), strict=True):
            share.local.copy_(share.part_of(tensor))


def split_quantised(shares: Sequence[Share]) -> tuple[list[Share], list[QuantisedMatrix]]:
    """Return the shares of unquantised parameters, and the other shares combined into quantised matrices."""
    plain = [share for share in shares if not is_quantised(share.name)]
    others = {share.name: share for share in shares if is_quantised(share.name)}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in others)
    return plain, [
        QuantisedMatrix(_weight_of(owner), tuple(others[f"{owner}.{leaf}"] for leaf in TENSORS)) for owner in owners
    ]


def _weight_of(owner: str) -> str:
    """Return the name of a module's weight if it is not quantised. Experts' matrices are then not modules."""
    return owner if ".experts." in owner else f"{owner}.weight"


def is_quantised(name: str) -> bool:
    """Return whether a tensor of that name is part of a quantised matrix."""
    return name.endswith(TENSORS)


def quantised_parameters(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the buffers of `part` that are parts of quantised matrices, as parameters that share their memory."""
    found = ((name, buffer) for name, buffer in part.named_buffers() if is_quantised(name))
    return [(name, nn.Parameter(buffer, requires_grad=False)) for name, buffer in found]


def names_of(weight: str) -> tuple[str, ...]:
    """Return the names of the tensors that replace the weight named `weight` if it is quantised."""
    return tuple(f"{weight.removesuffix('.weight')}.{leaf}" for leaf in TENSORS)


def restore(held: Nf4) -> Tensor:
    """Return the full matrix in fp32."""
    device = held.codes.device
    return dequantise(held, Place(), pair_table(device), magnitude_table(device), torch.float32)
