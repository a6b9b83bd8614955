"""Which verdicts ask for a deeper look, and what one adds to its verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab.recorded import Recorded

from trainspec_cli.recipe.results.verdict import CodeLine, Look, LookOrder, OperationTime, RunVerdict
from trainspec_cli.reporter.diagnosis.looks import MOST_LOOKS, next_look, with_look

NODES = (0, 0, 1, 1)
SPIN = RunVerdict(cause="host_bound", rank=3)


@pytest.mark.parametrize(
    ("verdict", "looker"),
    [
        (SPIN, 3),
        (RunVerdict(cause="slow_node", node=1), 2),
        (RunVerdict(cause="narrow_link", link=(1, 2)), 1),
        (RunVerdict(cause="recompilation"), 0),
    ],
)
def test_the_suspected_rank_looks(verdict, looker):
    order = next_look(verdict, NODES, ())
    assert order is not None and (order.looker, order.number, order.place) == (looker, 1, verdict.place)


@pytest.mark.parametrize("cause", ["noise", "as_planned", "memory_leak", "memory_pressure", "checkpoint_writing"])
def test_causes_of_which_a_look_says_nothing_ask_for_none(cause):
    assert next_look(RunVerdict(cause=cause, rank=0), NODES, ()) is None


def test_a_place_is_looked_at_once_and_a_run_so_often_at_most():
    known: list[LookOrder] = []
    for rank in range(2 * MOST_LOOKS):
        for _ in range(2):
            order = next_look(RunVerdict(cause="slow_device", rank=rank), (0,) * 99, known)
            known += [order] if order else []
    assert [one.rank for one in known] == list(range(MOST_LOOKS))
    assert [one.number for one in known] == list(range(1, MOST_LOOKS + 1))


def look(share: float, **changes) -> Look:
    order = LookOrder(number=1, looker=3, cause="host_bound", rank=3)
    lines = (CodeLine(file="a/b.py", line=7, function="f", text="spin()", share=share),)
    operations = (OperationTime(name="aten::mm", self_s=0.005, calls=2.0),)
    about = {"order": order, "first_step": 41, "last_step": 43, "operations": operations, "lines": lines}
    return Look(**{**about, "file": "looks/0001.json", **changes})


def test_a_line_at_which_much_time_passes_is_the_place_and_operations_where_there_is_none(recorded: Recorded):
    found = with_look(SPIN, [look(0.6)])
    assert found.code == "a/b.py:7 (f)"
    spread = with_look(SPIN, [look(0.1)])
    assert spread.code is None
    recorded(*found.evidence, *spread.evidence)


def test_a_look_is_of_its_own_verdict_alone_and_says_what_could_not_be_done():
    assert with_look(replace(SPIN, rank=2), [look(0.6)]).code is None
    noted = with_look(SPIN, [look(0.6, file=None, notes=("not permitted",))])
    assert noted.evidence[1:] == ("not permitted",)


def test_a_rank_that_hangs_has_a_line_and_no_steps(recorded: Recorded):
    hung = replace(look(0.9), first_step=6, last_step=5, operations=())
    recorded(*with_look(SPIN, [hung]).evidence)
