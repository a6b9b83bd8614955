"""The newest collectives of all ranks are matched: who called another, who has not called it, and from which line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.recipe.results.verdict import Collective
from trainspec_cli.run.recovery.collectives import NEWEST, find_mismatch, find_missing, read_recorder, with_line
from trainspec_cli.run.recovery.watch import Whereabouts, find_late, innermost_line

DUMPS = Path(__file__).parent / "nccl_dumps.json"


def call(number: int, kind: str = "gloo:all_reduce", size: tuple[int, ...] = (8, 4), **changes: object) -> Collective:
    about = {"group": "0/world", "sizes": (size,), "dtypes": ("Float",), "line": f"train.py:{number}"}
    return Collective(number=number, kind=kind, **{**about, **changes})


def places(called: dict[int, list[Collective]], busy: tuple[int, ...] = ()) -> dict[int, Whereabouts]:
    return {
        rank: Whereabouts(rank not in busy, {one.group: one.number for one in calls}, calls, f"load.py:{rank} in load")
        for rank, calls in called.items()
    }


def recorded() -> dict[int, list[Collective]]:
    """What four ranks recorded on NCCL: rank 2 called a broadcast in the data-parallel group instead of an all-reduce,
    and rank 3, which is in another tensor-parallel group, has gone on."""
    dumps = json.loads(DUMPS.read_text())
    return {int(rank): read_recorder(dump, lambda file: "/torch/" in file) for rank, dump in dumps.items()}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (call(9, "gloo:broadcast"), [1]),
        (call(9, size=(9, 4)), [1]),
        (call(9, dtypes=("BFloat16",)), [1]),
        (call(9, size=(32,)), None),  # as many values in another shape
        (call(9, done=True), None),
    ],
)
def test_the_rank_that_called_another_collective_is_named(other, named):
    found = find_mismatch({0: [call(8, done=True), call(9)], 1: [call(8, done=True), other], 2: [call(9)]})
    assert (list(found.ranks) if found else None) == named
    if found:
        assert "train.py:9" in found.why and "number 9" in found.why
        assert find_late(places({0: [call(9)], 1: [other], 2: [call(9)]}), 3) == ([1], found.why)


def test_ranks_that_go_on_after_a_mismatch_are_still_compared():
    """An asynchronous backend lets the host call more of them; the first difference counts."""
    late = [call(9, "nccl:broadcast"), call(10, "nccl:all_reduce"), call(11)]
    found = find_mismatch({0: [call(9), call(10)], 1: late, 2: [call(9), call(10), call(11)]})
    assert found is not None and found.ranks == (1,) and "number 9" in found.why


def test_of_two_different_calls_neither_is_the_odd_one():
    found = find_mismatch({0: [call(9)], 1: [call(9, "gloo:broadcast")]})
    assert found is not None and found.ranks == ()
    assert find_late(places({0: [call(9)], 1: [call(9, "gloo:broadcast")]}), 2)[0] == []


@pytest.mark.parametrize("kind", ["gloo:gather", "nccl:_all_to_all_base", "nccl:all_to_all", "gloo:scatter"])
def test_calls_whose_sizes_may_differ_do_not_differ(kind):
    assert find_mismatch({0: [call(9, kind, (8,))], 1: [call(9, kind, (4,))]}) is None


def test_what_worked_is_no_mismatch():
    assert find_mismatch({0: [call(9, done=True)], 1: [call(9, "gloo:broadcast", done=True)]}) is None


@pytest.mark.parametrize(("busy", "why"), [((1,), "it is in no collective, but at load.py:1 in load"), ((), "fewer")])
def test_the_collective_that_a_rank_has_not_called_is_named(busy, why):
    called = {0: [call(9)], 1: [call(8, done=not busy)], 2: [call(9)]}
    late, words = find_late(places(called, busy), 3)
    assert late == [1]
    assert why in words and "has not called number 9 of group 0/world" in words and "train.py:9" in words


def test_a_silent_ranks_collective_is_unknown():
    assert find_missing({0: [call(9)]}, [1]) is None
    assert find_late(places({0: [call(9)]}), 2) == ([1], "it does not respond")


def test_only_the_newest_of_each_group_are_kept():
    entries = [entry(number, group) for number in range(1, 21) for group in ("tp", "dp")]
    found = read_recorder({"entries": entries})
    assert [one.number for one in found if one.group == "7/tp"] == list(range(21 - NEWEST, 21))
    assert len(found) == 2 * NEWEST


def entry(number: int, group: str) -> dict[str, object]:
    about = {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "state": "scheduled", "retired": number < 20}
    created = number * 10 + (group == "tp")
    return {
        "process_group": ["7", group],
        "collective_seq_id": number,
        "time_created_ns": created,
        "is_p2p": False,
    } | about


def test_a_dump_of_nccls_flight_recorder_names_the_call_and_its_line():
    called = recorded()
    found = find_mismatch(called)
    assert found is not None and found.ranks == (2,)
    assert "nccl:broadcast of 4096x1024 at train.py:88 in sync_norms" in found.why
    assert "ranks 0, 1, 3 called nccl:_reduce_scatter_base of 4096x1024 at train.py:141 in train_step" in found.why
    assert "number 57 of group 2/mesh_dp" in found.why


def test_a_dump_without_a_mismatch_names_the_rank_that_is_behind():
    called = recorded()
    called[2] = [one for one in called[2] if one.number < 57]
    late, why = find_late(places(called), 4)
    assert late == [2] and "number 57 of group 2/mesh_dp, nccl:_reduce_scatter_base" in why


def test_the_line_of_the_main_thread_belongs_to_the_only_unfinished_collective():
    assert [one.line for one in with_line([call(1, done=True, line=""), call(2, line="")], "a.py:5")] == ["", "a.py:5"]
    assert [one.line for one in with_line([call(1, line=""), call(2, line="")], "a.py:5")] == ["", ""]


def test_the_innermost_line_of_both_kinds_of_stacks():
    assert (
        innermost_line('  File "a.py", line 3, in outer\n    x()\n  File "b.py", line 7, in inner\n')
        == "b.py:7 in inner"
    )
    assert innermost_line('  File "b.py", line 7 in inner\n  File "a.py", line 3 in outer\n') == "b.py:7 in inner"
    assert innermost_line("") == ""
