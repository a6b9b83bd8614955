"""Deeper looks: the supervisor writes RUN/looks.json when a verdict is new, the ranks that it names look at themselves.

What they find is an event of their own (`LookEvent`), and a trace in RUN/looks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import UnreadableFileError, exists, read_bytes, unreadable
from trainspec_cli.recipe.keys.run import Offload, Recompute, RunSpec
from trainspec_cli.recipe.own_code import (
    MAX_SOURCE_BYTES,
    SOURCE,
    find,
    own_code_of,
    source_files,
    source_sha256,
    worker_code_of,
)
from trainspec_cli.recipe.records import Count, Seconds, from_plain, to_plain
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.recipe.results.verdict import LookOrder, MeasuredLink
from trainspec_cli.run.folder.event_types.events import EvalEvent, MemoryEvent, WrittenLayout
from trainspec_cli.run.folder.events import read_log, read_sound
from trainspec_cli.run.folder.files import (
    FileWatch,
    read_json,
    read_versioned,
    read_versioned_record,
    write_json,
    write_versioned,
)
from trainspec_cli.run.folder.paths import RunDir

TRACE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LooksRecord:
    """looks.json: all looks that were asked for, over all starts of the run."""

    orders: tuple[LookOrder, ...] = ()


def write_looks(run: RunDir, record: LooksRecord) -> None:
    write_versioned(run.looks_json, to_plain(record))


def read_looks(run: RunDir) -> LooksRecord:
    """Return the looks that were asked for; none where there is no file. Raises UnreadableFileError where it is damaged
    or of a later version."""
    path = run.looks_json
    return read_versioned_record(path, LooksRecord, "list of looks") if path.exists() else LooksRecord()


# Reports of the workers to the supervisor: how fast the ranks compute and their links are, as was confirmed.
#
# Rank 0 writes RUN/speeds.json anew when confirmed speeds or the division of samples change, and not otherwise.


@dataclass(frozen=True, kw_only=True)
class SpeedsReport:
    """speeds.json: the confirmed speeds of all ranks, and how samples are divided over them."""

    step: Count
    """Updates made when this was written."""
    step_s: Seconds
    """Computing of the slowest rank in the last step, with the exchanges of its micro-batches."""
    layout: WrittenLayout
    """The layout in which the speeds were measured."""
    micro_batches: Count
    """Micro-batches of every rank in a step."""
    samples: tuple[Count, ...]
    """Samples in a step by global rank, as the other lists."""
    fixed_s: tuple[Seconds, ...]
    """A micro-batch's forward and backward take so long, and"""
    per_sample_s: tuple[Seconds, ...]
    """so long for each sample in it."""
    links: tuple[MeasuredLink, ...] = ()
    """The links whose speeds are known."""

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Return what each rank computes in a step, without waiting for others."""
        each = zip(self.samples, self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + samples * sample_s for samples, fixed_s, sample_s in each)

    @property
    def even_s(self) -> tuple[float, ...]:
        """Return what each rank would compute if all took equally many samples."""
        share = sum(self.samples) / len(self.samples)
        each = zip(self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + share * sample_s for fixed_s, sample_s in each)


def write_speeds(run: RunDir, report: SpeedsReport) -> None:
    write_versioned(run.speeds_json, to_plain(report))


def read_speeds(run: RunDir) -> SpeedsReport:
    """Read speeds.json. Raises UnreadableFileError where it is damaged or of a later version."""
    path = run.speeds_json
    report = read_versioned_record(path, SpeedsReport, "report of speeds")
    ranks = report.layout.world_size
    if any(len(figures) != ranks for figures in (report.samples, report.fixed_s, report.per_sample_s)):
        raise unreadable(path, f"has other numbers of figures than the layout's ranks, {ranks}")
    if any(not link.ranks or max(link.ranks) >= ranks or not link.bytes_per_s for link in report.links):
        raise unreadable(path, f"has a link without a speed, or of ranks beyond the layout's, {ranks}")
    return report


class SpeedsWatch:
    """Looks for a newer report; `poll` is to be called again and again, and costs one `stat` where there is none."""

    def __init__(self, run: RunDir):
        self._run, self._file = run, FileWatch(run.speeds_json)

    def poll(self) -> SpeedsReport | None:
        """Return the report that was written since the last call, if any. Raises UnreadableFileError."""
        return read_speeds(self._run) if self._file.has_changed() else None


# Memory that ran out in a run: what a rank tells the others at once, and the directives that followed.
#
# The rank whose memory ran out leaves a file that the others look for while they wait for it:
# RUN/shortages/00000003.json is of the third start. Each rank then saves its part of the state
# (`engine/run/shortage.py`).


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


# Proposals of the supervisor to the workers: another layout that their run would be faster in.
#
# It writes RUN/proposal.json, which rank 0 looks for; the ranks agree at which step they take it up.


@dataclass(frozen=True, kw_only=True)
class ProposalRecord:
    """proposal.json: the newest proposal. `LayoutProposal` says what the fields mean that have the same names."""

    number: Count
    """Proposals of a run are numbered from 1, over all of its starts."""
    before: WrittenLayout
    """It is meant for a run in this layout, and void in any other."""
    layout: WrittenLayout
    micro_batch_size: Count
    grad_accum_steps: Count
    largest_micro_batch_size: Count
    largest_stage_layers: Count | None
    before_s: Seconds
    """A step takes so long as it is, measured."""
    expected_s: Seconds
    """As it is expected to."""
    reason: str

    @property
    def proposal(self) -> LayoutProposal:
        return LayoutProposal(
            layout=self.layout,
            micro_batch_size=self.micro_batch_size,
            grad_accum_steps=self.grad_accum_steps,
            largest_micro_batch_size=self.largest_micro_batch_size,
            largest_stage_layers=self.largest_stage_layers,
            before_s=self.before_s,
            expected_s=self.expected_s,
            reason=self.reason,
        )


def write_proposal(run: RunDir, record: ProposalRecord) -> None:
    write_versioned(run.proposal_json, to_plain(record))


def read_proposal(run: RunDir) -> ProposalRecord | None:
    """Return the newest proposal; None where there is none. Raises UnreadableFileError where it is damaged or of a
    later version."""
    path = run.proposal_json
    return read_versioned_record(path, ProposalRecord, "proposal of a layout") if path.exists() else None


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
