"""The tensors in torch.save files, and in distributed checkpoints, which consist of such files.

A torch.save file is a zip archive with a pickle and one entry for each storage. The archive may be a range within a
larger file, as in a distributed checkpoint. Entries are not compressed, so their values can be read in place."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainspec_cli.core.reading.files import UnreadableFileError, open_regular, read_bytes
from trainspec_cli.data.huggingface.safetensors import DTYPE_BYTES
from trainspec_cli.data.weights.stored import Part, PartedTensor, Shape, StridedTensor, damaged

MAX_PICKLE_BYTES = 64 * 2**20
_STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.DoubleStorage": "F64",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
}
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The local header of a zip entry. Only the lengths of the name and of the extra field are read."""


def read_state(file: Path, inside: tuple[str, ...] = ()) -> dict[str, PartedTensor]:
    """Return the tensors of a state dict that was saved by itself, or in a dict under one of the keys in `inside`.
    Other values are omitted. Raises MachineError, naming the file and the faulty tensor."""
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
    """Return the only tensor in an archive of `length` bytes at `start`. Raises MachineError."""
    archive = TorchArchive(file, start, length)
    return archive.tensor(name, archive.value)


class TorchArchive:
    """The archive's pickle, and the offsets of its storages."""

    def __init__(self, file: Path, start: int, length: int):
        self._file = file
        self._entries: dict[str, tuple[int, int]] = {}
        """Maps an entry's name (without the archive's own name) to (offset in the file, number of bytes)."""
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
            # Compressed or encrypted values cannot be read in place.
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
        """Return a tensor from the pickle. Raises a MachineError that names it."""
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
        # The storage has a dtype, and an offset and a size in the file.
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
    """A range of a file, presented as a separate file object."""

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


# Read the values that a pickle describes. Its instructions are interpreted here, without looking up classes or calling
# anything. A class or function in the pickle is represented by its name, and an object that the pickle would create by
# a record of the name, the arguments and the state. An untrusted file can therefore name anything without any effect.
# The time needed is linear in the size of the file.


Value = object
"""Plain values, lists, tuples, dicts, `Name` and `Made`."""


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names, as `module.name`."""

    path: str


@dataclass(eq=False)
class Made:
    """The record of an object that calling the class or function named `of` would have created."""

    of: str
    arguments: Value
    state: Value = None


_PLAIN = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_CONSTANT: Mapping[str, Callable[[], Value]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": list,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(content: bytes) -> Value:
    """Return the value that `content` describes. Raises ValueError, which states the mistake."""
    reader = _Reader()
    try:
        for opcode, argument, _position in pickletools.genops(content):
            if opcode.name == "STOP":
                return reader.pop()
            reader.apply(opcode.name, argument)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not a readable pickle: {error}") from error
    raise ValueError("it is not a readable pickle: it has no end")


class _Reader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, Value] = {}

    def pop(self) -> Value:
        return self._stack.pop()

    def apply(self, name: str, argument: Value) -> None:
        stack = self._stack
        match name:
            case _ if name in _PLAIN:
                stack.append(argument)
            case _ if name in _CONSTANT:
                stack.append(_CONSTANT[name]())
            case _ if name in _TUPLES:
                stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[_whole(argument)] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[_whole(argument)])
            case "POP":
                stack.pop()
            case "TUPLE":
                stack.append(tuple(self._from_mark()))
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS" | "ADDITEMS":
                self._extend(self._from_mark())
            case "SETITEM":
                value = stack.pop()
                self._update([stack.pop(), value])
            case "SETITEMS":
                self._update(self._from_mark())
            case "GLOBAL":
                stack.append(Name(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                last = stack.pop()
                stack.append(Name(f"{stack.pop()}.{last}"))
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                of = stack.pop()
                if not isinstance(of, Name):
                    raise ValueError("an object is made of something that is not a name")
                stack.append(Made(of.path, arguments))
            case "BUILD":
                state = stack.pop()
                held = stack[-1]
                if not isinstance(held, Made):
                    raise ValueError("a state is set on something that is not an object")
                held.state = state if held.state is None else held.state
            case "BINPERSID":
                stack.append(Made("persistent", stack.pop()))
            case _:
                raise ValueError(f"the instruction {name} does not occur in checkpoints")

    def _from_mark(self) -> list[Value]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _extend(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if not isinstance(held, list):
            raise ValueError("items are added to something that is not a list")
        held.extend(items)

    def _update(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if isinstance(held, Made):  # the entries of an OrderedDict
            held.state = {} if held.state is None else held.state
            held = held.state
        if not isinstance(held, dict):
            raise ValueError("entries are added to something that is not a dict")
        held.update(zip(items[::2], items[1::2], strict=True))


def _whole(value: Value) -> int:
    if type(value) is not int:
        raise ValueError("a whole number is missing")
    return value


def as_dict(value: Value) -> dict[Value, Value]:
    """Return a dict, or the entries of an OrderedDict. Raises ValueError for anything else."""
    held = value.state or {} if isinstance(value, Made) and value.of == "collections.OrderedDict" else value
    if not isinstance(held, dict):
        raise ValueError("a dict is missing")
    return held


def fields_of(value: Value, of: str) -> dict[Value, Value]:
    """Return the fields of a record of class `of`. Raises ValueError for anything else."""
    if not isinstance(value, Made) or value.of != of or not isinstance(value.state, dict):
        raise ValueError(f"a record of {of.rpartition('.')[2]} is missing")
    return value.state


def as_shape(value: Value) -> tuple[int, ...]:
    """Return a tuple of integers, or a torch.Size, as a tuple. Raises ValueError for anything else."""
    if isinstance(value, Made) and value.of == "torch.Size" and isinstance(value.arguments, tuple):
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise ValueError("a shape is missing")
    if not all(type(extent) is int and 0 <= extent < MAX_EXTENT for extent in value):
        raise ValueError("a shape has a size below 0, or an impossibly large one")
    return tuple(value)


MAX_EXTENT = 2**53
MAX_DIMS = 16


# torch's distributed checkpoints (torch.distributed.checkpoint): `.metadata`, and the files that it names. `.metadata`
# is a pickle, which is read without unpickling it. Each box of a tensor is a torch.save archive within one of these
# files.


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
        """Return the location of a tensor. Raises MachineError, naming the tensor or the file."""
        shape, chunks = self._tensors[name]
        parts = tuple(self._part(name, start, size) for start, size in chunks)
        whole = PartedTensor(shape, parts)
        is_within = True
        for part in parts:
            ends = [start + size for start, size in zip(part.start, part.held.shape, strict=True)]
            is_within &= len(ends) == len(shape) and all(end <= most for end, most in zip(ends, shape, strict=False))
        if not parts or not whole.is_whole or not is_within:
            raise damaged(self._file, f"does not contain all of {name}: the parts do not cover its full shape")
        return whole

    def _part(self, name: str, start: Shape, size: Shape) -> Part:
        if (name, start) not in self._places:
            raise damaged(self._file, f"does not state the location of {name} from {list(start)}")
        file, offset, length = self._places[name, start]
        # The pickle may be untrusted, and a name that contains a folder could refer to any file on this machine.
        if Path(file).name != file or "\0" in file:
            raise damaged(self._file, f"names {file!r} for {name}, which is not a file in its folder")
        if not (self._folder / file).is_file():
            raise damaged(self._folder / file, f"is missing, but contains {name}")
        held = read_tensor(self._folder / file, offset, length, name)
        if held.shape != size:
            raise damaged(self._folder / file, f"has {name} as {list(held.shape)}, but .metadata states {list(size)}")
        return Part(start, held)


def _tensors(described: dict[Value, Value]) -> Iterable[tuple[str, tuple[Shape, list[tuple[Shape, Shape]]]]]:
    """Yield (name, (shape, (start, size) of each box)). Values that are not tensors are omitted."""
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
