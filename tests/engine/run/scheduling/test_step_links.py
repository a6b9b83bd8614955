"""The sampled steps: the same on every rank whatever happens to a step, and no more than the cost allows.

A sampled step holds meetings, so a rank that samples alone waits for ever; and figures of another number than the other
ranks' do not fit into the exchange that they share.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.engine_runs import run_of

from trainspec_cli.balance.decisions.links import (
    COST_SHARE,
    DEPARTED_STEPS,
    FIRST_SAMPLE_STEPS,
    FIRST_SAMPLES,
    LEAST_INTERVAL_STEPS,
    TOLD_STEPS,
    Transfer,
)
from trainspec_cli.engine.digest import Span
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.links import GROUPS
from trainspec_cli.engine.run.scheduling import links
from trainspec_cli.engine.run.scheduling.links import StepLinks
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.run.folder.event_types.events import Event, LinkEvent, LinksEvent
from trainspec_cli.run.folder.paths import RunDir

RANKS = 4
BYTES, RATE, STEP_S = 1e6, 2e9, 50.0
LAYOUTS = {
    Layout(tp=2, dp_shard=2): {"tp": [(0, 1), (2, 3)], "dp_shard": [(0, 2), (1, 3)]},
    Layout(dp_shard=4): {"dp_shard": [(0, 1, 2, 3)]},
    Layout(pp=2, dp_shard=2): {"dp_shard": [(0, 1), (2, 3)]},
}
TENSOR, DATA, PIPELINE = LAYOUTS
SENT_OVER_LINES_S = 0.001


class Timers:
    """Stands in for the timers of one rank, whose exchanges are as fast as `factors` (axis) says."""

    def __init__(self, cost_s: float):
        self.is_sampled, self.cost_s = False, cost_s
        self.factors: dict[str, float] = {}
        self.is_due: Callable[[int], bool]

    def begin(self, is_sampled: bool) -> None:
        self.is_sampled = is_sampled

    def end(self) -> Timers:
        self.is_sampled = False
        return self

    def transfer(self, axis: str) -> Transfer:
        return Transfer(BYTES, BYTES / RATE * self.factors.get(axis, 1.0), 0.01)


class Ranks:
    """The ranks of a replica group, in one process: `step` and the rest happen to all of them together."""

    def __init__(self, patch: pytest.MonkeyPatch, layout: Layout = TENSOR, group: int | None = None, **about: Any):
        self._rank, self._mode = 0, about.get("mode", "advise")
        self._on_accelerator = about.get("on_accelerator", False)
        self._unread: Callable[[], None] | None = None
        patch.setattr(links, "dist", SimpleNamespace(get_rank=lambda: self._rank, get_world_size=lambda: RANKS))
        patch.setattr(links, "time_messages", self._time_messages)
        self.timers = [Timers(cost_s) for cost_s in about.get("costs_s", (1e-5,) * RANKS)]
        self.events: list[Event] = []
        self.supervisor: Any = SimpleNamespace()
        self.group = group
        self.begin_with(layout)
        self.at, self.sampled, self.told = 0, list[int](), list[int]()
        self.step_s = STEP_S

    def write(self, event: Event) -> None:
        self.events.append(event)

    def _time_messages(self, *_: object) -> tuple[Span | None, Span | None]:
        """The first of two stages sends ahead alone, and the second back."""
        span = 0.0, SENT_OVER_LINES_S
        return (None, span) if self._rank >= RANKS // 2 else (span, None)

    def _built(self, layout: Layout, rank: int) -> TrainingRun:
        scheduler = SimpleNamespace(mode=self._mode, change=0.1)
        plan = SimpleNamespace(spec=SimpleNamespace(scheduler=scheduler), prediction=None)
        axes = SimpleNamespace(mesh=torch.arange(RANKS).view(layout.pp, 1, -1, 1, layout.tp))
        hidden = SimpleNamespace(like=lambda tokens: torch.empty(len(tokens), 8))
        clock = StepClock(torch.device("cpu"))
        state = SimpleNamespace(
            mesh=SimpleNamespace(links=lambda: dict(LAYOUTS[layout]), layout=layout, axes=axes),
            device=torch.device("cpu"),
            links=self.timers[rank],
            clock=SimpleNamespace(on_gpu=self._on_accelerator, collective=clock.collective, mark=clock.mark),
            stages=SimpleNamespace(hidden=hidden, layout=layout, lines=None),
            sums=SimpleNamespace(holds_back=False),
        )
        return run_of(plan, state, RunDir("unused"), self, self.group)

    def begin_with(self, layout: Layout) -> None:
        self.links = []
        for rank in range(RANKS):
            self._rank = rank
            self.links.append(StepLinks(self._built(layout, rank), self.supervisor))

    def step(self, *, fails: bool = False, samples: int = 2) -> None:
        """Make a step; one that `fails` is left in the middle, as after an aborted exchange or for want of memory."""
        due = {timers.is_due(self.at) for timers in self.timers}
        for one in self.links:
            one.begin(self.at)
        if (
            self._on_accelerator and self._unread is not None
        ):  # the step before is read once this one's passes are queued
            self._unread()
            self._unread = None
        (is_sampled,) = {timers.is_sampled for timers in self.timers}
        assert due == {is_sampled}, "other replica groups know before the step"
        reported = [one.report for one in self.links if one.report is not None]
        assert len({len(one.transfers) for one in reported}) <= 1 and len(reported) in (0, RANKS), "all or none"
        said = sum(one.steps_to_sample for one in self.links)
        if fails:
            return
        if is_sampled:
            self.sampled.append(self.at)
        for rank, one in enumerate(self.links):
            self._rank = rank
            one.finish([(torch.zeros(samples, 3),)])  # type: ignore[list-item]
        self.at += 1
        if reported:
            self.told.append(self.at)
        self._unread = partial(self._read, self.at, reported, said, self.links)
        if not self._on_accelerator:
            self._unread()

    def _read(self, step: int, reported: list[Any], said: int, of_layout: list[StepLinks]) -> None:
        for rank, one in enumerate(of_layout if of_layout is self.links else ()):
            self._rank = rank
            one.note_step(step, self.step_s, reported, said)


@pytest.mark.parametrize(("group", "on_accelerator"), [(None, False), (1, False), (None, True)])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_sample_the_same_steps_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, seed: int, group: int | None, on_accelerator: bool
) -> None:
    drawn = random.Random(seed)
    ranks = Ranks(monkeypatch, drawn.choice(list(LAYOUTS)), group, on_accelerator=on_accelerator)
    for _ in range(300):
        match drawn.choices(["step", "fails", "heals", "changes"], [20, 3, 1, 1])[0]:
            case "fails":
                ranks.step(fails=True)
            case "heals":  # from a group that has made these steps
                ranks.at += drawn.randrange(1, 15)
            case "changes":
                ranks.begin_with(drawn.choice(list(LAYOUTS)))
            case _:
                ranks.step(samples=drawn.choice([0, 2]))
    ranks.sampled.clear()
    ranks.told.clear()
    for _ in range(5 * LEAST_INTERVAL_STEPS):
        ranks.step()
    assert 4 - on_accelerator <= len(ranks.sampled) <= 3 + FIRST_SAMPLES, "it goes on"
    assert abs(len(ranks.told) - len(ranks.sampled)) <= 1


def test_the_first_steps_and_those_between_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    for _ in range(60):
        ranks.step()
    learning = [FIRST_SAMPLE_STEPS + (TOLD_STEPS + 1) * sample for sample in range(FIRST_SAMPLES)]
    known = [learning[-1] + (TOLD_STEPS + LEAST_INTERVAL_STEPS) * sample for sample in (1, 2)]
    assert ranks.sampled == [*learning, *known]
    assert ranks.told == [step + 2 for step in ranks.sampled], "in the exchange of the next step"


def test_the_rank_to_which_samples_cost_most_says_how_seldom_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cost_s = 40 * COST_SHARE * STEP_S
    ranks = Ranks(monkeypatch, costs_s=(0.0, 0.0, cost_s, 0.0))
    for _ in range(400):
        ranks.step()
    apart = [after - before for before, after in pairwise(ranks.sampled[FIRST_SAMPLES - 1 :])]
    assert 0 <= min(apart) - (TOLD_STEPS + 40) <= 1, "counted from the step that announced the sample"
    assert max(apart) < 50, "learning from it costs next to nothing"


def test_steps_that_take_another_time_are_sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    while len(ranks.sampled) < FIRST_SAMPLES + 1:
        ranks.step()
    for _ in range(TOLD_STEPS):
        ranks.step()
    ranks.sampled.clear()
    ranks.step_s, changed = 1.3 * STEP_S, ranks.at
    for _ in range(LEAST_INTERVAL_STEPS - 2):
        ranks.step()
    assert ranks.sampled == [changed + DEPARTED_STEPS + 1], "told in a step, and taken in the next"


def test_an_accelerator_s_samples_are_announced_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, on_accelerator=True)
    for _ in range(80):
        ranks.step()
    assert len(ranks.sampled) > FIRST_SAMPLES
    assert ranks.told[: len(ranks.sampled) - 1] == [step + 2 for step in ranks.sampled[:-1]]
    apart = {after - before for before, after in pairwise(ranks.sampled[:FIRST_SAMPLES])}
    assert apart == {TOLD_STEPS + 1 + 1}


def test_what_was_asked_for_in_a_step_that_fails_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    while len(ranks.told) < 1:
        ranks.step()
    ranks.step(fails=True)
    ranks.step()
    ranks.step()
    assert ranks.sampled == [FIRST_SAMPLE_STEPS, FIRST_SAMPLE_STEPS + TOLD_STEPS + 1]


def test_a_step_that_is_made_again_is_sampled_again_and_tells_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    for _ in range(FIRST_SAMPLE_STEPS):
        ranks.step()
    for _ in range(3):
        ranks.step(fails=True)
        assert all(timers.is_sampled for timers in ranks.timers)
        assert not any(one.report for one in ranks.links)
    ranks.step()
    ranks.step(fails=True)
    assert all(one.report for one in ranks.links), "they are not lost with the step"
    ranks.step()
    assert (ranks.sampled, ranks.told) == ([FIRST_SAMPLE_STEPS], [FIRST_SAMPLE_STEPS + 2])
    assert not any(one.report for one in ranks.links)


def test_figures_of_another_layout_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    for _ in range(FIRST_SAMPLE_STEPS + 1):
        ranks.step()
    assert all(one.report for one in ranks.links)
    ranks.begin_with(DATA)
    for _ in range(FIRST_SAMPLE_STEPS + 1):
        ranks.step()
    assert ranks.told == []
    assert ranks.sampled == [FIRST_SAMPLE_STEPS, 2 * FIRST_SAMPLE_STEPS + 1]


def test_where_nothing_is_measured_no_step_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, mode="off")
    for _ in range(20):
        ranks.step()
    ranks.links[0].write_speeds(20)
    assert (ranks.sampled, ranks.told, ranks.events) == ([], [], [])


def test_a_link_that_becomes_slow_is_written_down_once_and_by_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, PIPELINE, group=1)
    while len(ranks.told) < 12:
        ranks.step()
    assert [type(event) for event in ranks.events] == [LinksEvent], "after eight samples"
    ranks.timers[3].factors["dp_shard"] = 3.0
    while len(ranks.told) < 20:
        ranks.step()
    assert ranks.supervisor.links == (), "replica groups keep their layout"
    changed, written = ranks.events[1:]
    assert isinstance(changed, LinkEvent) and isinstance(written, LinksEvent)
    assert [changed.since_step, changed.step] == [ranks.sampled[12] + 1, ranks.sampled[14] + 1]
    assert (changed.axis, changed.ranks, changed.changed_links, changed.group) == ("dp_shard", (2, 3), 1, 1)
    assert (changed.before_bytes_per_s, changed.now_bytes_per_s) == pytest.approx((RATE, RATE / 3))
    slowest = {link.axis: link for link in written.links}
    assert set(slowest) == {"dp_shard", "pp", GROUPS}
    assert (slowest["dp_shard"].ranks, slowest["dp_shard"].links) == ((2, 3), 2)
    assert (slowest["pp"].ranks, slowest["pp"].links) == ((0, 2), 2)
    assert (slowest["pp"].sent_bytes, slowest["pp"].bytes_per_s) == pytest.approx((64.0, 64.0 / SENT_OVER_LINES_S))


def test_the_supervisor_is_told_what_is_confirmed_and_nothing_of_another_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch)
    while len(ranks.told) < FIRST_SAMPLES - 1:
        ranks.step()
    assert ranks.supervisor.links == ()
    while len(ranks.told) < FIRST_SAMPLES:
        ranks.step()
    known = ranks.supervisor.links
    assert [(link.axis, link.ranks) for link in known] == [
        *(("tp", ranks) for ranks in LAYOUTS[TENSOR]["tp"]),
        *(("dp_shard", ranks) for ranks in LAYOUTS[TENSOR]["dp_shard"]),
    ]
    assert all((link.sent_bytes, link.bytes_per_s) == pytest.approx((BYTES, RATE)) for link in known)
    ranks.timers[1].factors["tp"] = 4.0
    while len(ranks.told) < FIRST_SAMPLES + 2:
        ranks.step()
    assert ranks.supervisor.links is known, "not confirmed yet"
    while len(ranks.told) < FIRST_SAMPLES + 3:
        ranks.step()
    rates = {(link.axis, link.ranks): link.bytes_per_s for link in ranks.supervisor.links}
    assert rates.pop(("tp", (0, 1))) == pytest.approx(RATE / 4)
    assert all(rate == pytest.approx(RATE) for rate in rates.values())
    ranks.begin_with(DATA)
    assert ranks.supervisor.links == ()
