"""Who takes which samples: every position of the run once, over all sites.

The record of a round plans the steps until the next one: for each of them, one piece of neighbouring positions for each
site. Pieces of a site that was lost before its work was merged are taken by the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Piece = tuple[int, int]
"""(first position, samples)"""


def plan_pieces(
    steps: int, batches: Mapping[int, int], position: int, left: Sequence[Piece]
) -> tuple[dict[int, tuple[Piece, ...]], int, tuple[Piece, ...]]:
    """Plan so many steps of sites with their samples a step; return (pieces by site, next position, what is left).

    `left` is taken first; a piece of it that is smaller than the site's batch makes a smaller step.
    """
    waiting = list(left)
    pieces: dict[int, list[Piece]] = {site: [] for site in batches}
    for _ in range(steps):
        for site, samples in sorted(batches.items()):
            if waiting:
                start, rest = waiting.pop(0)
                taken = min(samples, rest)
                if rest > taken:
                    waiting.insert(0, (start + taken, rest - taken))
            else:
                start, taken = position, samples
                position += samples
            pieces[site].append((start, taken))
    return {site: tuple(own) for site, own in pieces.items()}, position, tuple(waiting)


def paced_batches(batches: Mapping[int, int], rates: Mapping[int, float], change: float) -> dict[int, int]:
    """Return the samples that each site takes for a step, so that all make steps equally fast.

    `batches`: the most that each takes. `rates`: samples a second, 0 where that is not known. A site whose step takes
    more than 1 + `change` times as long as the fastest one's takes fewer, one at least.
    """
    takes_s = {site: batches[site] / rates[site] for site in batches if rates.get(site, 0.0) > 0}
    fastest_s = min(takes_s.values(), default=0.0)
    slow = {site for site, step_s in takes_s.items() if step_s > fastest_s * (1 + change)}
    return {site: max(1, int(rates[site] * fastest_s)) if site in slow else size for site, size in batches.items()}
