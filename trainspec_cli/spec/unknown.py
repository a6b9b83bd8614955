"""UNKNOWN: stands in a draft for a value that is missing or wrong, so that other rules can still be checked.

Whoever computes with it stops with `UnknownTouched`; a rule that does so has nothing to say yet.
"""

from __future__ import annotations

from typing import Any, NoReturn


class UnknownTouched(Exception):  # noqa: N818 - a question without an answer, not an error
    """A rule asked for a value that is not known."""


class Unknown:
    def _touch(self, *_: Any) -> NoReturn:
        raise UnknownTouched

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _touch
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _touch
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __fspath__ = __str__ = _touch
    __getattr__ = __iter__ = __len__ = __int__ = __float__ = __index__ = _touch

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = Unknown()
