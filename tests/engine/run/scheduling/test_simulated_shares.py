"""A disturbed run in simulation and the scheduler of the engine measure the same steps, and decide the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from balance.jobs import job_of, parts_of
from engine.run.scheduling.test_step_scheduler import RANKS, Run

from trainspec_cli.balance import live
from trainspec_cli.balance.decisions.shares import ShareChange
from trainspec_cli.balance.disturbance import Disturbance, SlowDevice
from trainspec_cli.balance.job import RankCounts
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.engine.run.step_report import SpeedFigures
from trainspec_cli.recipe.keys.layout import Layout

pytestmark = pytest.mark.usefixtures("one_process")

EACH = 16
STEPS = 120
SAMPLES = RANKS * EACH
UPDATE_S = 6.0
"""About as long as six samples of 16."""
EVENTS = (
    SlowDevice(device=2, factor=1.8, from_step=15, steps=40),
    SlowDevice(device=0, factor=1.3, from_step=35, steps=45),
    SlowDevice(device=3, factor=1.1, from_step=90),
)


class Ranks:
    """The engine's schedulers of all ranks. They measure what the ranks of the simulated group measure."""

    def __init__(self, folder: Path, layout: Layout):
        changes: dict[str, Any] = {"may_change": ("shares",), "micro_batch_size": 1, "largest": 1, "layout": layout}
        self.schedulers = [Run(folder / str(rank), **changes).scheduler for rank in range(RANKS)]
        self.layout = layout
        self.step = 0
        self.shares: list[tuple[int, ...]] = []
        self._reported: list[SpeedFigures] = []

    def begin_step(self) -> None:
        divisions = [scheduler.divide(self.step) for scheduler in self.schedulers]
        self._reported = [one for scheduler in self.schedulers if (one := scheduler.report(self.step))]
        assert len({division.counts(SAMPLES) for division in divisions}) == 1, "all ranks decide the same"
        self._division = divisions[0]
        self.shares.append(divisions[0].counts(SAMPLES))

    def end_step(
        self, micro_batches: int, measured_s: list[list[float]], updates_s: list[list[float]], exchanged_s: float
    ) -> None:
        self.step += 1
        slowest_s = max(map(max, measured_s))
        is_new = len(self.shares) == 1 or self.shares[-1] != self.shares[-2]
        rows = zip(self.schedulers, measured_s, updates_s, strict=True)
        for rank, (scheduler, (own_s,), (update_s,)) in enumerate(rows):
            parts_s = {
                "data_wait": 1e6 if is_new else 0.0,  # a change costs as much as it may, as in the simulated job
                "forward": own_s / 4,
                "backward": own_s - own_s / 4,
                # In a sharded layout, a rank measures its update, too, but all of them wait for the slowest one.
                "optimizer": update_s or UPDATE_S,
                "exposed_comm": slowest_s - own_s + exchanged_s,
            }
            own = self._division.of_rank(rank, 0, SAMPLES)
            assert len(own.sizes) == micro_batches
            scheduler.note_step(self.step, own, parts_s, SAMPLES, self._reported)


LAYOUTS = {
    "exchanges once": Layout(dp_shard=RANKS, zero_stage=1),
    "exchanges each micro-batch": Layout(dp_shard=RANKS, zero_stage=3),
    "updates alone": Layout(dp_replicate=RANKS),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks(tmp_path, request.param)

    class Both(live.LiveGroup):
        def begin_step(self) -> ShareChange | None:
            change = super().begin_step()
            ranks.begin_step()
            assert self.division.counts(SAMPLES) == ranks.shares[-1], f"step {ranks.step}"
            return change

        def end_step(self, taken: RankCounts, *times: Any, reports: bool) -> None:
            super().end_step(taken, *times, reports=reports)
            ranks.end_step(taken.micro_batches, *times)

    monkeypatch.setattr(live, "LiveGroup", Both)
    return ranks


def test_in_each_step_the_engine_divides_the_samples_as_the_simulation_does(ranks: Ranks) -> None:
    layout = ranks.layout
    parts = parts_of(optimizer_s=UPDATE_S)
    job = job_of(RANKS, each=EACH, zero_stage=layout.zero_stage, shards=layout.dp_shard > 1, parts=parts)
    simulation = simulate(job, Disturbance(slow_devices=EVENTS, steps=STEPS), "test")
    changed = [step for step in range(1, STEPS) if ranks.shares[step] != ranks.shares[step - 1]]
    assert ranks.step == STEPS
    assert len(changed) >= 2, "there was something to decide"
    assert [decision.step for decision in simulation.decisions] == [step + 1 for step in changed]
