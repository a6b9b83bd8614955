"""UNKNOWN: a placeholder in a draft for a missing or wrong value, so that other rules can still be checked.

Computing with it raises `UnknownTouched`; a rule that does so cannot be decided yet.
"""

from __future__ import annotations

from typing import Any, NoReturn


class UnknownTouched(Exception):  # noqa: N818 - an undecidable rule, not an error
    """A rule needs a value that is not known."""


class Unknown:
    def _touch(self, *_: Any) -> NoReturn:
        raise UnknownTouched

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _touch
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _touch
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _touch
    __neg__ = __pos__ = __abs__ = __round__ = __trunc__ = __floor__ = __ceil__ = _touch
    __fspath__ = __str__ = __format__ = __bytes__ = __int__ = __float__ = __complex__ = __index__ = _touch
    __getattr__ = __getitem__ = __contains__ = __iter__ = __reversed__ = __len__ = __call__ = _touch

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = Unknown()
