"""JSON that any parser takes, written in one place: for files, events and `--json`."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(content: Any, *, indent: int | None = 2) -> str:
    """Return `content` as JSON in ASCII, which no terminal obeys and which holds names of files in any encoding.

    A number that is not finite becomes null, as JSON has none.
    """
    return json.dumps(finite_or_none(content), indent=indent, allow_nan=False)


def finite_or_none(value: Any) -> Any:
    """The same with None for each float in it that is infinite or no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, (list, tuple)) else value
