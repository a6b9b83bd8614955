"""`auto`: a value that the planner resolves before launch. A worker never sees one."""

from __future__ import annotations

from typing import Literal

from trainspec_cli.spec.numbers import PositiveInt

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
AutoInt = PositiveInt | Auto
