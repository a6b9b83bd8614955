"""The rounds that the meeting point keeps on the disk: its state, and the outer gradients of each of the newest rounds.

From them a site that was away applies what it has missed, and a meeting that is begun again goes on where it ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import FieldError, read_record
from trainspec_cli.run.folder.versioned import read_versioned, write_versioned
from trainspec_cli.wings.sites.decisions.meeting import MeetingState


@dataclass(frozen=True)
class Rounds:
    folder: Path

    def load(self) -> MeetingState:
        """Return the state in which the last meeting ended. Raises MachineError where it cannot be read."""
        path = self.folder / "meeting.json"
        if not path.exists():
            return MeetingState()
        try:
            # leniently: records of earlier versions also have how often the sites exchange from then on
            return read_record(MeetingState, read_versioned(path))
        except (UnreadableFileError, FieldError) as error:
            message, hint = f"{path} cannot be read: {error}", "restore it from a backup, or begin a new run"
            raise MachineError(Problem("sites", message, hint=hint, environment=True)) from error

    def keep(self, state: MeetingState, payloads: Mapping[int, Mapping[int, bytes]]) -> None:
        """Write a round that was decided, before anybody hears of it."""
        self.folder.mkdir(exist_ok=True)
        rows = [(site, rank, part) for site, parts in sorted(payloads.items()) for rank, part in sorted(parts.items())]
        head = json.dumps([[site, rank, len(part)] for site, rank, part in rows], allow_nan=False).encode()
        path = self._path(state.round)
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"\n".join((head, b"".join(part for *_, part in rows))))
        partial.replace(path)
        write_versioned(self.folder / "meeting.json", to_plain(state))

    def read(self, number: int, rank: int) -> dict[int, bytes]:
        """Return the outer gradients that sites have sent for a round, of one rank."""
        parts = {}
        with self._path(number).open("rb") as file:
            for site, of_rank, size in json.loads(file.readline()):
                if of_rank == rank:
                    parts[site] = file.read(size)
                else:
                    file.seek(size, os.SEEK_CUR)
        return parts

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def forget(self, before: int) -> None:
        for path in self.folder.glob("round_*.bin"):
            if int(path.stem.removeprefix("round_")) < before:
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"round_{number:08d}.bin"
