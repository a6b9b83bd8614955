"""Pages as tests look at them: whole, alone and harmless, whatever their texts hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any

from trainspec_cli.core.printable import is_printable

HOSTILE = "<script>alert(1)</script>'\"><img onerror=x>&\x1b]0;owned\x07\u202e"


PLACES = ("x", "y", "x1", "x2", "y1", "y2", "width", "height", "cx", "cy", "points")
SHAPES = ("rect", "line", "circle", "polyline", "text")
MARKED = ("best", "number", "meter", "flag", "refusal")


class Balance(HTMLParser):
    """Raises where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole(page: str) -> None:
    """Every tag is closed, in order."""
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert page.startswith("<!doctype html>")


def assert_alone(page: str) -> None:
    """The page is whole, and needs no network and no script."""
    assert_whole(page)
    assert not re.search(r"https?://|src=|@import|<script|<link", page)


def assert_harmless(page: str) -> None:
    """Nothing that a stranger wrote is more than text."""
    assert_whole(page)
    assert "<script" not in page and "<img" not in page and is_printable(page)


def widths(page: str, kind: str) -> list[float]:
    return [float(width) for width in re.findall(rf'class="segment {kind}"[^>]* width="([\d.]+)%"', page)]


def with_one_text_replaced(value: Any) -> Iterator[Any]:
    """Yield copies of a record, a tuple or a dict, each with another one of its texts replaced by `HOSTILE`."""
    if isinstance(value, str):
        yield HOSTILE
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from ((*value[:place], other, *value[place + 1 :]) for other in with_one_text_replaced(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {HOSTILE if one == key else one: kept for one, kept in value.items()}
            yield from ({**value, key: other} for other in with_one_text_replaced(item))
    elif is_dataclass(value):
        for field in fields(value):
            for other in with_one_text_replaced(getattr(value, field.name)):
                yield replace(value, **{field.name: other})


class Seen(HTMLParser):
    """Lists the texts of a page, the classes and places of its shapes, and what is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._in_style = tag == "style"
        kind = given.get("class") or ""
        if tag in SHAPES:
            places = [f"{name}={given[name]}" for name in PLACES if name in given]
            self.lines.append(" ".join([f"[{tag}", kind, *places]) + "]")
        elif kind in MARKED:
            self.lines.append(f"[{kind}]")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._in_style:
            self.lines.append(data.strip())


def seen(page: str) -> str:
    """Return the texts of a page, and the classes and places of its shapes, a line each."""
    reader = Seen()
    reader.feed(page)
    return "\n".join(reader.lines) + "\n"
