"""Reports of the workers to the supervisor: how fast the ranks compute and their links are, as was confirmed.

Rank 0 writes RUN/speeds.json anew when confirmed speeds or the division of samples change, and not otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.core.reading.files import unreadable
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import Count, Seconds
from trainspec_cli.recipe.results.links import MeasuredLink
from trainspec_cli.run.folder.event_types.decisions import WrittenLayout
from trainspec_cli.run.folder.files import FileWatch
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.versioned import read_versioned_record, write_versioned


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
