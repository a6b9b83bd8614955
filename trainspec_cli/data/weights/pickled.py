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
                    raise ValueError("something is made of what is no name")
                stack.append(Made(of.path, arguments))
            case "BUILD":
                state = stack.pop()
                held = stack[-1]
                if not isinstance(held, Made):
                    raise ValueError("a state is given to what was not made")
                held.state = state if held.state is None else held.state
            case "BINPERSID":
                stack.append(Made("persistent", stack.pop()))
            case _:
                raise ValueError(f"the instruction {name} is none that a checkpoint needs")

    def _from_mark(self) -> list[Value]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _extend(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if not isinstance(held, list):
            raise ValueError("items are added to what is no list")
        held.extend(items)

    def _update(self, items: list[Value]) -> None:
        held = self._stack[-1]
        if isinstance(held, Made):  # an OrderedDict
            held.state = {} if held.state is None else held.state
            held = held.state
        if not isinstance(held, dict):
            raise ValueError("entries are added to what is no dict")
        held.update(zip(items[::2], items[1::2], strict=True))


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
