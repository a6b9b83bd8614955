"""What a run has learned, as its folder keeps it: memory that ran out, held-out losses, the code that it executes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import UnreadableFileError, exists, read_bytes, unreadable
from trainspec_cli.recipe.extensions.kinds import SOURCE
from trainspec_cli.recipe.extensions.source import MAX_SOURCE_BYTES, find, source_files, source_sha256
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.own_code import own_code_of, worker_code_of
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.run.folder.event_types.events import EvalEvent, MemoryEvent
from trainspec_cli.run.folder.events import read_log, read_sound
from trainspec_cli.run.folder.files import (
    read_versioned,
    write_versioned,
)
from trainspec_cli.run.folder.paths import RunDir


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


# The held-out losses that a run has measured.


def read_heldout_losses(run: RunDir) -> dict[int, float | None]:
    """Return step -> held-out loss, in the order of steps. Of a step that was made again the newest counts."""
    evaluations = (event for event in read_sound(run.events(0)) if isinstance(event, EvalEvent))
    losses = {event.step: event.heldout_loss for event in evaluations}
    return {step: losses[step] for step in sorted(losses)}


def best_checkpoint(run: RunDir) -> int | None:
    """Return the step of the whole checkpoint with the lowest held-out loss; None where none was evaluated."""
    losses = read_heldout_losses(run)
    evaluated = {step: loss for step in run.checkpoint_steps() if (loss := losses.get(step)) is not None}
    finite = {step: loss for step, loss in evaluated.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__, default=None)


# Keep the code of one's own that a run executes beside its recipe, and find what has changed since.


DIGEST_CHARS = 12


@dataclass(frozen=True)
class KeptFile:
    """A file of one's own code as it was when the run started."""

    sha256: str
    copy: str
    """The copy's name in the run's folder `code`."""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of the recipe that name it, with the name in it; empty where the file that is named imports this one."""


@dataclass(frozen=True)
class KeptCode:
    """code.json: the files of one's own code, by path."""

    files: dict[str, KeptFile] = field(default_factory=dict)


def keep_code(spec: RunSpec, run: RunDir) -> None:
    """Copy the sources that the recipe names into the run's folder, and note their digests; older copies stay."""
    files: dict[str, KeptFile] = {}
    before = read_code(run).files
    for extension in own_code_of(spec):
        if extension.kind is SOURCE and before:  # read when the run began; it need not be there any more
            files |= {path: file for path, file in before.items() if extension.path in file.keys}
            continue
        source = find(extension)
        for file in source_files(source):
            sha256 = source_sha256(file)
            copy = f"{file.stem}-{sha256[:DIGEST_CHARS]}{file.suffix}"
            run.code.mkdir(exist_ok=True)
            (run.code / copy).write_bytes(read_bytes(file, MAX_SOURCE_BYTES))
            known = files[str(file)].keys if str(file) in files else {}
            name = source.name if file == source.file else known.get(extension.path, "")
            files[str(file)] = KeptFile(sha256, copy, {**known, extension.path: name})
    if files or run.code_json.exists():
        write_versioned(run.code_json, to_plain(KeptCode(files)))


def read_code(run: RunDir) -> KeptCode:
    """Return what `keep_code` wrote; nothing where the run has no code of one's own. Raises UnreadableFileError."""
    return from_plain(KeptCode, read_versioned(run.code_json)) if run.code_json.exists() else KeptCode()


def describe_changed_code(run: RunDir) -> Iterator[str]:
    """Yield a line for each file that has changed since the last start of the run."""
    for path, kept in read_code(run).files.items():
        file = Path(path)
        if exists(file) and source_sha256(file) != kept.sha256:
            yield f"{path} has changed since the last start, which ran what {run.code / kept.copy} holds"


def check_code(spec: RunSpec, run: RunDir) -> None:
    """Raise MachineError where the code that a worker is about to run is not the one that the start has noted: it was
    changed meanwhile, or another node has another file there."""
    noted = read_code(run).files
    for extension in worker_code_of(spec):
        for file in source_files(find(extension)):
            kept = noted.get(str(file))
            if kept is None or source_sha256(file) != kept.sha256:
                before = f" {run.code / kept.copy}" if kept else ""
                message = f"{file}, which `{extension.path}` runs, is not what this start of the run has noted{before}"
                hint = f"to go on with what it is now: trainspec resume {run.root}"
                raise MachineError(Problem("changed_code", message, extension.path, hint, environment=True))
