"""Texts for people: tests compare them whole with files in `expected/`, which `pytest PATH --rewrite` writes again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HEADING = re.compile(r"^=== (.+)\n", re.MULTILINE)


class Recorded:
    """The recorded texts of one test; where the texts on a screen change, read the difference before committing it."""

    def __init__(self, request: pytest.FixtureRequest):
        self._folder = request.path.parent / "expected"
        self._sections = f"{request.path.stem}.txt"
        self._test: str = request.node.name
        self._tests = vars(request.module)
        self._rewrite: bool = request.config.getoption("--rewrite")

    def __call__(self, *texts: str) -> None:
        """Compare the texts, without spaces at line ends, with the section of this test in the file of its module."""
        file = self._folder / self._sections
        text = "\n".join(line.rstrip() for line in "\n".join(texts).split("\n"))
        recorded = sections(file)
        if self._rewrite:
            recorded = {name: old for name, old in recorded.items() if name.partition("[")[0] in self._tests}
            recorded[self._test] = text
            write(file, "".join(f"=== {name}\n{section}\n" for name, section in recorded.items()))
        assert text == recorded.get(self._test), f"see {file}, and pytest's option --rewrite"

    def screen(self, name: str, text: str) -> None:
        """Compare the text with a file of its own."""
        file = self._folder / name
        if self._rewrite:
            write(file, text)
        assert text == file.read_text(), f"see {file}, and pytest's option --rewrite"


def sections(file: Path) -> dict[str, str]:
    """Return the texts of a file by the names of their tests."""
    _, *parts = HEADING.split(file.read_text()) if file.exists() else [""]
    return {name: text.removesuffix("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
