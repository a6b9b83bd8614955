"""Memory that ran out in a run: what a rank tells the others at once, and the directives that followed.

The rank whose memory ran out leaves a file that the others look for while they wait for it: RUN/shortages/00000003.json
is of the third start. Each rank then saves its part of the state (`engine/run/shortage/emergency.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import get_args

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.reading.files import UnreadableFileError, unreadable
from trainspec_cli.recipe.canonical import from_plain, to_plain
from trainspec_cli.recipe.keys.run import Offload, Recompute
from trainspec_cli.recipe.results.memory import MemorySetting, Relief
from trainspec_cli.run.folder.event_types.decisions import MemoryEvent
from trainspec_cli.run.folder.events import read_log, read_sound
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir


@dataclass(frozen=True)
class ShortageNote:
    rank: int
    step: int
    """Updates made before the step in which it happened."""


def leave_note(run: RunDir, note: ShortageNote) -> None:
    """Write the note of this worker's start. Of several ranks the last one's stays; they fail in the same step."""
    write_json(run.shortage(_generation()), to_plain(note))


def read_note(run: RunDir) -> ShortageNote | None:
    path = run.shortage(_generation())
    return from_plain(ShortageNote, read_json(path)) if path.is_file() else None


def _generation() -> int:
    return int(os.environ.get(GENERATION, "0"))


def read_reliefs(run: RunDir, layout: str) -> list[Relief]:
    """Return what a run in `layout` has changed for want of memory, in this order. Raises UnreadableFileError where a
    line is damaged or of a later version."""
    found = [event for event in read_log(run.directives) if isinstance(event, MemoryEvent)]
    for event in found:
        if not (_is_known(event.failed) and _is_known(event.taken)):
            hint = f"to go on as the recipe says, take {run.directives.name} out of the run's folder"
            raise _unfollowed(run, event, hint)
    return [Relief(event.failed, event.taken) for event in found if event.layout == layout]


def read_sound_reliefs(run: RunDir, layout: str) -> list[Relief]:
    """Return them without lines that nobody can follow, which end the workers' next start."""
    found = [event for event in read_sound(run.directives) if isinstance(event, MemoryEvent) and event.layout == layout]
    return [Relief(one.failed, one.taken) for one in found if _is_known(one.failed) and _is_known(one.taken)]


def _unfollowed(run: RunDir, event: MemoryEvent, hint: str) -> UnreadableFileError:
    return unreadable(
        run.directives, f"has a directive of memory (step {event.step}) that this version cannot follow", hint
    )


def _is_known(setting: MemorySetting) -> bool:
    kinds = setting.recompute in get_args(Recompute) and setting.offload in get_args(Offload)
    return kinds and setting.micro_batch_size >= 1
