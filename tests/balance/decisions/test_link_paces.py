"""Narrow links by rank: whose way is narrow, what counts as usual, and what is kept over a change of layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from trainspec_cli.balance.decisions.links import LinkPaces, LinkPaceTracker
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.verdict import MeasuredLink

MESH = Layout(dp_shard=2, tp=2)
DATA = Layout(dp_shard=4)
TP, DP = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
RATE, BYTES, CHANGE = 1e9, 4e6, 0.1
USUAL = (1.0, 1.0, 1.0, 1.0)


def link(
    axis: str, ranks: tuple[int, ...], bytes_per_s: float = RATE, noise: float = 0.0, sent_bytes: float = BYTES
) -> MeasuredLink:
    return MeasuredLink(axis=axis, ranks=ranks, bytes_per_s=bytes_per_s, noise=noise, sent_bytes=sent_bytes)


def slow_down(links: list[MeasuredLink], place: int, times: float) -> None:
    links[place] = replace(links[place], bytes_per_s=links[place].bytes_per_s / times)


def mesh(ways: Sequence[float] = USUAL, **changes: float) -> list[MeasuredLink]:
    """The links of `MESH`; `ways`: how many times as long as usual each rank's exchanges take."""
    named = [*(("tp", ranks) for ranks in TP), *(("dp_shard", ranks) for ranks in DP)]
    return [link(axis, ranks, RATE / max(ways[rank] for rank in ranks), **changes) for axis, ranks in named]


def tracker(domain_ranks: int = 8) -> LinkPaceTracker:
    """One that knows the usual speeds."""
    known = LinkPaceTracker(CHANGE, domain_ranks)
    assert known.note(MESH, mesh()).is_usual
    return known


@pytest.mark.parametrize("narrow", range(4))
def test_the_rank_is_found_whose_links_along_all_axes_are_slow(narrow: int) -> None:
    ways = tuple(4.0 if rank == narrow else 1.0 for rank in range(4))
    assert tracker().note(MESH, mesh(ways)) == LinkPaces(ways, USUAL)


def test_ranks_that_share_all_slow_links_are_all_suspected() -> None:
    known = LinkPaceTracker(CHANGE, 8)
    known.note(DATA, [link("dp_shard", (0, 1, 2, 3))])
    assert known.note(DATA, [link("dp_shard", (0, 1, 2, 3), RATE / 3)]).scaleup == (3.0,) * 4


def test_one_slow_path_between_ranks_with_other_wide_ones_is_nobodys() -> None:
    links = mesh()
    slow_down(links, 0, 4)
    assert tracker().note(MESH, links).is_usual


def test_small_exchanges_excuse_nobody_from_large_ones_that_are_slow() -> None:
    """What takes the time of a small message is its latency, as long over a narrow link."""
    known = LinkPaceTracker(CHANGE, 8)
    links = [link(one.axis, one.ranks, sent_bytes=BYTES / (100 if one.axis == "tp" else 1)) for one in mesh()]
    assert known.note(MESH, links).is_usual
    slow_down(links, 3, 4)  # dp_shard, ranks 1 and 3
    assert known.note(MESH, links).scaleup == (1.0, 4.0, 1.0, 4.0)


def test_exchanges_inside_a_domain_and_between_domains_are_apart() -> None:
    """Two nodes of two ranks: tp inside, dp_shard between them, where the way of rank 2 is narrow."""
    links = mesh()
    slow_down(links, 2, 5)
    known = tracker(domain_ranks=2)
    assert known.note(MESH, links) == LinkPaces(USUAL, (5.0, 1.0, 5.0, 1.0))


@pytest.mark.parametrize(("pace", "noise", "is_usual"), [(1.09, 0.0, True), (1.2, 0.0, False), (1.2, 0.06, True)])
def test_what_is_within_the_change_or_the_noise_is_usual(pace: float, noise: float, is_usual: bool) -> None:
    assert tracker().note(MESH, mesh((1.0, 1.0, 1.0, pace), noise=noise)).is_usual == is_usual


def test_a_link_that_is_faster_than_usual_is_as_usual() -> None:
    assert tracker().note(MESH, mesh((0.25,) * 4)).is_usual


def test_a_link_that_is_slow_from_the_start_is_found_beside_the_others_of_its_axis() -> None:
    assert LinkPaceTracker(CHANGE, 8).note(MESH, mesh((1.0, 1.0, 1.0, 3.0))).scaleup == (1.0, 1.0, 1.0, 3.0)


def test_stages_that_exchange_other_parts_of_a_model_are_not_compared() -> None:
    """The embedding's stage exchanges ten times as much, at three times the speed."""
    pipeline = Layout(pp=2, dp_shard=2)
    links = [link("dp_shard", (0, 1), 3 * RATE, sent_bytes=10 * BYTES), link("dp_shard", (2, 3))]
    known = LinkPaceTracker(CHANGE, 8)
    assert known.note(pipeline, links).is_usual
    slow_down(links, 0, 2)
    assert known.note(pipeline, links).scaleup == (2.0, 2.0, 1.0, 1.0)


def test_exchanges_of_another_size_are_learnt_anew_with_what_is_known_of_the_ranks() -> None:
    known, ways = tracker(), (1.0, 1.0, 1.0, 3.0)
    known.note(MESH, mesh(ways))
    small = mesh(ways, sent_bytes=BYTES / 50)
    for place in range(len(small)):
        slow_down(small, place, 7)
    assert known.note(MESH, small).scaleup == ways


def test_a_narrow_way_is_narrow_in_the_next_layout_until_it_is_wide_again() -> None:
    known = tracker()
    known.note(MESH, mesh((1.0, 1.0, 1.0, 3.0)))
    assert known.note(DATA, []).scaleup == (1.0, 1.0, 1.0, 3.0), "links are learnt anew"
    together = (0, 1, 2, 3)
    assert known.note(DATA, [link("dp_shard", together, 2 * RATE)]).scaleup == (3.0,) * 4, "one of them is"
    assert known.note(DATA, [link("dp_shard", together, 6 * RATE)]).is_usual


def test_ranks_with_fewer_samples_exchange_less_at_once_and_have_no_narrow_links_for_that() -> None:
    known, links = tracker(), mesh()
    links[1] = replace(links[1], sent_bytes=BYTES / 3, bytes_per_s=RATE / 3)  # tp, ranks 2 and 3
    assert known.note(MESH, links).is_usual
    fresh = LinkPaceTracker(CHANGE, 8)
    assert fresh.note(MESH, links).is_usual
    slow_down(links, 3, 4)  # dp_shard, ranks 1 and 3
    assert known.note(MESH, links).scaleup == (1.0, 1.0, 1.0, 4.0), "rank 1 has a wide link along tp"
