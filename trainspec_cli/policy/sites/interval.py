"""How many steps lie between exchanges (H), and how late sums are applied (tau), where both follow the sites' links.

An exchange is hidden where its sum has arrived when it is to be applied. So tau grows to what exchanges need, and H
with it where that is more than the steps between two of them; both shrink again, to what the recipe asks for at least,
where exchanges need much less.

What is measured of an exchange, at each site: the time from when its outer gradient is given to the connection until
the decision and the others' outer gradients have arrived whole, less the time for which the meeting held the site's own
and waited for those of others. So neither a site that computes slowly nor one that is waited for in vain counts as a
slow link. Both are durations by one clock each; clocks of different sites are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite

from trainspec_cli.policy.sites.link import utilisation
from trainspec_cli.policy.sites.schedule import SiteCadence, SiteSchedule

LOOKS = 3
"""Exchanges in a row that have to agree on a change."""
WANTED = 0.95
"""An exchange that leaves less of the time for training is not hidden."""
ROOM = 1.1
"""An exchange is given so many times the steps that it needs."""
SPARE = 0.75
"""It is given fewer steps where those are less than this part of what it has."""


def needed_steps(links_s: Mapping[int, float], steps_s: Mapping[int, float]) -> float | None:
    """Return how many steps an exchange needs to be hidden; None where some site has not measured it.

    `links_s`: how long it was on its way, by site. `steps_s`: a step of each site; the slowest counts, since the others
    wait for its outer gradient anyway.
    """
    measured = [*links_s.values(), *steps_s.values()]
    if not links_s or links_s.keys() != steps_s.keys() or not all(isfinite(one) and one > 0 for one in measured):
        return None
    return max(links_s.values()) / max(steps_s.values())


def follow_links(schedule: SiteSchedule, now: SiteCadence, needs: Sequence[float]) -> tuple[SiteCadence, str]:
    """Return the cadence after exchanges that needed so many steps, the newest last, and why it changes; the same one
    and no reason where it does not."""
    seen = sorted(needs[-LOOKS:])
    if schedule.max_interval_steps is None or len(seen) < LOOKS:
        return now, ""
    least, usual, most = seen[0], seen[LOOKS // 2], seen[-1]
    longer, shorter = _cadence_for(schedule, usual), _cadence_for(schedule, most)
    between = now.interval_steps // schedule.fragments
    if utilisation(between, now.delay_steps, 1.0, least) < WANTED and longer.delay_steps > now.delay_steps:
        return longer, f"exchanges take {usual:.1f} steps over the slowest link, and {now.delay_steps} hid them"
    if shorter.delay_steps < SPARE * now.delay_steps:
        return shorter, f"exchanges take {most:.1f} steps at most over the slowest link, and had {now.delay_steps}"
    return now, ""


def _cadence_for(schedule: SiteSchedule, needed: float) -> SiteCadence:
    assert schedule.max_interval_steps is not None, "the schedule follows the links"
    given = min(ceil(needed * ROOM), schedule.max_interval_steps // schedule.fragments)
    delay_steps = max(given, schedule.delay_steps)
    return SiteCadence(max(schedule.interval_steps, delay_steps * schedule.fragments), delay_steps)
