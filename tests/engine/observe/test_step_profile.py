"""Torch's profiler over steps: whose time it is, and a trace of bounded size."""

from __future__ import annotations

import json

import torch

from trainspec_cli.engine.observe.deeper_look import (
    Operation,
    StepsInView,
    heaviest,
    is_within,
    own_times,
    trace_text,
)


def op(name: str, begin: int, end: int, thread: int = 1, *, on_device: bool = False) -> Operation:
    return Operation(name, begin, end, thread, on_device)


NESTED = [op("linear", 0, 100), op("t", 5, 15), op("mm", 20, 90), op("copy", 30, 40), op("sum", 100, 130)]


def test_the_time_of_an_operation_is_without_that_of_those_it_calls():
    assert {one.name: own for one, own in own_times(NESTED)} == {
        "linear": 100 - 10 - 70,
        "t": 10,
        "mm": 60,
        "copy": 10,
        "sum": 30,
    }


def test_operations_of_other_threads_are_no_calls():
    assert [own for _, own in own_times([op("a", 0, 10), op("b", 2, 8, thread=2)])] == [10, 6]


def test_the_heaviest_are_of_a_step_and_of_the_device_where_it_has_some():
    assert [(one.name, one.self_s, one.calls) for one in heaviest(NESTED, 2)][:2] == [
        ("mm", 30e-9, 0.5),
        ("sum", 15e-9, 0.5),
    ]
    kernels = [*NESTED, op("gemm", 40, 70, thread=0, on_device=True)]
    assert [(one.name, one.on_device) for one in heaviest(kernels, 1)] == [("gemm", True)]


def test_times_with_and_without_operations():
    spans = [(0, 20), (30, 40)]
    assert [is_within(at, spans) for at in (0, 19, 20, 35, 40)] == [True, True, False, True, False]


def test_a_trace_holds_the_longest_operations_that_have_room():
    many = [op(f"op{number}" + "x" * 500, number, 2 * number + 1) for number in range(2000)]
    text = trace_text(many, 3, {"version": 1}, most_bytes=20_000)
    trace = json.loads(text)
    assert len(text) <= 20_000 and trace["version"] == 1
    assert 50 < len(trace["traceEvents"]) < 200
    assert trace["traceEvents"][0]["name"].startswith("op1999") and trace["traceEvents"][0]["pid"] == 3
    assert json.loads(trace_text([], 0, {"version": 1}))["traceEvents"] == []


def test_a_real_profile_sees_what_was_computed():
    profile = StepsInView(torch.device("cpu"))
    torch.ones(64, 64) @ torch.ones(64, 64)
    profile.end()
    operations = profile.operations()
    assert "aten::mm" in {one.name for one in operations}
    assert operations == sorted(operations, key=lambda one: one.begin_ns)
