"""The tensors of a torch.save file: a zip archive with a pickle and one entry for each storage.

The archive may be a range of a larger file, as in a distributed checkpoint. Entries are not compressed, so that their
numbers are read in place.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from trainspec_cli.core.reading.files import open_regular
from trainspec_cli.data.huggingface.safetensors import DTYPE_BYTES
from trainspec_cli.data.weights.pickled import Made, Name, Value, as_dict, as_shape, read_pickle
from trainspec_cli.data.weights.stored import Part, PartedTensor, StridedTensor, damaged

MAX_PICKLE_BYTES = 64 * 2**20
_STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
}
_LOCAL_HEADER = struct.Struct("<26xHH")
"""A zip entry: ..., the length of its name, the length of its extra field."""


def read_state(file: Path, inside: tuple[str, ...] = ()) -> dict[str, PartedTensor]:
    """Return the tensors of a state dict that was saved alone, or under one of the keys `inside` of a dict.

    Other values are left out. Raises MachineError that names the file, and the tensor with a mistake.
    """
    archive = TorchArchive(file, 0, file.stat().st_size)
    try:
        held = as_dict(archive.value)
        for key in inside:
            held = as_dict(held[key]) if key in held else held
    except ValueError as error:
        raise damaged(file, f"has no state dict: {error}") from error
    found = {}
    for name, value in held.items():
        if isinstance(name, str) and isinstance(value, Made):
            tensor = archive.tensor(name, value)
            found[name] = PartedTensor(tensor.shape, (Part((0,) * len(tensor.shape), tensor),))
    return found


def read_tensor(file: Path, start: int, length: int, name: str) -> StridedTensor:
    """Return the only tensor of an archive of `length` bytes at `start`. Raises MachineError."""
    archive = TorchArchive(file, start, length)
    return archive.tensor(name, archive.value)


class TorchArchive:
    """The archive's pickle, and the offsets of its storages."""

    def __init__(self, file: Path, start: int, length: int):
        self._file = file
        self._entries: dict[str, tuple[int, int]] = {}
        """Name of an entry, without the archive's own name -> (offset in the file, bytes)."""
        with open_regular(file) as content:
            if start + length > file.stat().st_size:
                raise damaged(file, f"is cut short: part of the {length:,} bytes from byte {start:,} is missing")
            try:
                self.value = self._read(content, start, length)
            except (ValueError, KeyError, EOFError, OSError, NotImplementedError, RuntimeError) as error:
                raise damaged(file, f"is not a torch.save file (from byte {start:,}): {error}") from error
            except (zipfile.BadZipFile, struct.error) as error:
                raise damaged(file, f"is not a complete torch.save file (from byte {start:,}): {error}") from error

    def _read(self, content: BinaryIO, start: int, length: int) -> Value:
        archive = zipfile.ZipFile(_Range(content, start, length))
        for entry in archive.infolist():
            # Numbers are read in place, which compression and encryption prevent.
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename} is compressed or encrypted")
            # The local header repeats the lengths of name and extra field, which may differ from those in the
            # directory.
            content.seek(start + entry.header_offset)
            lengths = _LOCAL_HEADER.unpack(content.read(_LOCAL_HEADER.size))
            begins = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
            if begins + entry.file_size > length:
                raise ValueError(f"{entry.filename} is cut short")
            self._entries[entry.filename.partition("/")[2]] = (start + begins, entry.file_size)
        if self._entry(content, "byteorder", b"little") != b"little":
            raise ValueError("its numbers are big-endian")
        return read_pickle(self._entry(content, "data.pkl"))

    def _entry(self, content: BinaryIO, name: str, default: bytes | None = None) -> bytes:
        if default is not None and name not in self._entries:
            return default
        start, size = self._entries[name]
        if size > MAX_PICKLE_BYTES:
            raise ValueError(f"{name} has {size:,} bytes; at most {MAX_PICKLE_BYTES:,} are allowed")
        content.seek(start)
        return content.read(size)

    def tensor(self, name: str, value: Value) -> StridedTensor:
        """Return a tensor of the pickle. Raises MachineError that names it."""
        try:
            return self._tensor(value)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise damaged(self._file, f"has {name} in a form that cannot be read: {error}") from error

    def _tensor(self, value: Value) -> StridedTensor:
        if not isinstance(value, Made) or not isinstance(value.arguments, tuple):
            raise ValueError("it is not a tensor")
        if value.of == "torch._utils._rebuild_parameter":
            return self._tensor(value.arguments[0])
        if value.of != "torch._utils._rebuild_tensor_v2":
            raise ValueError(f"it is made by {value.of}, not by torch._utils._rebuild_tensor_v2")
        storage, offset, size, strides = value.arguments[:4]
        # The storage's dtype, and its offset and size in the file.
        if not isinstance(storage, Made) or storage.of != "persistent" or not isinstance(storage.arguments, tuple):
            raise ValueError("it has no storage")
        _word, kind, key = storage.arguments[:3]
        if not isinstance(kind, Name) or kind.path not in _STORAGES:
            named = kind.path if isinstance(kind, Name) else "no storage"
            raise ValueError(f"its numbers are {named}; supported are {', '.join(_STORAGES)}")
        dtype, (start, held_bytes) = _STORAGES[kind.path], self._entries[f"data/{key}"]
        (offset,) = as_shape((offset,))
        shape = as_shape(size)
        steps = as_shape(strides)
        if len(shape) != len(steps):
            raise ValueError(f"it has {len(shape)} dimensions but {len(steps)} strides")
        skipped = offset * DTYPE_BYTES[dtype]
        found = StridedTensor(self._file, dtype, shape, start + skipped, steps)
        if skipped + found.span_bytes > held_bytes:
            raise ValueError(f"it has more numbers than fit in the {held_bytes:,} bytes of its storage")
        return found


class _Range(io.RawIOBase):
    """A range of a file, as a separate file object."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        content = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(content)
        return content
