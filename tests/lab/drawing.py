"""Which cases of a long table run: a few by default, all with `-m slow`, and a draw per commit in CI."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a `parametrize`; all but the first `count` run with `-m slow` only."""
    marked: list[Any] = []
    for index, case in enumerate(cases):
        if index < count:
            marked.append(case)
        elif isinstance(case, pytest.param().__class__):
            marked.append(pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id))
        else:
            marked.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow))
    return marked


def commit() -> str:
    """ "none" for a tree without git, such as an unpacked archive."""
    asked = ["git", "rev-parse", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "none"


NOT_DRAWN = "CI runs this case with another commit"


def order_of_commit(cases: Sequence[Case]) -> list[Case]:
    return random.Random(commit()).sample(cases, len(cases))


def drawn_in_ci(cases: Sequence[Case], count: int) -> list[Any]:
    """Return the cases for `parametrize`; all but `count` of them, drawn by commit, are skipped in CI."""
    if not os.environ.get("TRAINSPEC_CI"):
        return list(cases)
    skipped = pytest.mark.skip(reason=NOT_DRAWN)
    drawn = order_of_commit(cases)
    return [*drawn[:count], *(pytest.param(case, marks=skipped) for case in drawn[count:])]
