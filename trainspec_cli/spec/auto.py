"""`auto`: a value that the planner resolves before launch. A worker never sees one."""

from __future__ import annotations

from typing import Literal

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
AutoInt = int | Auto
