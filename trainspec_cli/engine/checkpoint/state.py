"""What a checkpoint holds, as one flat dictionary of tensors that any layout can read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from trainspec_cli.engine.shares import Share, unique_shares


class Part(Tensor):
    """A rank's part of a full tensor, for torch.distributed.checkpoint (its `_Checkpointable` protocol).

    Loading fills `local` in place from whatever parts the checkpoint was saved in.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    local: Tensor
    offsets: torch.Size
    full_shape: torch.Size

    @staticmethod
    def of(local: Tensor, offsets: torch.Size, full_shape: torch.Size) -> Part:
        part = local.as_subclass(Part)
        part.local, part.offsets, part.full_shape = local, offsets, full_shape
        return part

    def size(self) -> torch.Size:  # type: ignore[override]
        """Of the full tensor, which is what a checkpoint must agree on."""
        return self.full_shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self.offsets, self.local.shape)] if self.local.numel() else []

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.full_shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.local


def gather_state(
    shares: Sequence[Share], parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """`model.*` and `optimizer.*`: views of the live tensors, sharded as they are."""
    state: dict[str, Any] = {}
    for share in unique_shares(shares):
        state[f"model.{share.name}"] = _part(share, share.local.detach())
        for key, value in optimizer.state[share.local].items():
            state[f"optimizer.state.{share.name}.{key}"] = _part(share, value) if value.dim() else value
    return state | {f"model.{name}": buffer for part in parts for name, buffer in kept_buffers(part)}


def _part(share: Share, tensor: Tensor) -> Part:
    return Part.of(tensor, share.offsets, share.full_shape)


def kept_buffers(part: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that training changes; the same on every rank that holds them."""
    kept = part.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in part.named_buffers() if name in kept)


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
