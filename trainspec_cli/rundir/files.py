"""Files that are never seen half-written; `read_json` and `read_object` read what they hold."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from trainspec_cli.reading.files import read_json, read_object
from trainspec_cli.spec.json_text import json_text

__all__ = ["read_json", "read_object", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, under a name at which nobody has put a file or link; flush to disk, rename into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json_text(content) + "\n")
