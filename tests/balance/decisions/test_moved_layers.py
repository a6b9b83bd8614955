"""When layers move between stages, in simulated pipelines whose ranks have known speeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.decisions.balance import PAUSE_S, PAUSE_STEPS, LayerChange, LayerScheduler, with_stages
from trainspec_cli.balance.decisions.shares import ShareScheduler
from trainspec_cli.balance.decisions.speeds import Speed, slowest
from trainspec_cli.planner.pipeline import LayerTimes, cut_evenly
from trainspec_cli.recipe.keys.layout import Layout

SAMPLES, LAYERS = 32, 12
TIMES = LayerTimes([1.0] * LAYERS)
Slow = Callable[[int, int, int], float]
"""(data-parallel rank, pipeline rank, step) -> how many times as long it takes."""


class Run:
    """A run whose ranks compute a layer of a sample in 10 ms; a new cut resets the shares."""

    def __init__(self, layout: Layout, slow: Slow, most_layers: int = LAYERS, times: LayerTimes = TIMES):
        self.layout, self.slow, self.most, self.times = layout, slow, most_layers, times
        self.even = even_division(layout, 4, keeps_micro_batches=False)
        self.moved: list[tuple[int, LayerChange]] = []
        self.step_s: list[float] = []
        self.paused_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self.shares = ShareScheduler(self.even, SAMPLES, 0.1)
        self.layers = LayerScheduler(self.layout, self.times, self.most, self.even, SAMPLES, 0.1)

    def speeds(self, step: int) -> list[list[Speed]]:
        counts = self.layout.stage_layers or cut_evenly(LAYERS, self.layout.num_stages)
        held = [sum(counts[stage] for stage in self.layout.stages_of_rank(rank)) for rank in range(self.layout.pp)]
        rows = range(self.layout.data_parallel_size)
        return [[Speed(0.0, 0.01 * n * self.slow(row, p, step)) for p, n in enumerate(held)] for row in rows]

    def run(self, steps: int, pause_s: float | None = None) -> Run:
        for step in range(steps):
            speeds = self.speeds(step)
            counts = self.shares.division.counts(SAMPLES)
            self.step_s.append(
                max(count * max(s.per_sample_s for s in row) for count, row in zip(counts, speeds, strict=True))
            )
            division = self.shares.division
            self.shares.note_step(SAMPLES, [slowest(row, SAMPLES) for row in speeds], 0.0)
            if change := self.layers.note_step(SAMPLES, division, speeds, steps - step - 1, pause_s):
                self.moved.append((step, change))
                self.layout = with_stages(self.layout, change.stage_layers)
                self._begin()
        return self

    @property
    def cuts(self) -> list[tuple[int, ...]]:
        return [change.stage_layers for _, change in self.moved]


def half(row: int, rank: int, first: int = 10, last: int = 10_000) -> Slow:
    return lambda r, p, step: 2.0 if (r, p) == (row, rank) and first <= step < last else 1.0


def test_equal_ranks_keep_their_cut() -> None:
    for layout in (Layout(pp=2), Layout(pp=4, dp_shard=2), Layout(pp=2, pipeline_schedule="zbv")):
        assert Run(layout, lambda row, rank, step: 1.0 + 0.04 * ((row + rank + step) % 2)).run(1000).moved == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_alone_moves_layers_off_a_slow_rank_and_back(rank: int) -> None:
    run = Run(Layout(pp=2), half(0, rank, 10, 200)).run(400)
    away, back = run.moved
    assert away[1].stage_layers[rank] == LAYERS // 3
    assert back[1].stage_layers == (6, 6)
    assert run.layout == Layout(pp=2)
    assert away[1].before_s == pytest.approx(2 * 6 * 0.01 * SAMPLES)
    assert away[1].after_s == pytest.approx(8 * 0.01 * SAMPLES)
    assert run.step_s[100] == pytest.approx(away[1].after_s)
    assert away[1].reason.startswith(f"pipeline rank {rank} takes 2 times ") or rank == 0
    assert 200 <= back[0] < 230


def test_it_waits_until_what_was_lost_has_come_to_the_pause() -> None:
    run = Run(Layout(pp=2), half(0, 1)).run(200)
    (step, change), *_ = run.moved
    saved_s = change.before_s - change.after_s
    cost_s = PAUSE_S + PAUSE_STEPS * change.before_s
    assert (step - 9) * saved_s >= cost_s > (step - 10) * saved_s
    ((measured, _), *_) = Run(Layout(pp=2), half(0, 1)).run(200, pause_s=20 * saved_s).moved
    assert measured - 9 == 20


def test_it_does_not_move_for_the_few_steps_that_are_left() -> None:
    assert Run(Layout(pp=2), half(0, 1)).run(16).moved == []
    late = half(0, 1, 180)
    assert Run(Layout(pp=2), late).run(194, pause_s=10.0).moved == []
    assert len(Run(Layout(pp=2), late).run(220, pause_s=10.0).moved) == 1


def test_no_rank_gets_more_layers_than_memory_holds() -> None:
    run = Run(Layout(pp=2), half(0, 1), most_layers=7).run(200)
    assert run.cuts == [(7, 5)]
    assert Run(Layout(pp=2), half(0, 1), most_layers=6).run(200).moved == []


def test_shares_are_changed_first_and_layers_where_that_gives_more() -> None:
    """Two pipelines: shares alone even out one slow rank. Where the same stage is slow in both, shares win nothing."""
    one = Run(Layout(pp=2, dp_shard=2), half(0, 1)).run(300)
    assert min(one.step_s[50:]) <= 1.5 * 0.06 * SAMPLES / 2
    both = Run(Layout(pp=2, dp_shard=2), lambda row, rank, step: 2.0 if rank == 1 and step >= 10 else 1.0).run(300)
    assert both.cuts == [(8, 4)]
    assert both.step_s[-1] == pytest.approx(0.08 * SAMPLES / 2)
    ideal_s = 6 * 0.01 * SAMPLES / 2 * 4 / 3
    assert both.step_s[-1] <= ideal_s / 0.85


def test_it_settles_with_one_slow_rank_of_four_pipelines() -> None:
    run = Run(Layout(pp=4, dp_shard=2), half(1, 2)).run(300)
    assert len(run.moved) <= 1
    usual_s, slowed_s = run.step_s[0], run.step_s[12]
    assert slowed_s > 1.5 * usual_s or run.step_s[11] > 1.5 * usual_s
    assert len({round(seconds, 6) for seconds in run.step_s[150:]}) == 1


def test_a_cut_that_was_planned_badly_is_mended() -> None:
    heavy_head = LayerTimes([1.0] * LAYERS, head_s=0.0)
    run = Run(Layout(pp=2, stage_layers=(9, 3)), lambda row, rank, step: 1.0, times=heavy_head).run(100)
    assert run.cuts == [(6, 6)]
    assert "less even" in run.moved[0][1].reason


def test_nothing_is_decided_before_every_speed_is_known() -> None:
    layers = LayerScheduler(
        Layout(pp=2), TIMES, LAYERS, even_division(Layout(pp=2), 4, keeps_micro_batches=False), SAMPLES, 0.1
    )
    even = even_division(Layout(pp=2), 4, keeps_micro_batches=False)
    for _ in range(100):
        assert layers.note_step(SAMPLES, even, [[Speed(0.0, 1.0), None]], 1000) is None


def test_the_even_cut_has_no_list_of_layers() -> None:
    assert with_stages(Layout(pp=2, stage_layers=(3, 1)), (2, 2)) == Layout(pp=2)
    assert with_stages(Layout(pp=2), (3, 1)).stage_layers == (3, 1)


def test_a_decision_that_is_not_carried_out_is_not_repeated() -> None:
    layout, even = Layout(pp=2), even_division(Layout(pp=2), 4, keeps_micro_batches=False)
    layers = LayerScheduler(layout, TIMES, LAYERS, even, SAMPLES, 0.1)
    slow, usual = [[Speed(0.0, 0.06), Speed(0.0, 0.12)]], [[Speed(0.0, 0.06)] * 2]
    found = [layers.note_step(SAMPLES, even, slow, 1000) for _ in range(100)]
    assert [change.stage_layers for change in found if change] == [(8, 4)]
    assert not any(layers.note_step(SAMPLES, even, usual, 1000) for _ in range(5))
    again = [layers.note_step(SAMPLES, even, slow, 1000) for _ in range(100)]
    assert [change.stage_layers for change in again if change] == [(8, 4)]
