"""How what the nodes report of a start becomes events, and why a replica group failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.events import DIRECTIVE, retried, started, stepped, write_event

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage
from trainspec_cli.run.backend.observe import GroupStart, RendezvousWatch, newest_checkpoint
from trainspec_cli.run.channel.messages import GroupExited, WorkerExited, WorkersOrphaned
from trainspec_cli.run.failure import explain
from trainspec_cli.run.folder.event_types.events import MemoryEvent
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import (
    Begun,
    GroupEnded,
    Orphaned,
    RendezvousRestarted,
    Retried,
    Stepped,
    WorkerFailed,
)

OWN_ERROR = {"type": "ValueError", "message": "boo", "traceback": "..."}
LOST_PEER = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1", "traceback": "..."}
FORESEEN = {"type": "RecipeError", "message": "no such model", "traceback": "...", "code": "wrong"}
HANG = {"type": "WorkerError", "message": "step 3 hangs", "traceback": "...", "code": "hang"}


@pytest.fixture
def job(make_job) -> Job:
    return make_job("endless")


@pytest.fixture
def two_groups(make_plan) -> Plan:
    """A plan of groups of two ranks each, on two nodes each."""
    return replace(make_plan(), num_nodes=4, devices_per_node=1, replica_groups=2)


def write_error(job: Job, rank: int, error: dict[str, object]) -> None:
    write_json(job.run.error(rank), {"rank": rank, "host": "here", **error})


def end_of(start: GroupStart) -> GroupEnded:
    (ended,) = (event for event in start.poll() if isinstance(event, GroupEnded))
    return ended


def exited(start: GroupStart, *codes: int | None, first: int = 0) -> GroupEnded:
    for node, code in enumerate(codes, first):
        assert not start.has_ended
        assert start.hear(node, "here", GroupExited(start.group, start.number, code, (40 + node,))) == []
    return end_of(start)


def test_what_was_seen_of_a_killed_worker_goes_before_what_its_peer_tells(job: Job, two_groups: Plan) -> None:
    """The supervisor sees the exit code before torchrun does; the other rank reports a lost connection alone."""
    write_error(job, 0, LOST_PEER)
    start = GroupStart(job, two_groups, 0, 1)
    assert start.hear(0, "here", WorkerExited(0, 1, 1, "was killed")) == [WorkerFailed(0)]
    explained = explain(start.failures())
    assert explained.headline == "rank 1 (here) was killed"
    assert explained.detail.startswith("rank 0 ") and "rank 1" in explained.detail


def test_events_of_a_run_of_one_group_are_those_of_its_first_rank_since_the_start(job: Job) -> None:
    write_event(job.run.events(0), stepped())
    start = GroupStart(job, None, 0, 1)
    assert list(start.poll()) == []
    for event, events in ((started(), [Begun(0)]), (stepped(), [Stepped(0)]), (retried(), [Retried(0)])):
        write_event(job.run.events(0), event)
        assert list(start.poll()) == events
    assert list(start.poll()) == []


def test_a_group_of_several_has_events_of_its_own(job: Job, two_groups: Plan) -> None:
    start = GroupStart(job, two_groups, 1, 2)
    assert start.job.logs == job.logs / "group00001_start002"
    assert list(start.job.ranks or ()) == [2, 3]
    write_event(job.run.events(0), stepped())
    assert list(start.poll()) == []
    write_event(job.run.group_events(1, 0), stepped())
    assert list(start.poll()) == [Begun(1), Stepped(1)]


def test_an_error_report_is_a_failure_of_a_run_of_one_group_while_its_processes_live(job: Job) -> None:
    start = GroupStart(job, None, 0, 1)
    write_error(job, 1, OWN_ERROR)
    assert list(start.poll()) == [WorkerFailed(0)]
    assert list(start.poll()) == [], "once"
    assert start.hear(0, "here", WorkerExited(0, 1, 0, "ended")) == []


def test_orphans_are_reported(job: Job) -> None:
    assert GroupStart(job, None, 0, 1).hear(0, "here", WorkersOrphaned(0, 1)) == [Orphaned(0)]


@pytest.mark.parametrize(
    ("errors", "code", "found"),
    [
        ({}, -9, (False, False, True)),
        ({}, 1, (False, False, False)),
        ({}, 0, (False, False, False)),
        ({}, None, (False, False, False)),
        ({0: OWN_ERROR}, 1, (True, False, False)),
        ({0: OWN_ERROR}, -9, (True, False, False)),
        ({0: LOST_PEER}, -9, (False, False, True)),
        ({0: LOST_PEER}, 1, (False, False, False)),
        ({0: FORESEEN}, 1, (True, True, False)),
        ({0: HANG}, 1, (True, False, False)),
    ],
)
def test_where_a_failure_came_from(job: Job, errors: dict, code: int | None, found: tuple[bool, bool, bool]) -> None:
    for rank, error in errors.items():
        write_error(job, rank, error)
    job.torchrun_log.parent.mkdir(parents=True)
    job.torchrun_log.touch()
    ended = exited(GroupStart(job, None, 0, 1), code)
    assert (ended.own_error, ended.foreseen, ended.from_outside) == found
    assert (ended.exit_code, ended.left_behind, ended.done) == (code, (40,), False)


EIGHT, FOUR, TWO = (MemorySetting(size, "none", "none") for size in (8, 4, 2))
SHORT: dict[str, object] = {
    "type": "OutOfMemory",
    "message": "memory ran out",
    "traceback": "...",
    "code": "out_of_memory",
    "shortage": {
        "failed": {"micro_batch_size": 3, "recompute": "none", "offload": "none"},
        "layout": "tp=2",
        "used_bytes": 7,
    },
}


def alone(two_groups: Plan) -> Plan:
    return replace(two_groups, num_nodes=1, replica_groups=1, micro_batch_size=4, recompute="none", offload="none")


def end_with_kills(job: Job, plan: Plan, code: int, kills: int, steps: tuple[int, ...] = ()) -> GroupEnded:
    job.torchrun_log.parent.mkdir(parents=True, exist_ok=True)
    job.torchrun_log.touch()
    start = GroupStart(job, plan, 0, 1)
    for step in steps:
        write_event(job.run.events(0), stepped(step))
    start.hear(0, "here", GroupExited(0, 1, code, oom_kills=kills, memory_bytes=99))
    return end_of(start)


def test_a_rank_that_ran_out_of_memory_says_with_what(job: Job, two_groups: Plan) -> None:
    write_error(job, 1, SHORT)
    write_error(job, 0, LOST_PEER)
    ended = end_with_kills(job, alone(two_groups), 1, 0)
    assert ended.shortage == Shortage(MemorySetting(3, "none", "none"), "tp=2", used_bytes=7)


def test_a_worker_that_the_kernel_killed_is_known_by_its_count(job: Job, two_groups: Plan) -> None:
    plan = alone(two_groups)
    ended = end_with_kills(job, plan, -9, 1)
    assert ended.shortage == Shortage(FOUR, plan.layout.describe(), limit_bytes=99, was_killed=True)
    assert "killed by the kernel" in ended.headline
    taken = MemoryEvent(step=1, layout="one process", failed=FOUR, taken=TWO, restarts=True, reason="x")
    write_event(job.run.directives, replace(taken, layout=plan.layout.describe()))
    shortage = end_with_kills(job, plan, -9, 1).shortage
    assert shortage is not None and shortage.failed == TWO, "what was taken before is in force"


@pytest.mark.parametrize("steps", [(10,), (9, 10), (9, 9)], ids=["checkpoint", "both", "neither"])
def test_a_killed_worker_was_in_the_layout_that_the_run_had_changed_to(
    job: Job, two_groups: Plan, steps: tuple[int, ...]
) -> None:
    """After as many steps as the checkpoint or this start has; a newer directive is still ahead."""
    plan = alone(two_groups)
    other = replace(plan.layout, dp_shard=1, dp_replicate=1, tp=plan.layout.world_size)
    changed = replace(DIRECTIVE, kind="layout", step=10, micro_batch_size=8, before=plan.layout, layout=other)
    unlike = MemoryEvent(step=12, layout=other.describe(), failed=EIGHT, taken=TWO, restarts=True, reason="x")
    for event in (changed, replace(changed, applied=False, before=other, layout=plan.layout), unlike):
        write_event(job.run.directives, event)
    job.run.checkpoint(steps[0]).mkdir(parents=True)
    shortage = end_with_kills(job, plan, -9, 1, steps[1:]).shortage
    assert shortage is not None
    is_changed = max(steps) >= 10
    assert shortage.layout == (other if is_changed else plan.layout).describe()
    assert shortage.failed == (TWO if is_changed else FOUR)


LISTED = "host      : here\nrank      : 1 (local_rank: 1)\nexitcode  : {} (pid: 41)\n"


@pytest.mark.parametrize(("code", "is_shortage"), [(-9, True), (-11, False), (3, False), (-2, False)])
def test_of_workers_that_torchrun_lists_a_killed_one_alone_ran_out_of_memory(
    job: Job, two_groups: Plan, code: int, is_shortage: bool
) -> None:
    """Another program of the control group may have been killed meanwhile."""
    job.torchrun_log.parent.mkdir(parents=True)
    job.torchrun_log.write_text(LISTED.format(code))
    ended = end_with_kills(job, alone(two_groups), 1, 1)
    assert (ended.shortage is not None) is is_shortage
    assert (ended.headline.startswith("rank 1 (here)") and "killed by the kernel" in ended.headline) is is_shortage


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_worker_of_a_group_that_was_seen_to_be_killed(job: Job, two_groups: Plan, was_killed: bool) -> None:
    start = GroupStart(job, two_groups, 0, 1)
    start.hear(0, "here", WorkerExited(0, 1, 1, "ended somehow", was_killed))
    start.hear(0, "here", GroupExited(0, 1, None, oom_kills=1))
    assert (end_of(start).shortage is not None) is was_killed


@pytest.mark.parametrize(("errors", "code", "kills"), [({}, -9, 0), ({0: OWN_ERROR}, -9, 1), ({}, 1, 1)])
def test_other_ends_are_no_shortage(job: Job, two_groups: Plan, errors: dict, code: int, kills: int) -> None:
    """A kill that nobody counted; an error of its own; a count that may be another program's."""
    for rank, error in errors.items():
        write_error(job, rank, error)
    assert end_with_kills(job, alone(two_groups), code, kills).shortage is None


@pytest.mark.parametrize(("status", "done"), [("done", True), ("stopped", False)])
def test_a_run_of_one_group_is_done_when_its_result_says_so(job: Job, status: str, done: bool) -> None:
    write_json(job.run.result_json, {"status": status})
    assert exited(GroupStart(job, None, 0, 1), 1).done is done


def test_a_group_of_several_is_done_when_all_of_its_nodes_have_ended_with_0(job: Job, two_groups: Plan) -> None:
    write_json(job.run.result_json, {"status": "done"})
    for codes, done, code in (((0, 0), True, 0), ((0, 3), False, 3), ((None, -9), False, -9), ((None, 0), False, None)):
        ended = exited(GroupStart(job, two_groups, 1, 1, (2, 3)), *codes, first=2)
        assert (ended.done, ended.exit_code, ended.left_behind) == (done, code, (42, 43))


def test_a_lost_node_is_where_a_failure_of_its_group_began(job: Job, two_groups: Plan) -> None:
    write_error(job, 3, OWN_ERROR)
    start = GroupStart(job, two_groups, 1, 1, (2, 3))
    start.lose(3, 3, "far", "is off")
    assert not start.has_ended
    ended = exited(start, None, first=2)
    assert (ended.headline, ended.done, ended.foreseen) == ("node 3 (far) is off", False, False)


def test_a_lost_node_is_named_by_its_number_in_the_job(job: Job, two_groups: Plan) -> None:
    start = GroupStart(job, replace(two_groups, num_nodes=2, replica_groups=1), 0, 1, (0, 1))
    start.hear(0, "here", GroupExited(0, 1, 1))
    start.lose(1, 4, "far", "is off")
    assert end_of(start).headline == "node 4 (far) is off"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_run_of_one_group_ends_with_its_lost_node(job: Job, two_groups: Plan, is_recorded: bool) -> None:
    """Its end may be seen before the loss is written down; the others' errors are what followed from it."""
    write_error(job, 0, LOST_PEER)
    if is_recorded:
        write_json(job.run.node_error(1), {"node": 1, "host": "far", "time": 1.0, "lost": True, "message": "is off"})
    start = GroupStart(job, replace(two_groups, num_nodes=2, replica_groups=1), 0, 1, (0, 1))
    start.hear(0, "here", GroupExited(0, 1, 1))
    start.lose(1, 1, "far", "is off")
    ended = end_of(start)
    assert (ended.foreseen, ended.own_error, ended.exit_code) == (True, False, 1)
    assert ended.headline == "node 1 (far) is off"
    assert [failure.who for failure in start.failures()] == ["node 1", "rank 0"]


def test_a_group_that_was_killed_for_being_stuck_has_no_failure(job: Job, two_groups: Plan) -> None:
    ended = exited(GroupStart(job, two_groups, 1, 1), None)
    assert "is alive" in ended.headline


def test_errors_of_other_groups_are_not_those_of_a_group(job: Job, two_groups: Plan) -> None:
    write_error(job, 0, OWN_ERROR)
    assert not exited(GroupStart(job, two_groups, 1, 1), 1).own_error


def test_the_newest_checkpoint(job: Job) -> None:
    assert newest_checkpoint(job.run) == 0
    for step in (12, 7):
        job.run.checkpoint(step).mkdir(parents=True)
    assert exited(GroupStart(job, None, 0, 1), 0).checkpoint_step == newest_checkpoint(job.run) == 12


class FakeRendezvous:
    killed = 0

    def kill(self) -> None:
        self.killed += 1

    def keep_alive(self) -> bool:
        return self.killed == 2


def test_the_rendezvous_server_is_killed_at_the_steps_of_its_faults(job: Job, two_groups: Plan) -> None:
    spec = replace(two_groups.spec, fault="lighthouse(step=9); kill(step=1); lighthouse(step=5)")
    server = FakeRendezvous()
    watch = RendezvousWatch(server, job.run, replace(two_groups, spec=spec))  # type: ignore[arg-type]
    for step, killed in ((4, 0), (5, 1), (6, 1), (9, 2)):
        write_event(job.run.events(0), stepped(step))
        assert watch.poll() == ([RendezvousRestarted()] if killed == 2 else [])
        assert server.killed == killed
