"""The initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.reading.files import expand

HUGGING_FACE = "hf:"


@dataclass(frozen=True)
class InitSpec:
    from_: str | None = None
    """`hf:FOLDER`, a Hugging Face checkpoint, or the folder of a run of trainspec; null: drawn from the seed.

    Only weights are loaded: the optimizer, the step and the data start from the beginning.
    """

    @property
    def hugging_face(self) -> Path | None:
        if self.from_ is None or not self.from_.startswith(HUGGING_FACE):
            return None
        return expand(self.from_.removeprefix(HUGGING_FACE))

    @property
    def run(self) -> Path | None:
        return None if self.from_ is None or self.hugging_face else expand(self.from_)
