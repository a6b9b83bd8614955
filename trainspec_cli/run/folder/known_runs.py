"""The user's runs, wherever their folders are: a small file with one line per run, appended when the run is recorded.

The file is only an index. If an entry is lost (a full disk, a home folder that is not writable, two processes that
truncate the file at the same time), the only consequence is that `last` does not find the run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError, TrainspecError
from trainspec_cli.core.node import PRIVATE_FILE, make_folder, state_dir
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.run.folder.events import parse_lines
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.paths import RunDir

FILE = "runs.jsonl"
MOST_BYTES = 256 * 1024
"""Maximum size, enough for about a thousand runs. When the file grows beyond it, the older half is dropped."""


@dataclass(frozen=True)
class KnownRun:
    path: str
    launched_from: str
    """The working directory of the command that started it."""
    name: str
    """The value of `run.name`."""
    at: float
    """Unix time in seconds."""


def remember_run(run: RunDir, name: str = "") -> None:
    """Add a run that was just created."""
    known = KnownRun(str(run.root.resolve()), str(Path.cwd()), name, time.time())
    line = json_text(to_plain(known), indent=None).encode() + b"\n"
    with suppress(OSError, MachineError):  # a run must not fail because of its index (see the module's docstring)
        path = state_dir() / FILE
        make_folder(path.parent, "")
        # A single write to a file opened for appending keeps the lines of concurrent processes apart.
        descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, PRIVATE_FILE)
        try:
            os.write(descriptor, line)
            is_too_long = os.fstat(descriptor).st_size > MOST_BYTES
        finally:
            os.close(descriptor)
        if is_too_long:
            newer = path.read_bytes()[-MOST_BYTES // 2 :].partition(b"\n")[2]
            write_text(path, newer.decode(errors="replace"))


def known_runs() -> list[KnownRun]:
    """Return the recorded runs that still exist, newest first; a damaged line is skipped."""
    found: dict[str, KnownRun] = {}
    with suppress(OSError, MachineError):
        with (state_dir() / FILE).open("rb") as file:
            lines = file.read(2 * MOST_BYTES).splitlines(keepends=True)
        for plain in parse_lines(lines):
            with suppress(TrainspecError):
                known = from_plain(KnownRun, plain)
                found[known.path] = known
    newest_first = sorted(found.values(), key=lambda known: known.at, reverse=True)
    return [known for known in newest_first if _exists(known)]


def _exists(known: KnownRun) -> bool:
    with suppress(OSError, ValueError):
        return RunDir(known.path).run_json.exists()
    return False
