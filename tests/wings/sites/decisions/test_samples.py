"""Each position of the run is taken once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.decisions.samples import paced_batches, plan_pieces

batches_of_sites = st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1)


def positions(pieces: list[tuple[int, int]]) -> list[int]:
    return [position for start, samples in pieces for position in range(start, start + samples)]


@given(batches_of_sites, st.integers(0, 12), st.lists(st.integers(1, 30), max_size=4))
def test_positions_are_given_once_and_what_is_left_first(batches: dict[int, int], steps: int, sizes: list[int]) -> None:
    left = [(1000 * number, size) for number, size in enumerate(sizes)]
    pieces, position, rest = plan_pieces(steps, batches, 10**6, left)
    taken = positions([piece for own in pieces.values() for piece in own])
    assert sorted([*taken, *positions(list(rest))]) == sorted([*positions(left), *range(10**6, position)])
    assert all(len(own) == steps for own in pieces.values())
    assert all(1 <= samples <= batches[site] for site, own in pieces.items() for _, samples in own)


def test_a_site_half_as_fast_takes_half_as_many() -> None:
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 50.0}, 0.2) == {0: 8, 1: 4}
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 90.0}, 0.2) == {0: 8, 1: 8}, "as good as equal"
    assert paced_batches({0: 8, 1: 16}, {0: 100.0, 1: 200.0}, 0.2) == {0: 8, 1: 16}, "a larger site"
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 0.0}, 0.2) == {0: 8, 1: 8}, "not known"
    assert paced_batches({0: 8, 1: 8}, {0: 100.0, 1: 1.0}, 0.2) == {0: 8, 1: 1}
