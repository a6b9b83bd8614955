"""What libraries raise for files that are not what their name says: each has words of its own."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from tokenize import TokenError

from trainspec_cli.errors import Problem, RecipeError

ANY_DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    SyntaxError,
    TokenError,
    ArithmeticError,
    EOFError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""numpy evaluates a header (SyntaxError, TokenError), Pillow unpacks bytes (struct.error), nibabel looks up codes
(KeyError)."""


def check_folder(folder: Path) -> None:
    """Raises RecipeError where `data.path` is no folder."""
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise RecipeError(Problem("missing_file", f"{str(folder)[:300]} is no folder", "data.path"))
