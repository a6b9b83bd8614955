"""The scheduler of one process: what it reports, decides, writes down, follows again and refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.engine_runs import KeptEvents, run_of
from lab.supervisor import PlayedSupervisor

from trainspec_cli.balance.batch.division import Division, even_division
from trainspec_cli.balance.decisions import ski_rental
from trainspec_cli.balance.decisions.speeds import Speed, slowest
from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.run.scheduling import directives as written
from trainspec_cli.engine.run.scheduling.directives import Directives, follows_earlier, read_directives
from trainspec_cli.engine.run.scheduling.step_scheduler import (
    StepScheduler,
    division_of,
    largest_micro_batch,
    ranks_of_pipelines,
    read_speed,
)
from trainspec_cli.engine.run.step_report import SpeedFigures
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.channel.messages import Proposal
from trainspec_cli.run.folder.event_types.events import AchievedEvent, DirectiveEvent, Event
from trainspec_cli.run.folder.events import EventWriter, read_events
from trainspec_cli.run.folder.paths import RunDir

pytestmark = pytest.mark.usefixtures("one_process")

RANKS, SAMPLES = 4, 32
EVEN = (8, 8, 8, 8)
UNEVEN = (9, 9, 5, 9)
USUAL = (1.0, 1.0, 1.0, 1.0)
ONE_SLOW = (1.0, 1.0, 1.8, 1.0)


class Run:
    """Four data-parallel ranks; this process is the first, and `step` gets the figures of the others."""

    def __init__(self, folder: Path, mode: str = "auto", group: int | None = None, **changes: Any):
        layout = changes.pop("layout", Layout(dp_shard=RANKS, zero_stage=1))
        may_change = changes.pop("may_change", ("shares", "layers", "layout", "nodes"))
        most = changes.pop("most", "auto")
        scheduler = SchedulerSpec(mode=mode, may_change=may_change, max_micro_batch_size=most)  # type: ignore[arg-type]
        model = SimpleNamespace(unit=changes.pop("unit", "tokens"))
        self.plan: Any = SimpleNamespace(
            layout=layout,
            changes=(),
            total_steps=1000,
            layer_flops=changes.pop("layer_flops", ()),
            head_flops=0.0,
            largest_stage_layers=changes.pop("largest_stage_layers", None),
            micro_batch_size=changes.pop("micro_batch_size", 8),
            largest_micro_batch_size=changes.pop("largest", 16),
            group_size=changes.pop("group_size", RANKS),
            num_nodes=changes.pop("num_nodes", 1),
            spec=SimpleNamespace(scheduler=scheduler, model=model),
        )
        assert not changes
        axes = torch.arange(layout.pp * layout.data_parallel_size).view(layout.pp, 1, -1, 1, 1)
        state: Any = SimpleNamespace(mesh=SimpleNamespace(axes=SimpleNamespace(mesh=axes)))
        self.folder, self.journal = RunDir(folder), KeptEvents()
        run = run_of(self.plan, state, self.folder, self.journal, group)
        self.directives = Directives(run, recalls=follows_earlier(self.plan, group))
        self.supervisor = PlayedSupervisor()
        self.link = SupervisorLink(self.supervisor)
        self.scheduler = StepScheduler(run, self.directives, self.link)
        self.reported: SpeedFigures | None = None

    def step(
        self,
        step: int,
        sample_s: Sequence[float] = USUAL,
        waited_s: Sequence[float] = (0.5,) * RANKS,
        speeds: Sequence[float] | None = None,
        change_s: float = math.inf,
    ) -> tuple[int, ...]:
        """Make the step after update `step`, in which a sample took each rank `sample_s`, and the exchanges of a
        micro-batch `waited_s`; the first rank has seen a change to cost `change_s`. Return the shares."""
        division = self.scheduler.divide(step)
        counts = division.counts(SAMPLES)
        self.reported = self.scheduler.report(step)
        known = sample_s if speeds is None else speeds
        figures = [
            [0.0, speed, 0.0, 0.0, count * own_s, own_waited_s, 0.0]
            for speed, count, own_s, own_waited_s in zip(
                known, counts * self.plan.layout.pp, sample_s, waited_s, strict=False
            )
        ]
        figures[0][3], figures[0][6] = change_s, self.reported.proposal if self.reported else 0.0
        own = division.of_rank(0, 0, SAMPLES)
        compute_s = counts[0] * sample_s[0]
        parts_s = {
            "data_wait": 6.0 if step == 0 else 0.5,
            "forward": compute_s / 4,
            "backward": 3 * compute_s / 4,
            "optimizer": 0.0,
            "exposed_comm": waited_s[0] * len(own.sizes),
        }
        reported = [SpeedFigures(*row) for row in figures] if self.reported else []
        self.scheduler.note_step(step + 1, own, parts_s, SAMPLES, reported)
        return counts

    def steps(self, first: int, last: int, *sample_s: float) -> list[tuple[int, ...]]:
        return [self.step(step, sample_s or USUAL) for step in range(first, last)]

    @property
    def written(self) -> list[dict[str, Any]]:
        return list(read_events(self.folder.directives))


def directive(number: int = 1, step: int = 3, counts: tuple[int, ...] = UNEVEN, **changes: Any) -> DirectiveEvent:
    fields: dict[str, Any] = {
        "applied": True,
        "micro_batch_size": 16,
        "micro_batches": 1,
        "reason": "rank 2 is slow",
        "before_s": 14.4,
        "expected_s": 9.0,
    }
    return DirectiveEvent(step=step, number=number, counts=counts, **fields | changes)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the directives of an earlier start; -> their file."""

    def write(*events: Event) -> Path:
        path = RunDir(tmp_path).directives
        writer = EventWriter(path, 0)
        for event in events:
            writer.write(event)
        writer.close()
        return path

    return write


def test_a_slow_rank_gets_less_from_the_next_step_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = run.steps(0, 10, *ONE_SLOW)
    changed = found.index(UNEVEN)
    assert 1 <= changed <= 3
    assert found == [EVEN] * changed + [UNEVEN] * (10 - changed)
    (first, *_) = run.written
    assert (first["step"], first["number"], first["applied"]) == (changed, 1, True)
    assert (tuple(first["counts"]), first["micro_batches"], first["micro_batch_size"]) == (UNEVEN, 1, 16)
    assert (first["before_s"], first["expected_s"]) == pytest.approx((14.4, 9.0))
    assert all(fact in first["reason"] for fact in ("rank 2 ", " 1.8 s ", "1.0 s"))
    assert "group" not in first


@pytest.mark.clause("SCHED-1")
def test_it_is_written_down_before_a_step_is_made_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(5):
        division = run.scheduler.divide(step)
        in_force = division.counts(SAMPLES) == UNEVEN
        assert bool(run.written) == in_force
        assert bool(run.journal.events) == in_force
        run.step(step, ONE_SLOW)
    assert run.written


@pytest.mark.clause("SCHED-5")
def test_what_it_has_come_to_is_measured(tmp_path: Path) -> None:
    """Two steps still bring figures of before; of the five after that the median counts."""
    run = Run(tmp_path)
    at = 0
    while run.scheduler.divide(at).counts(SAMPLES) == EVEN:
        run.step(at, ONE_SLOW)
        at += 1
    for own_s in (3.0, 3.0, 1.8, 1.8, 2.0, 2.2, 2.4, 3.0):
        run.step(at, (1.0, 1.0, own_s, 1.0), speeds=ONE_SLOW)
        at += 1
    given, achieved = run.written
    assert (achieved["type"], achieved["number"]) == ("achieved", 1)
    assert achieved["step"] == given["step"] + 7
    assert (achieved["before_s"], achieved["expected_s"], achieved["achieved_s"]) == pytest.approx((14.4, 9.0, 10.0))
    assert [type(event) for event in run.journal.events] == [DirectiveEvent, AchievedEvent]


def test_a_directive_says_how_many_micro_batches_there_are(tmp_path: Path) -> None:
    """Also where the division itself leaves that to the number of samples."""
    run = Run(tmp_path, micro_batch_size=4, largest=8)
    run.steps(0, 20, *ONE_SLOW)
    run.steps(20, 60)
    given = [line for line in run.written if line["type"] == "directive"]
    assert [(tuple(line["counts"]), line["micro_batches"]) for line in given] == [(UNEVEN, 2), (EVEN, 2)]


@pytest.mark.clause("SCHED-4")
def test_advice_changes_nothing_and_is_given_once(tmp_path: Path) -> None:
    run = Run(tmp_path, mode="advise")
    assert set(run.steps(0, 40, *ONE_SLOW)) == {EVEN}
    (advice,) = run.written
    assert (advice["applied"], tuple(advice["counts"])) == (False, UNEVEN)
    assert set(run.steps(40, 80)) == {EVEN}
    _, back = run.written
    assert (back["number"], back["applied"], tuple(back["counts"])) == (2, False, EVEN)


def test_advice_waits_until_it_is_no_passing_load(tmp_path: Path) -> None:
    """Other programs slow one rank for some seconds, and then another: two equal runs would be advised differently."""
    seconds = 0.01
    usual = [seconds * own_s for own_s in USUAL]
    slow = [seconds * own_s for own_s in ONE_SLOW]
    run = Run(tmp_path, mode="advise")
    for first, sample_s in ((0, slow), (150, usual), (300, slow[::-1]), (450, usual)):
        run.steps(first, first + 150, *sample_s)
    assert not run.folder.directives.exists()
    run.steps(600, 850, *slow)
    (advice,) = run.written
    assert advice["step"] - 600 == pytest.approx(ski_rental.ADVICE_S / advice["before_s"], abs=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "off"},
        {"may_change": ()},
        {"layout": Layout(tp=RANKS), "may_change": ("shares", "layers", "nodes")},
        {"layout": Layout(), "group_size": 1},
    ],
)
def test_nothing_is_measured_where_nothing_would_be_done(tmp_path: Path, changes: dict[str, Any]) -> None:
    """There is one rank alone, nobody asked, or nothing may be changed that could be."""
    RunDir(tmp_path).directives.write_text("{}\n")
    run = Run(tmp_path, **changes)
    ranks = run.plan.layout.data_parallel_size
    for step in range(20):
        run.step(step, ONE_SLOW[-ranks:])
        assert run.reported is None
    assert run.written == [{}]


def test_a_rank_reports_its_speed_and_its_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(0)
    assert run.reported == SpeedFigures(0.0, 0.0, 0.0, math.inf, 0.0, 0.0, 0.0, 0)
    run.steps(1, 12)
    assert run.reported == (
        0.0,
        1.0,
        0.0,
        5.5,
        8.0,
        0.5,
        0.0,
        0,
        1,
        0.0,
    )  # its first batch took 6 s to read, the others half a second


def test_what_a_rank_waited_is_reported_for_each_micro_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, layout=Layout(dp_shard=RANKS, zero_stage=3), largest=8)
    run.step(0)
    division = Division((1.0,) * RANKS, 4)
    parts_s = {"data_wait": 0.0, "forward": 1.0, "backward": 2.0, "exposed_comm": 3.0}
    run.scheduler.note_step(2, division.of_rank(0, 0, SAMPLES), parts_s, SAMPLES, [])
    reported = run.scheduler.report(2)
    assert reported is not None and (reported.last_s, reported.waited_s, reported.proposal) == (3.0, 1.5, 0.0)


@pytest.mark.parametrize(
    ("zero_stage", "waited_s", "counts"),
    [
        (1, (99.0,) * 4, UNEVEN),
        (3, (7.0,) * 4, EVEN),
        (3, (99.0, 99.0, 7.0, 99.0), EVEN),
        (3, (9.0, 9.0, 1.0, 9.0), UNEVEN),
    ],
)
def test_exchanges_of_each_micro_batch_count_where_parameters_are_sharded(
    tmp_path: Path, zero_stage: Any, waited_s: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    """What the rank waits that the others wait for. Memory holds no more than 8 samples: shares of 9 take two
    micro-batches."""
    run = Run(tmp_path, layout=Layout(dp_shard=RANKS, zero_stage=zero_stage), largest=8)
    for step in range(12):
        found = run.step(step, ONE_SLOW, waited_s=waited_s)
    assert found == counts
    assert all(line["micro_batches"] == 2 for line in run.written if line["type"] == "directive")


@pytest.mark.parametrize(("sample_s", "every"), [(1e-4, 3), (2.0, 1)])
def test_figures_of_very_many_ranks_are_exchanged_every_few_short_steps(
    tmp_path: Path, sample_s: float, every: int
) -> None:
    run = Run(tmp_path, group_size=1024)
    reporting, slow = [], [sample_s * factor for factor in ONE_SLOW]
    for step in range(12):
        run.step(step, slow)
        if run.reported:
            reporting.append(step)
    assert reporting == list(range(0, 12, every))
    assert [line["step"] for line in run.written if line["type"] == "directive"] == [1]


def test_a_change_that_was_seen_to_cost_little_is_made_sooner(tmp_path: Path) -> None:
    """12% are lost in each step: two of them are a tenth of one and more, nine are all of it."""
    first = []
    for number, change_s in enumerate((math.inf, 1.5, 0.0)):
        run = Run(tmp_path / str(number), largest=64, micro_batch_size=8)
        shares = [run.step(step, (1.0, 1.0, 1.3, 1.0), change_s=change_s) for step in range(20)]
        first.append(next(step for step, counts in enumerate(shares) if counts != EVEN))
    assert first[0] > first[1] > first[2] >= 1


@pytest.mark.parametrize("unknown", [0.0, float("nan"), float("inf")])
def test_a_speed_that_is_no_number_decides_nothing(tmp_path: Path, unknown: float) -> None:
    run = Run(tmp_path)
    for step in range(12):
        assert run.step(step, ONE_SLOW, speeds=(1.0, unknown, 1.8, 1.0)) == EVEN
    assert run.written == []


def test_images_keep_the_number_of_their_micro_batches(tmp_path: Path) -> None:
    run = Run(tmp_path, unit="samples", largest=8)
    assert set(run.steps(0, 12, *ONE_SLOW)) == {EVEN}


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(written, "dist", SimpleNamespace(get_rank=lambda: 1))
    assert run.steps(0, 10, *ONE_SLOW)[-1] == UNEVEN
    assert (run.written, run.journal.events) == ([], [])
    run.directives.close()


# A run that is resumed


@pytest.mark.clause("SCHED-3")
def test_a_resumed_run_follows_what_was_decided_at_the_same_steps(tmp_path: Path, write: Any) -> None:
    path = write(directive(1, 3), directive(2, 6, EVEN))
    before = path.read_bytes()
    run = Run(tmp_path)
    assert run.steps(1, 8, *ONE_SLOW) == [EVEN, EVEN, UNEVEN, UNEVEN, UNEVEN, EVEN, EVEN]
    assert path.read_bytes() == before


def test_a_run_that_starts_after_several_directives_follows_the_last(tmp_path: Path, write: Any) -> None:
    write(directive(1, 3, (10, 10, 2, 10)), directive(2, 6), directive(3, 20, EVEN))
    assert Run(tmp_path).step(8) == UNEVEN
    assert Run(tmp_path).step(2) == EVEN


@pytest.mark.clause("SCHED-3")
def test_new_decisions_come_after_those_that_are_followed(tmp_path: Path, write: Any) -> None:
    write(directive(1, 6))
    run = Run(tmp_path)
    found = run.steps(0, 20)
    assert found[:8] == [EVEN] * 6 + [UNEVEN] * 2
    assert found[-1] == EVEN
    assert [(line["number"], tuple(line["counts"])) for line in run.written if line["type"] == "directive"] == [
        (1, UNEVEN),
        (2, EVEN),
    ]


def test_directives_of_another_layout_are_not_followed_and_hold_nothing_up(tmp_path: Path, write: Any) -> None:
    write(directive(1, 0, (20, 12)), directive(2, 50, (12, 20)))
    run = Run(tmp_path)
    found = run.steps(0, 10, *ONE_SLOW)
    assert (found[0], found[-1]) == (EVEN, UNEVEN)
    assert [line["number"] for line in run.written if line["type"] == "directive"] == [1, 2, 3]


def test_a_run_that_now_only_advises_divides_evenly(tmp_path: Path, write: Any) -> None:
    write(directive(1, 3), directive(2, 50))
    run = Run(tmp_path, mode="advise")
    assert set(run.steps(0, 12, *ONE_SLOW)) == {EVEN}
    assert [(line["number"], line["applied"]) for line in run.written] == [(1, True), (2, True), (3, False)]


def test_advice_that_was_given_is_not_repeated(tmp_path: Path, write: Any) -> None:
    write(directive(1, 3, applied=False))
    run = Run(tmp_path, mode="advise")
    assert set(run.steps(5, 30, *ONE_SLOW)) == {EVEN}
    assert len(run.written) == 1
    assert Run(tmp_path).step(5) == EVEN, "nothing was applied"


def test_a_replica_group_names_itself_and_follows_nothing(tmp_path: Path, write: Any) -> None:
    write(directive(1, 0), directive(1, 0, group=1))
    run = Run(tmp_path, group=1)
    assert run.step(0) == EVEN
    run.steps(1, 20, *ONE_SLOW)
    assert [(line["group"], line["number"], line["type"]) for line in run.written[2:]] == [
        (1, 1, "directive"),
        (1, 1, "achieved"),
    ]


def test_a_run_without_replica_groups_follows_none_of_theirs(tmp_path: Path, write: Any) -> None:
    write(directive(1, 0, group=1), directive(1, 5, group=0), directive(1, 3))
    assert Run(tmp_path).steps(0, 7) == [EVEN] * 3 + [UNEVEN] * 4


def test_half_a_line_at_the_end_was_never_in_force(tmp_path: Path, write: Any) -> None:
    path = write(directive(1, 3))
    with path.open("ab") as file:
        file.write(b'{"type": "directive", "time": 1.0, "rank": 0, "st')
    run = Run(tmp_path)
    run.steps(4, 30)
    assert [line["number"] for line in run.written if line["type"] == "directive"] == [1, 2]


@pytest.mark.clause("SCHED-2")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"counts": "many"}, "`counts` is "),
        ({"kind": "stages"}, "of the kind `stages`"),
        ({"number": 3}, "directive 3 where 2 "),
        ({"counts": [0, 0, 0, 0]}, "division (number 2)"),
        ({"micro_batch_size": 0}, "division (number 2)"),
        ({"micro_batches": 0}, "division (number 2)"),
    ],
)
def test_directives_that_cannot_be_followed_are_refused(
    tmp_path: Path, write: Any, change: dict[str, Any], says: str
) -> None:
    path = write(directive(1, 3), directive(2, 5))
    first, second = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps({**json.loads(second), **change}), ""]))
    with pytest.raises(MachineError) as error:
        Run(tmp_path)
    (problem,) = error.value.problems
    assert says in problem.message
    assert str(path) in problem.message
    assert problem.hint
    assert error.value.exit_code == 4


def test_what_a_later_version_adds_is_passed_over(write: Any) -> None:
    path = write(directive(1, 3), directive(2, 5))
    path.write_text(path.read_text() + '{"type": "forecast", "time": 1.0}\n')
    assert [one.number for one in read_directives(path)] == [1, 2]


def test_what_replica_groups_decided_is_not_followed(write: Any) -> None:
    """Their numbers are their own."""
    groups = directive(30, 30, kind="group_shares"), directive(1, 31, group=1)
    path = write(*groups)
    assert read_directives(path) == []
    write(directive(1, 33), groups[0], directive(2, 35))
    assert [one.step for one in read_directives(path)] == [33, 35]


def test_a_run_without_directives_has_none(tmp_path: Path) -> None:
    assert read_directives(RunDir(tmp_path).directives) == []


# Small parts


def test_a_directive_is_followed_within_what_memory_and_schedule_need_now() -> None:
    even = even_division(Layout(dp_shard=RANKS), 8, keeps_micro_batches=False)
    given = directive(micro_batch_size=12, micro_batches=3)
    assert division_of(even, given, 16) == Division((9.0, 9.0, 5.0, 9.0), 12, turns=1, micro_batches=3, in_step=True)
    assert division_of(even, given, 4).micro_batch_size == 4
    interleaved = Division((1.0,) * RANKS, 8, turns=2)
    assert division_of(interleaved, given, 16).micro_batches == 4


def test_even_shares_that_are_gone_back_to_are_even_in_any_batch() -> None:
    """10 samples of 4 ranks are 3, 3, 2 and 2; 20 are not twice that."""
    even = even_division(Layout(dp_replicate=RANKS), 8, keeps_micro_batches=False)
    given = directive(counts=even.counts(10), micro_batch_size=8, micro_batches=even.count_micro_batches(10))
    assert division_of(even, given, 16) == even
    assert division_of(even, directive(counts=even.counts(10), micro_batch_size=8, micro_batches=2), 16) != even


@pytest.mark.parametrize(
    ("known", "most", "largest"), [(13, "auto", 13), (None, "auto", 8), (None, 12, 12), (None, 5, 8), (10, 12, 10)]
)
def test_the_largest_micro_batch(tmp_path: Path, known: int | None, most: Any, largest: int) -> None:
    assert largest_micro_batch(Run(tmp_path, mode="off", largest=known, most=most).plan) == largest


def test_a_data_parallel_rank_is_as_slow_as_its_slowest_process() -> None:
    speeds = [read_speed(0.0, 2.0), read_speed(8.0, 1.0)]
    assert slowest(speeds, 10) == Speed(0.0, 2.0)
    assert slowest(speeds, 6) == Speed(8.0, 1.0)
    assert slowest([*speeds, read_speed(0.0, 0.0)], 6) is None
    noisy = read_speed(1.0, 2.0, 0.5)
    assert noisy is not None and (noisy, noisy.noise) == (Speed(1.0, 2.0), 0.5)
    assert read_speed(0.0, float("inf")) is read_speed(0.0, float("nan")) is None


def test_the_processes_of_each_data_parallel_rank_by_stage() -> None:
    """2 stages x 1 replica x 3 shards x 1 x 2 tensor ranks, numbered in the mesh's order."""
    mesh = torch.arange(12).view(2, 1, 3, 1, 2)
    state: Any = SimpleNamespace(mesh=SimpleNamespace(axes=SimpleNamespace(mesh=mesh)))
    assert ranks_of_pipelines(state) == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    replicated: Any = SimpleNamespace(mesh=SimpleNamespace(axes=SimpleNamespace(mesh=mesh.view(1, 3, 2, 1, 2))))
    assert ranks_of_pipelines(replicated) == [[[first, first + 1]] for first in range(0, 12, 2)]


def test_layers_move_where_a_stage_is_slow_in_every_pipeline(tmp_path: Path) -> None:
    """Ranks 2 and 3 hold the second stage of two pipelines. Shares win nothing, so no directive of theirs is given."""
    layout = Layout(pp=2, dp_shard=2, zero_stage=1)
    run = Run(tmp_path, layout=layout, layer_flops=(1.0,) * 6, largest_stage_layers=5)
    run.steps(0, 8)
    assert run.scheduler.decided_layers is None
    run.steps(8, 16, 1.0, 1.0, 2.0, 2.0)
    change = run.scheduler.decided_layers
    assert change is not None
    assert change.stage_layers == (4, 2)
    assert change.before_s == pytest.approx(16 * 2.0)
    assert change.after_s == pytest.approx(16 * 4 / 3)
    assert run.written == []


@pytest.mark.clause("SCHED-7")
@pytest.mark.parametrize("changes", [{"largest_stage_layers": None}, {"largest_stage_layers": 3}])
def test_no_layers_move_where_memory_is_not_known_or_full(tmp_path: Path, changes: dict[str, Any]) -> None:
    layout = Layout(pp=2, dp_shard=2, zero_stage=1)
    run = Run(tmp_path, layout=layout, layer_flops=(1.0,) * 6, **changes)
    run.steps(0, 16, 1.0, 1.0, 2.0, 2.0)
    assert run.scheduler.decided_layers is None


def test_one_pipeline_alone_reports_its_speeds_where_layers_may_move(tmp_path: Path) -> None:
    run = Run(tmp_path, layout=Layout(pp=4), layer_flops=(1.0,) * 8, largest_stage_layers=4)
    run.steps(0, 12, 1.0, 1.0, 2.0, 1.0)
    assert run.reported is not None and run.reported.per_sample_s > 0
    assert run.scheduler.decided_layers is not None


def test_the_supervisor_is_told_of_speeds_when_they_or_the_shares_change(tmp_path: Path) -> None:
    """And not otherwise: nothing is reported in the steps between."""
    run = Run(tmp_path)
    for step in range(40):
        run.step(step, USUAL if step < 20 else ONE_SLOW)
    told = run.supervisor.sent
    assert [report.samples for report in told] == [EVEN, EVEN, UNEVEN]
    assert [report.per_sample_s for report in told] == [pytest.approx(s) for s in (USUAL, ONE_SLOW, ONE_SLOW)]
    assert {(report.layout, report.micro_batches) for report in told} == {(run.plan.layout, 1)}
    assert told[0].step == 1
    assert told[1].step == 21
    assert told[1].compute_s == pytest.approx((8.0, 8.0, 14.4, 8.0))
    assert told[1].step_s == pytest.approx(14.4)


@pytest.mark.parametrize(("is_settled", "reports"), [(0.0, 0), (1.0, 1)])
def test_the_supervisor_gets_settled_speeds_however_noisy_they_are(
    tmp_path: Path, is_settled: float, reports: int
) -> None:
    run = Run(tmp_path, may_change=("nodes",), num_nodes=2)
    division = run.scheduler.divide(0)
    others = [SpeedFigures(0.0, 1.0, 0.5, 0.0, 8.0, 0.5, 0.0, 0.0, is_settled)] * RANKS
    parts_s = {"data_wait": 0.0, "forward": 2.0, "backward": 6.0, "exposed_comm": 0.5}
    run.scheduler.note_step(1, division.of_rank(0, 0, SAMPLES), parts_s, SAMPLES, others)
    assert len(run.supervisor.sent) == reports


def test_the_supervisor_is_told_of_links_with_the_speeds(tmp_path: Path) -> None:
    run = Run(tmp_path)
    link = MeasuredLink(axis="dp_shard", ranks=(0, 1, 2, 3), bytes_per_s=1e9, noise=0.1, sent_bytes=4e6)
    for step in range(20):
        if step == 10:
            run.link.links = (link,)
        run.step(step, USUAL)
    assert [(report.step, report.links) for report in run.supervisor.sent] == [(1, ()), (11, (link,))]


def test_ranks_of_one_pipeline_have_the_same_samples(tmp_path: Path) -> None:
    run = Run(tmp_path, layout=Layout(pp=2, dp_shard=2, zero_stage=1), may_change=("layout",))
    run.steps(0, 2, 1.0, 1.0, 2.0, 2.0)
    report = run.supervisor.sent[-1]
    assert report.samples == (16, 16, 16, 16)
    assert report.per_sample_s == (1.0, 1.0, 2.0, 2.0)
    assert run.written == []


def test_only_the_parts_that_may_be_changed_are(tmp_path: Path) -> None:
    run = Run(tmp_path, may_change=("layers", "layout"))
    assert set(run.steps(0, 30, *ONE_SLOW)) == {EVEN}
    assert run.written == []
    layout = Layout(pp=2, dp_shard=2, zero_stage=1)
    run = Run(tmp_path, layout=layout, layer_flops=(1.0,) * 6, largest_stage_layers=5, may_change=("shares",))
    run.steps(0, 30, 1.0, 1.0, 2.0, 2.0)
    assert run.scheduler.decided_layers is None


def test_replica_groups_tell_the_supervisor_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, group=0)
    run.steps(0, 10, *ONE_SLOW)
    assert run.supervisor.sent == []


def proposal(number: int) -> Proposal:
    wanted = LayoutProposal(Layout(tp=RANKS), 8, 1, 8, None, 2.0, 1.5, "rank 2 is slow")
    return Proposal(number, Layout(dp_shard=RANKS, zero_stage=1), wanted)


def test_a_proposal_is_known_in_the_step_after_it_and_taken_up_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(0, 3)
    assert not run.scheduler.is_proposed
    run.supervisor.deliver(proposal(1))
    run.step(3)
    assert run.reported is not None and run.reported.proposal == 1.0
    assert run.scheduler.is_proposed
    assert run.link.receive() == proposal(1)
    run.steps(4, 6)
    assert not run.scheduler.is_proposed
    run.supervisor.deliver(proposal(2))
    run.step(6)
    assert run.scheduler.is_proposed
    assert run.link.receive() == proposal(2)


def test_a_run_that_follows_an_earlier_start_takes_up_no_proposal_before_the_last_of_its_directives(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write(directive(step=6))
    run = Run(tmp_path)
    run.supervisor.deliver(proposal(1))
    run.steps(0, 6)
    assert not run.scheduler.is_proposed
    run.step(6)
    assert run.scheduler.is_proposed


def test_what_another_layout_has_come_to_is_the_step_itself_once_shares_have_followed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.scheduler.watch(directive(kind="layout", step=0, before_s=20.0, expected_s=12.0))
    run.steps(0, 40, *ONE_SLOW)
    of_shares, of_layout = (line for line in run.written if line["type"] == "achieved")
    assert (of_shares["step"], of_shares["before_s"]) == (9, pytest.approx(14.4))
    assert (of_layout["step"], of_layout["before_s"]) == (17, 20.0)
    assert of_layout["achieved_s"] == pytest.approx(
        9.0 + 0.5 + 0.5
    )  # the rank's batch, and what it waits, belong to it


def test_what_another_layout_has_come_to_is_not_measured_before_its_speeds_are_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.scheduler.watch(directive(kind="layout", step=0, before_s=20.0, expected_s=12.0))
    for step in range(30):
        run.step(step, speeds=(0.0, 0.0, 0.0, 0.0) if step < 10 else USUAL)
    (achieved,) = run.written
    assert (achieved["type"], achieved["step"]) == ("achieved", 10 + 17)
