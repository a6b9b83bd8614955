"""A disturbed run in simulation and the scheduler of the engine measure the same steps, and decide the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from balance.jobs import job_of
from engine.run.scheduling.test_step_scheduler import RANKS, Run

from trainspec_cli.balance import live
from trainspec_cli.balance.decisions.shares import ShareChange
from trainspec_cli.balance.disturbance import Disturbance, SlowDevice
from trainspec_cli.balance.job import RankCounts
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.engine.run.step_report import SpeedFigures
from trainspec_cli.recipe.keys.layout import Layout, ZeroStage

pytestmark = pytest.mark.usefixtures("one_process")

EACH = 16
STEPS = 120
SAMPLES = RANKS * EACH
EVENTS = (
    SlowDevice(device=2, factor=1.8, from_step=15, steps=40),
    SlowDevice(device=0, factor=1.3, from_step=35, steps=45),
    SlowDevice(device=3, factor=1.1, from_step=90),
)


class Ranks:
    """The engine's schedulers of all ranks. They measure what the ranks of the simulated group measure."""

    def __init__(self, folder: Path, zero_stage: ZeroStage):
        layout = Layout(dp_shard=RANKS, zero_stage=zero_stage)
        changes: dict[str, Any] = {"may_change": ("shares",), "micro_batch_size": 1, "largest": 1, "layout": layout}
        self.schedulers = [Run(folder / str(rank), **changes).scheduler for rank in range(RANKS)]
        self.zero_stage = zero_stage
        self.step = 0
        self.shares: list[tuple[int, ...]] = []
        self._reported: list[SpeedFigures] = []

    def begin_step(self) -> None:
        divisions = [scheduler.divide(self.step) for scheduler in self.schedulers]
        self._reported = [one for scheduler in self.schedulers if (one := scheduler.report(self.step))]
        assert len({division.counts(SAMPLES) for division in divisions}) == 1, "all ranks decide the same"
        self._division = divisions[0]
        self.shares.append(divisions[0].counts(SAMPLES))

    def end_step(self, micro_batches: int, measured_s: list[list[float]], exchanged_s: float) -> None:
        self.step += 1
        slowest_s = max(map(max, measured_s))
        is_new = len(self.shares) == 1 or self.shares[-1] != self.shares[-2]
        for rank, (scheduler, (own_s,)) in enumerate(zip(self.schedulers, measured_s, strict=True)):
            parts_s = {
                "data_wait": 1e6 if is_new else 0.0,  # a change costs as much as it may, as in the simulated job
                "forward": own_s / 4,
                "backward": own_s - own_s / 4,
                "exposed_comm": slowest_s - own_s + exchanged_s,
            }
            own = self._division.of_rank(rank, 0, SAMPLES)
            assert len(own.sizes) == micro_batches
            scheduler.note_step(self.step, own, parts_s, SAMPLES, self._reported)


@pytest.fixture(params=[1, 3], ids=["exchanges once", "exchanges each micro-batch"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks(tmp_path, request.param)

    class Both(live.LiveGroup):
        def begin_step(self) -> ShareChange | None:
            change = super().begin_step()
            ranks.begin_step()
            assert self.division.counts(SAMPLES) == ranks.shares[-1], f"step {ranks.step}"
            return change

        def end_step(self, taken: RankCounts, measured_s: list[list[float]], waited_s: float, *, reports: bool) -> None:
            super().end_step(taken, measured_s, waited_s, reports=reports)
            ranks.end_step(taken.micro_batches, measured_s, waited_s)

    monkeypatch.setattr(live, "LiveGroup", Both)
    return ranks


def test_in_each_step_the_engine_divides_the_samples_as_the_simulation_does(ranks: Ranks) -> None:
    job = job_of(RANKS, each=EACH, zero_stage=ranks.zero_stage)
    simulation = simulate(job, Disturbance(slow_devices=EVENTS, steps=STEPS), "test")
    changed = [step for step in range(1, STEPS) if ranks.shares[step] != ranks.shares[step - 1]]
    assert ranks.step == STEPS
    assert len(changed) >= 2, "there was something to decide"
    assert [decision.step for decision in simulation.decisions] == [step + 1 for step in changed]
