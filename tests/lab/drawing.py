"""What CI draws from a table that takes long: other cases for each commit, so that a few commits run them all."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


def commit() -> str:
    """Of a tree without git, such as an unpacked archive, it is "none"."""
    asked = ["git", "rev-parse", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "none"


def drawn_in_ci(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases in CI, all of them elsewhere."""
    if not os.environ.get("TRAINSPEC_CI"):
        return list(cases)
    return random.Random(commit()).sample(cases, count)
