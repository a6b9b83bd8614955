"""Find memory leaks, and ranks that are short of memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.evidence import Figures, RunEvidence
from trainspec_cli.reporter.diagnosis.series import MOST_RANKS
from trainspec_cli.run.recovery.watch import EIGHTHS, grows_steadily, slope_per_step

SETTLING_STEPS = 10
"""Number of steps at the start that are ignored, because they allocate memory that later steps reuse."""
LEAST_READINGS = 2 * EIGHTHS
READINGS = 6 * EIGHTHS
"""Leaks are searched for in windows of at most this many recent readings."""
ALIKE = 0.5
"""A few readings suffice if memory grew in every eighth of them by at least this fraction of the mean growth. (A cache
that is filling up grows ever more slowly.)"""
LEAST_LEAKING = 4
"""Number of readings since the start of a leak that suffice to determine its slope."""
LEAST_GROWTH, LEAST_GROWTH_BYTES = 0.05, 32 * 2**20
"""Growth by less than this fraction of the memory in use, or by less than this number of bytes, is not a leak."""
OUTLASTS_RUN = 2.0
"""A leak is not reported if memory suffices for this many times the run's steps. Allocators keep slightly more memory
with each step, and the growth is extrapolated from a few readings."""
SWAPPED_BYTES = 16 * 2**20


def find_memory(evidence: RunEvidence) -> list[RunVerdict]:
    """Return verdicts on ranks whose memory leaks or is swapped out, or whose GPU allocator has to release cached
    memory."""
    verdicts = []
    is_short = np.fmax.reduce(evidence.counter("swap_bytes"), axis=0) > SWAPPED_BYTES
    is_short |= np.nan_to_num(evidence.counter("allocator_retries")).any(axis=0)
    for rank in np.flatnonzero(is_short).tolist():
        swapped = evidence.counter("swap_bytes")[:, rank]
        retries = np.nan_to_num(evidence.counter("allocator_retries")[:, rank])
        known = np.isfinite(swapped)
        if known.any() and np.nanmax(swapped) - swapped[known][0] > SWAPPED_BYTES:
            since = int(np.argmax(np.nan_to_num(swapped) > swapped[known][0] + SWAPPED_BYTES / 4))
            what = f"{format_bytes(float(np.nanmax(swapped)))} of rank {rank} is swapped out to disk"
        elif (retries > 0).sum() >= 3:
            since = int(np.argmax(retries > 0))
            what = f"the allocator of rank {rank} released its cache in {(retries > 0).sum()} steps"
        else:
            continue
        verdicts.append(
            RunVerdict(
                cause="memory_pressure",
                rank=rank,
                since_step=int(evidence.steps[since]),
                confidence=0.8,
                evidence=(what,),
            )
        )
    if len(verdicts) > max(1, MOST_RANKS * evidence.ranks):
        since_step = min(one.since_step for one in verdicts)
        text = f"{len(verdicts)} of {evidence.ranks} ranks: {verdicts[0].evidence[0]}"
        verdicts = [replace(verdicts[0], rank=None, since_step=since_step, evidence=(text,))]
    return [*_leaks(evidence), *verdicts]


def _leaks(evidence: RunEvidence) -> list[RunVerdict]:
    slopes: dict[int, tuple[int, float, float]] = {}
    held = evidence.counter("rss_bytes")
    grown = np.fmax.reduce(held, axis=0) - np.fmin.reduce(held, axis=0)
    for rank in np.flatnonzero(grown > LEAST_GROWTH_BYTES).tolist():
        if (leak := _leak_of(evidence, rank)) is not None:
            slopes[rank] = leak
    # A node's ranks share its memory, so their growth adds up.
    of_node = defaultdict[int, float](float)
    for rank, (_, slope, _) in slopes.items():
        of_node[evidence.nodes[rank]] += slope
    verdicts = []
    for rank, (since, slope, grown_bytes) in slopes.items():
        series = evidence.counter("available_bytes")[:, rank]
        known = series[np.isfinite(series)]
        left = float(known[-1]) if known.size else None
        full = None if left is None else int(evidence.steps[-1] + left / of_node[evidence.nodes[rank]])
        if full is not None and evidence.total_steps and full > OUTLASTS_RUN * evidence.total_steps:
            continue
        end = "" if full is None else f"; {format_bytes(left or 0)} is left, enough until about step {full:,}"
        verdicts.append(
            RunVerdict(
                cause="memory_leak",
                rank=rank,
                since_step=since,
                confidence=0.9,
                full_step=full,
                evidence=(
                    f"the memory of rank {rank} grows by {format_bytes(slope)} per step, "
                    f"by {format_bytes(grown_bytes)} so far{end}",
                ),
            )
        )
    return verdicts


def _leak_of(evidence: RunEvidence, rank: int) -> tuple[int, float, float] | None:
    """Return (first step, bytes per step, bytes so far) of a leaking rank."""
    # Use the (steps, readings) since the rank's work last changed, because other work needs another amount of memory.
    series = evidence.counter("rss_bytes")[:, rank]
    begun = max([int(evidence.steps[0]), *(step for step in evidence.changed_steps if step <= evidence.steps[-1])])
    known = np.isfinite(series) & (evidence.steps > begun + SETTLING_STEPS)
    steps = evidence.steps[known].astype(np.float64)
    held = series[known]
    # Try the longest window first, because it separates a slow leak from noise; a short window finds a fast leak early.
    for count in sorted({min(READINGS, len(steps)), min(LEAST_READINGS, len(steps)), EIGHTHS}, reverse=True):
        if count > len(steps) or (count < LEAST_READINGS and not _grows_evenly(held[-count:])):
            continue
        recent_steps = steps[-count:].tolist()
        recent = held[-count:].tolist()
        slope = slope_per_step(recent_steps, recent)
        grown_bytes = recent[-1] - recent[0]
        if grown_bytes > max(LEAST_GROWTH * recent[0], LEAST_GROWTH_BYTES) and grows_steadily(recent) and slope > 0:
            base = float(held[0])
            begun = int(np.argmax(held > base + LEAST_GROWTH_BYTES / 4))
            # Readings from before the leak would flatten the slope.
            leaking = slice(max(begun, len(held) - count), None)
            if len(held[leaking]) >= LEAST_LEAKING:
                slope = slope_per_step(steps[leaking].tolist(), held[leaking].tolist())
            before = max(0, leaking.start - 1)
            if slope * (steps[-1] - steps[before]) > ALIKE * (held[-1] - held[before]):  # this rules out a single jump
                return int(steps[begun]), slope, float(held[-1] - base)
    return None


def _grows_evenly(held: Figures) -> bool:
    grown = np.diff(held)
    return len(held) >= EIGHTHS and bool((grown > ALIKE * np.median(grown)).all() and np.median(grown) > 0)
