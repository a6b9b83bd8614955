"""Cuts into pipeline stages, held against every cut there is of small models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.planner.pipeline import Counts, LayerTimes, Room, cut_by_times, cut_evenly, rank_times_s
from trainspec_cli.recipe.keys.layout import Layout

ONE_STAGE = [Layout(pp=2), Layout(pp=3), Layout(pp=4), Layout(pp=5, pipeline_schedule="zero_bubble")]
SEVERAL = [
    *(Layout(pp=pp, pipeline_schedule="zbv") for pp in (2, 3, 4)),
    *(Layout(pp=pp, pipeline_schedule="interleaved", virtual_stages=v) for pp, v in ((2, 2), (2, 3), (3, 2), (4, 2))),
]
SECONDS = st.floats(0.01, 10.0)


def every_cut(layers: int, stages: int) -> Iterator[Counts]:
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, layers)))


def heaviest_s(times: LayerTimes, counts: Counts, layout: Layout, speeds: tuple[float, ...] = ()) -> float:
    """Worked out layer by layer."""
    spans = list(pairwise(accumulate(counts, initial=0)))
    loads = []
    for rank in range(layout.pp):
        own = [stage for stage in range(layout.num_stages) if layout.rank_of_stage(stage) == rank]
        load = sum(sum(times.layers_s[spans[stage][0] : spans[stage][1]]) for stage in own)
        load += times.embedding_s * (0 in own) + times.head_s * (layout.num_stages - 1 in own)
        loads.append(load / (speeds[rank] if speeds else 1.0))
    return max(loads)


def keeps_to(room: Room, counts: Counts, layout: Layout) -> bool:
    spans = list(pairwise(accumulate(counts, initial=0)))
    taken = [0.0] * layout.pp
    for stage, (start, end) in enumerate(spans):
        rank = layout.rank_of_stage(stage)
        taken[rank] += sum(room.layer_bytes[rank][start:end])
    return all(size <= most + 1e-9 for size, most in zip(taken, room.capacity_bytes, strict=True))


def is_a_cut(counts: Counts, layers: int, layout: Layout) -> bool:
    return len(counts) == layout.num_stages and sum(counts) == layers and min(counts) >= 1


@st.composite
def models(draw: st.DrawFn, layouts: list[Layout]) -> tuple[Layout, LayerTimes, tuple[float, ...]]:
    """Layers of any times, of a few kinds, or all alike; ends of any weight; ranks of other speeds."""
    layout = draw(st.sampled_from(layouts))
    layers = draw(st.integers(layout.num_stages, layout.num_stages + 5))
    kinds = draw(st.lists(SECONDS, min_size=1, max_size=3))
    each = draw(st.sampled_from([SECONDS, st.sampled_from(kinds), st.just(kinds[0])]))
    layers_s = draw(st.lists(each, min_size=layers, max_size=layers))
    speed = st.sampled_from([1.0, 0.9, 0.5, 0.25])
    speeds = draw(st.one_of(st.just(()), st.tuples(*[speed] * layout.pp)))
    ends = st.sampled_from([0.0, 0.3, 5.0])
    return layout, LayerTimes(layers_s, draw(ends), draw(ends)), speeds


@given(models(ONE_STAGE))
def test_no_cut_is_lighter_with_one_stage_a_rank(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found is not None and is_a_cut(found, len(times.layers_s), layout)
    cuts = every_cut(len(times.layers_s), layout.num_stages)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in cuts)
    assert heaviest_s(times, found, layout, speeds) <= least_s * (1 + 1e-8)


@given(models(SEVERAL))
def test_no_cut_is_lighter_by_a_twentieth_with_several(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found is not None and is_a_cut(found, len(times.layers_s), layout)
    cuts = every_cut(len(times.layers_s), layout.num_stages)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in cuts)
    assert heaviest_s(times, found, layout, speeds) <= least_s * 1.05


@given(st.sampled_from([*ONE_STAGE, *SEVERAL]), st.integers(0, 5), SECONDS, st.floats(0, 20), st.floats(0, 20))
def test_layers_that_are_alike_are_cut_exactly(
    layout: Layout, more: int, layer_s: float, embedding_s: float, head_s: float
) -> None:
    layers = layout.num_stages + more
    times = LayerTimes([layer_s] * layers, embedding_s, head_s)
    found = cut_by_times(times, layout)
    assert found is not None and is_a_cut(found, layers, layout)
    least_s = min(heaviest_s(times, counts, layout) for counts in every_cut(layers, layout.num_stages))
    assert heaviest_s(times, found, layout) <= least_s * (1 + 1e-8)


@st.composite
def rooms(draw: st.DrawFn, layouts: list[Layout]) -> tuple[Layout, LayerTimes, Room]:
    """Capacities of whole numbers, that are sometimes too small."""
    layout = draw(st.sampled_from(layouts))
    layers = draw(st.integers(layout.num_stages, layout.num_stages + 4))
    size, alike = st.integers(1, 4), draw(st.booleans())
    row = st.lists(draw(st.just(size)), min_size=layers, max_size=layers)
    rows = [[draw(size)] * layers if alike else draw(row) for _ in range(layout.pp)]
    times = [draw(SECONDS)] * layers if alike else draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    capacity = [draw(st.integers(2, 3 * layers)) for _ in range(layout.pp)]
    return layout, LayerTimes(times, 0.5, draw(st.sampled_from([0.0, 4.0]))), Room(rows, capacity)


def is_lightest(case: tuple[Layout, LayerTimes, Room], beyond: float) -> None:
    """What was found takes at most `1 + beyond` times as long as the best of all cuts that memory allows."""
    layout, times, room = case
    allowed = [c for c in every_cut(len(times.layers_s), layout.num_stages) if keeps_to(room, c, layout)]
    found = cut_by_times(times, layout, room=room)
    if not allowed:
        assert found is None
        return
    assert found is not None and is_a_cut(found, len(times.layers_s), layout) and keeps_to(room, found, layout)
    least_s = min(heaviest_s(times, counts, layout) for counts in allowed)
    assert heaviest_s(times, found, layout) <= least_s * (1 + beyond)


@given(rooms(ONE_STAGE))
def test_the_lightest_cut_that_memory_allows(case) -> None:
    is_lightest(case, 1e-8)


@given(rooms(SEVERAL))
def test_memory_bounds_several_stages_a_rank_together(case) -> None:
    is_lightest(case, 0.05)


@given(models([*ONE_STAGE, *SEVERAL]))
def test_cuts_are_repeatable_and_the_even_one_stays_where_it_is_as_good(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found == cut_by_times(times, layout, speeds)
    even = cut_evenly(len(times.layers_s), layout.num_stages)
    if heaviest_s(times, even, layout, speeds) <= heaviest_s(times, found, layout, speeds):
        assert found == even


@given(models(ONE_STAGE))
def test_among_equals_the_fewest_layers_pass_borders(case) -> None:
    layout, times, speeds = case
    layers, even = len(times.layers_s), cut_evenly(len(times.layers_s), layout.num_stages)

    def passing(counts: Counts) -> int:
        pairs = zip(accumulate(counts), accumulate(even), strict=True)
        return sum(abs(border - own) for border, own in pairs)

    found = cut_by_times(times, layout, speeds)
    bound_s = heaviest_s(times, found, layout, speeds) * (1 - 1e-8)
    equals = [c for c in every_cut(layers, layout.num_stages) if heaviest_s(times, c, layout, speeds) <= bound_s]
    assert not equals, "none is lighter"
    same_s = heaviest_s(times, found, layout, speeds) * (1 + 1e-10)
    equals = [c for c in every_cut(layers, layout.num_stages) if heaviest_s(times, c, layout, speeds) <= same_s]
    assert passing(found) <= min(map(passing, equals))


def test_the_stage_with_the_head_gives_a_layer_to_its_neighbour() -> None:
    times = LayerTimes([1.0] * 80, 0.1, 1.2)
    assert cut_by_times(times, Layout(pp=8)) == (10, 10, 10, 10, 10, 10, 11, 9)
    assert cut_by_times(LayerTimes([1.0] * 8), Layout(pp=4)) == (2, 2, 2, 2)
    assert cut_by_times(LayerTimes([1.0] * 10), Layout(pp=4)) == (3, 3, 2, 2)
    heavy = LayerTimes([3.0, 1.0, 1.0, 1.0])
    assert cut_by_times(heavy, Layout(pp=2)) == (1, 3)


def test_a_cut_that_is_found_later_is_not_heavier() -> None:
    """The search takes up the borders it has begun with after others have lowered its bound."""
    times = LayerTimes([3.6, 8.75, 0.72, 8.51, 8.04, 6.99, 0.69, 2.87, 2.95], 0.5)
    layout, speeds = Layout(pp=3, pipeline_schedule="interleaved", virtual_stages=2), (1.0, 1.0, 0.25)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in every_cut(9, 6))
    assert heaviest_s(times, cut_by_times(times, layout, speeds), layout, speeds) <= least_s * 1.05


def test_a_rank_at_half_speed_has_half_of_the_layers() -> None:
    times = LayerTimes([1.0] * 14)
    assert cut_by_times(times, Layout(pp=4), (1.0, 1.0, 0.5, 1.0)) == (4, 4, 2, 4)
    assert rank_times_s(times, (4, 4, 2, 4), Layout(pp=4), (1.0, 1.0, 0.5, 1.0)) == [4, 4, 4, 4]


def test_the_first_rank_of_a_v_holds_both_ends() -> None:
    times, layout = LayerTimes([1.0] * 8, 1.0, 1.0), Layout(pp=2, pipeline_schedule="zbv")
    found = cut_by_times(times, layout)
    assert (found[0] + found[3], found[1] + found[2]) == (3, 5)
    assert rank_times_s(times, found, layout) == [5, 5]


def test_a_difference_that_is_not_worth_it_leaves_the_even_cut() -> None:
    times = LayerTimes([1.0, 1.0, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert cut_by_times(times, Layout(pp=3)) == (3, 3, 3)
    leaning = LayerTimes([1.0, 1.0, 1.0, 0.999])
    assert cut_by_times(LayerTimes(leaning.layers_s[::-1], 0.0, 0.5), Layout(pp=2), equal=0.5) == (2, 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers do not fill 4 pipeline stages"):
        cut_by_times(LayerTimes([1.0] * 3), Layout(pp=4))


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0, 1.0)])
def test_speeds_are_one_for_each_rank(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="2 pipeline ranks need as many speeds above 0"):
        cut_by_times(LayerTimes([1.0] * 3), Layout(pp=2), speeds)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("kind", ["alike", "by turns", "any"])
def test_large_models_come_near_to_what_no_cut_can_reach(schedule: str, kind: str) -> None:
    """126 layers on 16 ranks: within a layer's time of an equal share for each."""
    drawn = random.Random(126)
    layers_s = {
        "alike": [1.0] * 126,
        "by turns": [1.0, 1.0, 2.5] * 42,
        "any": [drawn.uniform(0.5, 2) for _ in range(126)],
    }
    times = LayerTimes(layers_s[kind], 0.1, 1.2)
    layout = Layout(pp=16, pipeline_schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    found = cut_by_times(times, layout)
    share_s = (sum(times.layers_s) + 1.3) / 16
    assert is_a_cut(found, 126, layout)
    assert heaviest_s(times, found, layout) <= share_s + max(times.layers_s) / 2
