"""The tensors of a distributed checkpoint of torch (torch.distributed.checkpoint): `.metadata`, and the files that it
names.

`.metadata` is a pickle, which is read without unpickling; each box of a tensor is a torch.save file within a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainspec_cli.core.reading.files import UnreadableFileError, read_bytes
from trainspec_cli.data.weights.pickled import Made, Value, as_dict, as_shape, fields_of, read_pickle
from trainspec_cli.data.weights.stored import Part, PartedTensor, Shape, damaged
from trainspec_cli.data.weights.torch_file import read_tensor

METADATA = ".metadata"
MAX_METADATA_BYTES = 256 * 2**20
_RECORDS = "torch.distributed.checkpoint.metadata"
_TENSOR = f"{_RECORDS}.TensorStorageMetadata"
_CHUNK = f"{_RECORDS}.ChunkStorageMetadata"
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"


class Checkpoint:
    """The content of `.metadata`. Raises MachineError if it cannot be read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = folder / METADATA
        try:
            described = fields_of(read_pickle(read_bytes(self._file, MAX_METADATA_BYTES)), f"{_RECORDS}.Metadata")
            self._tensors = dict(_tensors(as_dict(described["state_dict_metadata"])))
            self._places = dict(_places(as_dict(described["storage_data"])))
        except UnreadableFileError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self._file, f"is not the metadata of a distributed checkpoint: {error}") from error

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor."""
        return {name: shape for name, (shape, _chunks) in self._tensors.items()}

    def open(self, name: str) -> PartedTensor:
        """Return the location of a tensor. Raises MachineError that names the tensor or the file."""
        shape, chunks = self._tensors[name]
        parts = tuple(self._part(name, start, size) for start, size in chunks)
        whole = PartedTensor(shape, parts)
        is_within = True
        for part in parts:
            ends = [start + size for start, size in zip(part.start, part.held.shape, strict=True)]
            is_within &= len(ends) == len(shape) and all(end <= most for end, most in zip(ends, shape, strict=False))
        if not parts or not whole.is_whole or not is_within:
            raise damaged(self._file, f"does not hold the whole of {name}: its parts do not make up its shape")
        return whole

    def _part(self, name: str, start: Shape, size: Shape) -> Part:
        if (name, start) not in self._places:
            raise damaged(self._file, f"does not state the location of {name} from {list(start)}")
        file, offset, length = self._places[name, start]
        # The pickle may be untrusted: a name with a folder in it could refer to any file on this machine.
        if Path(file).name != file or "\0" in file:
            raise damaged(self._file, f"names {file!r} for {name}, which is not a file in its folder")
        if not (self._folder / file).is_file():
            raise damaged(self._folder / file, f"is missing, but contains {name}")
        held = read_tensor(self._folder / file, offset, length, name)
        if held.shape != size:
            raise damaged(self._folder / file, f"has {name} as {list(held.shape)}, but .metadata states {list(size)}")
        return Part(start, held)


def _tensors(described: dict[Value, Value]) -> Iterable[tuple[str, tuple[Shape, list[tuple[Shape, Shape]]]]]:
    """Yield (name, (shape, (start, size) of each box)); values that are not tensors are left out."""
    for name, value in described.items():
        if isinstance(name, str) and isinstance(value, Made) and value.of == _TENSOR:
            held = fields_of(value, _TENSOR)
            chunks = held["chunks"]
            if not isinstance(chunks, list):
                raise ValueError(f"{name} has no list of boxes")
            boxes = [fields_of(chunk, _CHUNK) for chunk in chunks]
            yield name, (as_shape(held["size"]), [(as_shape(box["offsets"]), as_shape(box["sizes"])) for box in boxes])


def _places(described: dict[Value, Value]) -> Iterable[tuple[tuple[str, Shape], tuple[str, int, int]]]:
    """Yield ((name, start of the box), (file, offset, bytes)) for each box of a tensor."""
    for key, value in described.items():
        index = fields_of(key, f"{_RECORDS}.MetadataIndex")
        place = fields_of(value, _STORAGE)
        name = index["fqn"]
        file = place["relative_path"]
        offset = index.get("offset")
        if offset is None:  # not a tensor
            continue
        if not isinstance(name, str) or not isinstance(file, str):
            raise ValueError("a box has no name or no file")
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed, which is not supported")
        at, length = as_shape((place["offset"], place["length"]))
        yield (name, as_shape(offset)), (file, at, length)
