"""Samples of a thread, and the line that most of them share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from trainspec_cli.engine.comm import forking as background
from trainspec_cli.engine.observe import stack_samples
from trainspec_cli.engine.observe.stack_samples import (
    Frame,
    PySpy,
    StackSample,
    code_lines,
    is_in_exchange,
    read_stacks,
    sample_thread,
)

LAUNCHER = str(Path(torch.__file__).parent / "distributed" / "launcher" / "api.py")
COLLECTIVE = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")


@pytest.fixture
def spinning():
    ended = threading.Event()

    def spin():
        while not ended.wait(0.001):
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    yield thread
    ended.set()
    thread.join()


def test_a_thread_is_seen_at_the_line_where_it_stands(spinning, monkeypatch):
    monkeypatch.setattr(stack_samples, "PERIOD_S", 0.0)
    seen = iter(range(20))
    samples = sample_thread(spinning.ident, lambda: next(seen, None) is None)
    assert len(samples) == 20 and samples[0].at_ns > 1e18
    line = code_lines(samples, len(samples))[0]
    assert (line.file, line.function, line.share) == (__file__, "spin", 1.0)
    assert line.text == "while not ended.wait(0.001):"


def test_a_thread_that_has_ended_has_no_samples():
    seen = iter(range(3))
    assert sample_thread(-1, lambda: next(seen, None) is None) == []


def test_files_of_a_package_are_named_from_it_on():
    frames = (Frame(background.__file__, 3, "work"), Frame(threading.__file__, 9, "wait"))
    line = code_lines([StackSample(1, frames), StackSample(2, (Frame(COLLECTIVE, 1, "all_reduce"),))], 4)[0]
    assert (line.file, line.line, line.share) == ("trainspec_cli/engine/comm/forking.py", 3, 0.25)


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ([LAUNCHER, "/home/me/train.py"], False),
        ([LAUNCHER, "/home/me/train.py", threading.__file__], False),
        (["/home/me/train.py", COLLECTIVE], True),
        (["/home/me/train.py", COLLECTIVE, threading.__file__], True),
        ([background.__file__, threading.__file__], True),
        ([], False),
    ],
)
def test_a_stack_waits_for_others_where_its_own_code_has_called_an_exchange(files, waits):
    assert is_in_exchange(files) == waits


def test_the_stacks_of_one_thread_are_read_from_what_py_spy_writes():
    text = (
        "thread (15): MainThread;<module> (/a/spin.py:7);inner.<locals>.<genexpr> (/a/b c.py:5) 62\n"
        "thread (159): other;run (/a/spin.py:9) 99\n"
        "thread (15): MainThread;<module> (/a/spin.py:7) 3\n"
        "half a li"
    )
    found = read_stacks(text, 15)
    assert [one.times for one in found] == [62, 3]
    assert found[0].stack == (Frame("/a/spin.py", 7, "<module>"), Frame("/a/b c.py", 5, "inner.<locals>.<genexpr>"))


def test_py_spy_that_may_not_look_says_why(tmp_path):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2; exit 1\n")
    program.chmod(0o700)
    with pytest.raises(OSError, match="Permission Denied"):
        PySpy(str(program), tmp_path / "looks").samples(1)
    assert list((tmp_path / "looks").iterdir()) == []
