"""The values that a pickle describes, read as a list of instructions: no class is looked up and nothing is called.

A class or function in the pickle becomes its name, and an object that the pickle would create becomes a record of the
name, the arguments and the state. So an untrusted file can name anything without effect. The work is linear in its
size.
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
    """The object that a call of the class or function named `of` would have created."""

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
    """Return the value that `content` describes. Raises ValueError that states the mistake."""
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
    """The stack and the memo of a pickle during reading."""

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
        if isinstance(held, Made):  # an OrderedDict
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
    """Return a tuple of whole numbers, or a torch.Size, as a tuple. Raises ValueError for anything else."""
    if isinstance(value, Made) and value.of == "torch.Size" and isinstance(value.arguments, tuple):
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise ValueError("a shape is missing")
    if not all(type(extent) is int and 0 <= extent < MAX_EXTENT for extent in value):
        raise ValueError("a shape has a size below 0, or an impossibly large one")
    return tuple(value)


MAX_EXTENT = 2**53
MAX_DIMS = 16
