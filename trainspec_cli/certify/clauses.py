"""The clauses of SPEC.md: the document is where they are defined, and this reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

SPEC = Path(__file__).with_name("SPEC.md")
_VERSION = re.compile(r"^# The training spec, version (\S+)$", re.MULTILINE)
_CLAUSE = re.compile(r"^## (\S+) (MUST|SHOULD): (.+)\n\n((?:.+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Clause:
    id: str
    level: Literal["MUST", "SHOULD"]
    title: str
    text: str


@lru_cache
def spec_version() -> str:
    found = _VERSION.search(SPEC.read_text(encoding="utf-8"))
    assert found, "SPEC.md begins with its version"
    return found.group(1)


@lru_cache
def read_clauses() -> dict[str, Clause]:
    """By id, in the document's order."""
    found = _CLAUSE.findall(SPEC.read_text(encoding="utf-8"))
    return {id: Clause(id, level, title, " ".join(text.split())) for id, level, title, text in found}
