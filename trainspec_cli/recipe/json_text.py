"""Write JSON that any parser accepts, for files, events and `--json`."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(content: object, *, indent: int | None = 2) -> str:
    """Return `content` as ASCII JSON, which is safe on a terminal and can represent file names in any encoding.

    A non-finite number becomes null, because JSON cannot represent it."""
    return json.dumps(finite_or_none(content), indent=indent, allow_nan=False)


def finite_or_none(value: Any) -> Any:
    """Replace each infinite or NaN float with None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, (list, tuple)) else value
