"""Figures of many steps as columns of plain numbers: eight bytes each, where an event takes a kilobyte."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from operator import eq
from typing import overload


class StepColumns:
    """Columns of doubles by name, beside a column of steps."""

    def __init__(self, *names: str):
        self.steps = array("q")
        self._values = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> array[float]:
        return self._values[name]

    def add(self, step: int, *values: float) -> None:
        """Append a row: its values are in the order of the columns' names."""
        self.steps.append(step)
        for column, value in zip(self._values.values(), values, strict=True):
            column.append(value)

    def put(self, step: int, *values: float) -> None:
        """Append a row, in place of one of the same step."""
        if self.steps and step <= self.steps[-1]:
            self._keep([row for row, made in enumerate(self.steps) if made != step])
        self.add(step, *values)

    def forget_beyond(self, step: int) -> None:
        """Leave out the rows of later steps."""
        self._keep([row for row, made in enumerate(self.steps) if made <= step])

    def forget_before(self, step: int) -> None:
        """Leave out the rows of earlier steps."""
        self._keep([row for row, made in enumerate(self.steps) if made >= step])

    def _keep(self, rows: Sequence[int]) -> None:
        if len(rows) < len(self.steps):
            self.steps = array("q", (self.steps[row] for row in rows))
            for name, column in self._values.items():
                self._values[name] = array("d", (column[row] for row in rows))


class StepCurve(Sequence[tuple[int, float | None]]):
    """A figure of each step, as a sequence of (step, value); None where the value was not finite."""

    def __init__(self, steps: array[int], values: array[float]):
        self._steps, self._values = steps, values

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float | None]: ...
    @overload
    def __getitem__(self, place: slice) -> StepCurve: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float | None] | StepCurve:
        if isinstance(place, slice):
            return StepCurve(self._steps[place], self._values[place])
        value = self._values[place]
        return self._steps[place], value if math.isfinite(value) else None

    def __iter__(self) -> Iterator[tuple[int, float | None]]:
        for step, value in zip(self._steps, self._values, strict=True):
            yield step, value if math.isfinite(value) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]
