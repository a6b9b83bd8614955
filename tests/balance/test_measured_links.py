"""What a simulated run learns of its links, and when."""

from __future__ import annotations

from balance.jobs import job_of

from trainspec_cli.balance.decisions.links import (
    CONFIRMING_SAMPLES,
    DEPARTED_STEPS,
    FIRST_SAMPLE_STEPS,
    FIRST_SAMPLES,
    LEAST_INTERVAL_STEPS,
    TOLD_STEPS,
)
from trainspec_cli.balance.disturbance import Disturbance, NarrowLink
from trainspec_cli.balance.measured_links import MeasuredLinks

NODES, DEVICES = 4, 8
JOB = job_of(NODES * DEVICES)
SOON, SELDOM = TOLD_STEPS + 1, TOLD_STEPS + LEAST_INTERVAL_STEPS
"""Steps from a sample to the next."""
LEARNT = FIRST_SAMPLE_STEPS + FIRST_SAMPLES * SOON
STEP_S = 30.0
USUAL = [1.0] * NODES


def paces_of(
    *links: NarrowLink, steps: int, noise: float = 0.02, new_layout: int = 0, shows: bool = False
) -> list[list[float]]:
    """Return the pace of each node's network after each step, as it is known then. `shows`: steps take longer while a
    link is narrow."""
    disturbance = Disturbance(steps=steps, noise=noise, narrow_links=links)
    measured, known = MeasuredLinks(disturbance, NODES, DEVICES, change=0.1), []
    for step in range(1, steps + 1):
        if step == new_layout:
            measured.begin()
        felt = [link for link in links if link.holds(step)]
        measured.note(step, STEP_S * (1.5 if shows and felt else 1.0), 1, JOB.cluster, felt)
        known.append([round(pace, 1) for pace in measured.paces.network[::DEVICES]])
    return known


def test_a_narrow_link_is_known_after_three_samples_and_so_is_its_recovery() -> None:
    known = paces_of(NarrowLink(node=2, factor=4, from_step=LEARNT, steps=100), steps=LEARNT + 200)
    sooner = (CONFIRMING_SAMPLES - 1) * SOON
    assert known[LEARNT : LEARNT + sooner] == [USUAL] * sooner
    slow = known[LEARNT + SELDOM + sooner]
    assert 3.8 <= slow[2] <= 4.2 and [*slow[:2], slow[3]] == [1.0] * 3
    assert known[-1] == USUAL


def test_steps_that_take_longer_show_it_sooner() -> None:
    begins = LEARNT + SELDOM + 4
    narrow = NarrowLink(node=2, factor=4, from_step=begins, steps=100)
    waited = {
        shows: next(step for step, known in enumerate(paces_of(narrow, steps=begins + 90, shows=shows)) if known[2] > 3)
        for shows in (False, True)
    }
    assert (
        waited[True] - begins <= DEPARTED_STEPS + TOLD_STEPS + (CONFIRMING_SAMPLES - 1) * SOON < waited[False] - begins
    )


def test_one_that_was_narrow_from_the_first_step_is_known_beside_the_others() -> None:
    assert 3.8 <= paces_of(NarrowLink(node=0, factor=4), steps=LEARNT)[-1][0] <= 4.2


def test_where_all_are_narrow_each_is_compared_with_its_own_past() -> None:
    assert paces_of(NarrowLink(factor=4), steps=LEARNT)[-1] == USUAL, "there is nothing to compare with"
    known = paces_of(NarrowLink(factor=4, from_step=LEARNT), steps=LEARNT + 50)[-1]
    assert all(3.8 <= pace <= 4.2 for pace in known)


def test_what_is_known_outlives_a_change_of_layout() -> None:
    changed = LEARNT + 50
    known = paces_of(NarrowLink(node=1, factor=4, from_step=LEARNT), steps=2 * changed, new_layout=changed)
    assert known[changed - 2][1] > 3.8 and known[changed][1] > 3.8 and 3.8 <= known[-1][1] <= 4.2


def test_noise_makes_no_link_slow() -> None:
    brief = NarrowLink(node=1, factor=4, from_step=LEARNT, steps=SELDOM + SOON)
    assert paces_of(brief, steps=600, noise=0.03) == [USUAL] * 600, "two samples confirm nothing"
