"""Recorded texts: a changed one fails, and `--rewrite` writes those of a module's tests and no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.recorded import Recorded, sections


def recorder(folder: Path, test: str, rewrite: bool = False) -> Recorded:
    """What the fixture `recorded` is for a test of test_here.py, which has `test_one` and `test_two`."""
    request: Any = SimpleNamespace(
        path=folder / "test_here.py",
        node=SimpleNamespace(name=test),
        module=SimpleNamespace(test_one=None, test_two=None),
        config=SimpleNamespace(getoption=lambda _: rewrite),
    )
    return Recorded(request)


def test_a_text_is_compared_with_the_section_of_its_test(tmp_path: Path) -> None:
    recorder(tmp_path, "test_one", rewrite=True)("first  \n\nsecond")
    recorder(tmp_path, "test_two[a]", rewrite=True)("third")
    recorder(tmp_path, "test_one")("first", "", "second")
    recorder(tmp_path, "test_two[a]")("third")
    for test, text in (("test_one", "first"), ("test_two[b]", "third")):
        with pytest.raises(AssertionError, match="--rewrite"):
            recorder(tmp_path, test)(text)


def test_rewriting_keeps_other_sections_and_drops_those_without_a_test(tmp_path: Path) -> None:
    file = tmp_path / "expected" / "test_here.txt"
    file.parent.mkdir()
    file.write_text("=== test_two[a]\nkept\n=== test_gone\nold\n=== test_one\nold\n")
    recorder(tmp_path, "test_one", rewrite=True)("new")
    assert sections(file) == {"test_two[a]": "kept", "test_one": "new"}


def test_a_screen_has_a_file_of_its_own(tmp_path: Path) -> None:
    recorder(tmp_path, "test_one", rewrite=True).screen("page.txt", "text\n")
    recorder(tmp_path, "test_one").screen("page.txt", "text\n")
    with pytest.raises(AssertionError, match="--rewrite"):
        recorder(tmp_path, "test_one").screen("page.txt", "other\n")
