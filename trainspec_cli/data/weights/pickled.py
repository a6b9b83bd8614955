"""The values that a pickle describes, read as a list of instructions: no class is looked up and nothing is called.

A class or function that the pickle names stays its name, and what the pickle would have it make is a record of the
name, the arguments and the state. So a stranger's file can name whatever it likes. The work is linear in its size.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = object
"""Plain values, lists, tuples, dicts, `Name` and `Made`."""


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names, as `module.name`."""

    path: str


@dataclass(eq=False)
class Made:
    """What a class or function that is named `of` would have been called to make."""

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
_IGNORED = frozenset(("PROTO", "FRAME"))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(content: bytes) -> Value:
    """Return what `content` describes. Raises ValueError that says what is wrong."""
    reader = _Reader()
    try:
        for opcode, argument, _position in pickletools.genops(content):
            if opcode.name == "STOP":
                return reader.pop()
            reader.apply(opcode.name, argument)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no pickle that can be read: {error}") from error
    raise ValueError("it is no pickle that can be read: it has no end")


class _Reader:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, Value] = {}

    def pop(self) -> Value:
        return self._stack.pop()

    def apply(self, name: str, argument: Value) -> None:
        if name in _PLAIN:
            self._stack.append(argument)
        elif name in _CONSTANT:
            self._stack.append(_CONSTANT[name]())
        elif name in _TUPLES:
            self._stack[-_TUPLES[name] :] = [tuple(self._stack[-_TUPLES[name] :])]
        elif name not in _IGNORED:
            step = _STEPS.get(name)
            if step is None:
                raise ValueError(f"the instruction {name} is none that a checkpoint needs")
            step(self, argument)

    def mark(self, _argument: Value) -> None:
        self._marks.append(len(self._stack))

    def _from_mark(self) -> list[Value]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def put(self, argument: Value) -> None:
        self._memo[_whole(argument)] = self._stack[-1]

    def memoize(self, _argument: Value) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, argument: Value) -> None:
        self._stack.append(self._memo[_whole(argument)])

    def drop(self, _argument: Value) -> None:
        self._stack.pop()

    def make_tuple(self, _argument: Value) -> None:
        self._stack.append(tuple(self._from_mark()))

    def append(self, _argument: Value) -> None:
        self._extend([self._stack.pop()])

    def appends(self, _argument: Value) -> None:
        self._extend(self._from_mark())

    def _extend(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if not isinstance(held, list):
            raise ValueError("items are added to what is no list")
        held.extend(items)

    def set_item(self, _argument: Value) -> None:
        value = self._stack.pop()
        self._update([self._stack.pop(), value])

    def set_items(self, _argument: Value) -> None:
        self._update(self._from_mark())

    def _update(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if isinstance(held, Made):  # an OrderedDict
            held.state = {} if held.state is None else held.state
            held = held.state
        if not isinstance(held, dict):
            raise ValueError("entries are added to what is no dict")
        held.update(zip(items[::2], items[1::2], strict=True))

    def global_name(self, argument: Value) -> None:
        self._stack.append(Name(str(argument).replace(" ", ".")))

    def stack_global(self, _argument: Value) -> None:
        name = self._stack.pop()
        self._stack.append(Name(f"{self._stack.pop()}.{name}"))

    def make(self, _argument: Value) -> None:
        arguments = self._stack.pop()
        of = self._stack.pop()
        if not isinstance(of, Name):
            raise ValueError("something is made of what is no name")
        self._stack.append(Made(of.path, arguments))

    def build(self, _argument: Value) -> None:
        state = self._stack.pop()
        held = self._stack[-1]
        if not isinstance(held, Made):
            raise ValueError("a state is given to what was not made")
        held.state = state if held.state is None else held.state

    def persistent(self, _argument: Value) -> None:
        self._stack.append(Made("persistent", self._stack.pop()))


_STEPS: Mapping[str, Callable[[_Reader, Value], None]] = {
    "MARK": _Reader.mark,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "MEMOIZE": _Reader.memoize,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "POP": _Reader.drop,
    "TUPLE": _Reader.make_tuple,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.appends,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "ADDITEMS": _Reader.appends,
    "GLOBAL": _Reader.global_name,
    "STACK_GLOBAL": _Reader.stack_global,
    "REDUCE": _Reader.make,
    "NEWOBJ": _Reader.make,
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.persistent,
}


def _whole(value: Value) -> int:
    if type(value) is not int:
        raise ValueError("a whole number is missing")
    return value


def as_dict(value: Value) -> dict[Value, Value]:
    """Return a dict, or the entries of an OrderedDict. Raises ValueError of anything else."""
    held = value.state or {} if isinstance(value, Made) and value.of == "collections.OrderedDict" else value
    if not isinstance(held, dict):
        raise ValueError("a dict is missing")
    return held


def fields_of(value: Value, of: str) -> dict[Value, Value]:
    """Return the fields of a record of class `of`. Raises ValueError of anything else."""
    if not isinstance(value, Made) or value.of != of or not isinstance(value.state, dict):
        raise ValueError(f"a record of {of.rpartition('.')[2]} is missing")
    return value.state


def as_shape(value: Value) -> tuple[int, ...]:
    """Return a tuple of whole numbers, or a torch.Size, as a tuple. Raises ValueError of anything else."""
    if isinstance(value, Made) and value.of == "torch.Size" and isinstance(value.arguments, tuple):
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise ValueError("a shape is missing")
    if not all(type(extent) is int and 0 <= extent < MAX_EXTENT for extent in value):
        raise ValueError("a shape has an extent below 0, or one that no tensor has")
    return tuple(value)


MAX_EXTENT = 2**53
MAX_DIMS = 16
