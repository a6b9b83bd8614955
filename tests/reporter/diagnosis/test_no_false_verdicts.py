"""What the scheduler changes itself, and what other programs do for a moment, is no verdict on a device or on data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lab.telemetry import Telemetry

from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.evidence import RunEvidence

MIB = 2**20
CHANGED = 60


def causes(evidence: RunEvidence) -> list[tuple[str, int | None]]:
    return [(one.cause, one.rank) for one in conclude(evidence) if one.cause != "as_planned"]


def divided(samples: tuple[int, ...], *, slow: float = 1.0, each: int = 12) -> Telemetry:
    """A run whose shares change before step 60, away from rank 1, which computes `slow` times as long from step 50 on.

    Each sample has 4,096 tokens.
    """
    telemetry = Telemetry(ranks=len(samples), compute_s=0.4)
    telemetry.counters["samples"] += each
    telemetry.counters["samples"][CHANGED:] = samples
    telemetry.slow(1, slow, 50)
    for name in ("tokens", "attended"):
        telemetry.counters[name] *= telemetry.counters["samples"]
    for name in ("forward", "backward"):
        telemetry.parts_s[name] *= telemetry.counters["samples"] / each
    return telemetry


def evidence_of(telemetry: Telemetry, *changed: int) -> RunEvidence:
    evidence: RunEvidence = replace(telemetry.evidence(), changed_steps=(0, *changed))
    return evidence


@pytest.mark.parametrize("samples", [(17, 7), (14, 6, 14, 14), (15, 9, 15, 9)])
def test_ranks_that_got_more_samples_are_neither_slow_nor_have_they_longer_ones(samples: tuple[int, ...]) -> None:
    """The device is well again, and the shares have not followed yet."""
    assert causes(evidence_of(divided(samples), CHANGED)) == []


def test_a_slow_device_that_was_given_fewer_samples_is_named_though_nobody_waits_for_it_any_more() -> None:
    """10 steps; what was slow for as long by itself, and is over, is none."""
    for samples, found in (((16, 8), [("slow_device", 1)]), ((12, 12), [])):
        telemetry = divided(samples, slow=2.0)
        if samples == (12, 12):
            telemetry.parts_s["forward"][54:, 1] /= 2.0
            telemetry.parts_s["backward"][54:, 1] /= 2.0
        assert causes(evidence_of(telemetry, CHANGED)) == found


def test_longer_samples_are_still_found_where_shares_differ() -> None:
    telemetry = divided((12, 12, 12, 12))
    telemetry.counters["tokens"][CHANGED:, 2] *= 1.5
    telemetry.slow(2, 1.5, CHANGED, cpu_s=0.2)
    assert causes(evidence_of(telemetry, CHANGED)) == [("uneven_lengths", 2)]


def test_memory_that_grows_after_a_change_of_the_work_is_no_leak() -> None:
    """Batches of another size are allocated anew: ever more for ten steps, as after a start. A leak goes on."""
    for last, found in ((CHANGED + 10, []), (120, [("memory_leak", 0)])):
        telemetry = Telemetry(ranks=2)
        grown = np.clip(np.arange(120) - CHANGED, 0, last - CHANGED) * 40.0 * MIB
        telemetry.counters["rss_bytes"][:, 0] += grown
        assert causes(evidence_of(telemetry, CHANGED)) == found
        seen = telemetry.evidence()  # as it was read until step 75
        cut = replace(seen, steps=seen.steps[:75], parts_s={k: v[:75] for k, v in seen.parts_s.items()})
        cut = replace(cut, counters={k: v[:75] for k, v in seen.counters.items()}, connections=())
        assert causes(cut) == [("memory_leak", 0)]
        assert causes(replace(cut, changed_steps=(0, CHANGED))) == []


@pytest.mark.parametrize("counters", [{}, {"cpu_s": 0.3}, {"steal_s": 0.1}])
@pytest.mark.parametrize("part", ["compute", "other", "data_wait"])
def test_what_is_over_after_four_steps_is_no_verdict(part: str, counters: dict[str, float]) -> None:
    telemetry = Telemetry(ranks=2, compute_s=0.3)
    if part == "compute":
        telemetry.slow(0, 1.6, 58, 62, **counters)
    else:
        telemetry.parts_s[part][58:62, 0] += 0.3
    assert causes(telemetry.evidence()) == []


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_with_jitter_and_passing_neighbours_have_no_verdict(seed: int) -> None:
    """Steps differ by 5%, one in a hundred takes three times as long, and now and then something runs next to a rank
    for two to five steps."""
    random = np.random.default_rng(seed)
    telemetry = Telemetry(ranks=int(random.choice([2, 4, 8])), compute_s=0.3, noise=0.0, seed=seed)
    shape = telemetry.steps, telemetry.ranks
    pace = random.lognormal(0, 0.05, shape) * np.where(random.random(shape) < 0.01, 3.0, 1.0)
    for first in random.integers(5, 110, size=4):
        pace[first : first + random.integers(2, 6), random.integers(telemetry.ranks)] *= random.uniform(1.3, 2.5)
    for name in ("forward", "backward"):
        telemetry.parts_s[name] *= pace
    telemetry.counters["cpu_s"] *= pace
    assert causes(telemetry.evidence()) == []
