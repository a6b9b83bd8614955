"""What the system and the interpreter count of a process, and how its connections do."""

from __future__ import annotations

import gc
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lab.events import started, write_event

from trainspec_cli.engine.data.loader import count_attended
from trainspec_cli.engine.observe import counters
from trainspec_cli.engine.observe.clock import ProcessorClock, QueuedTime, StepClock
from trainspec_cli.engine.observe.counters import (
    ConnectionCounter,
    GarbageClock,
    StepCounters,
    ends_of,
    window_steps,
)
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder.paths import RunDir

PARTS_S = {"forward": 0.2, "exposed_comm": 0.05}
BATCH = [(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))]


@pytest.fixture
def counting():
    found = StepCounters(torch.device("cpu"))
    yield found
    found.close()


def test_a_window_ends_where_half_a_second_of_steps_has_gone_by(counting):
    queued = QueuedTime(0.1, 0.01)
    events = [counting.note_step(step, PARTS_S, queued, BATCH, (0.003, 5.0), attended=128) for step in range(1, 5)]
    assert [event is not None for event in events] == [False, True, False, True]
    event = events[1]
    assert (event.step, event.steps, event.tokens, event.attended) == (2, 2, 32, 256)
    assert event.own_s == pytest.approx(0.4)
    assert event.queued_s == pytest.approx(0.02)
    assert (event.agreed_s, event.left_at) == (0.003, 5.0)
    assert event.cpu_s > 0
    assert event.rss_bytes > 2**20
    assert event.available_bytes is not ABSENT and event.available_bytes > 0


@pytest.mark.parametrize(("step_s", "steps"), [(2.0, 1), (0.3, 1), (0.25, 2), (0.06, 8), (0.0, 1024)])
def test_windows_are_powers_of_two_so_that_ranks_end_them_together(step_s, steps):
    assert window_steps(step_s) == steps


def test_work_counts_documents_by_the_squares_of_their_lengths():
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [7, 8, 8, 9, 9, 9]])
    assert count_attended((tokens, tokens, documents)) == 16 + 4 + 1 + 4 + 9
    assert count_attended((tokens, tokens)) == 2 * 6 * 6


def test_time_in_garbage_collection_is_counted_until_the_clock_is_closed():
    clock = GarbageClock()
    gc.collect()
    assert clock.runs == 1 and clock.seconds > 0
    assert (clock.cut(), clock.cut()) == (clock.seconds, 0.0)
    clock.close()
    gc.collect()
    assert clock.runs == 1


@pytest.mark.parametrize(
    ("version", "cgroup", "stat", "expected_s"),
    [
        (1, "9:cpu:/a/b\n0::/\n", {"cpu/a/b/cpu.stat": "nr_throttled 3\nthrottled_time 2500000000\n"}, 2.5),
        (2, "0::/a/b\n", {"a/b/cpu.stat": "throttled_usec 500000\n", "a/cpu.stat": "throttled_usec 250000\n"}, 0.75),
        (2, "0::/\n", {"cpu.stat": "throttled_usec 500000\n"}, 0.0),
    ],
)
def test_quotas_of_the_own_control_group_and_those_above_it_count(
    tmp_path, monkeypatch, version, cgroup, stat, expected_s
):
    for name, text in stat.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu")
    real = counters._read
    monkeypatch.setattr(counters, "CGROUPS", tmp_path)
    monkeypatch.setattr(counters, "_read", lambda path: cgroup if path == "/proc/self/cgroup" else real(path))
    assert counters.throttled_s() == expected_s


def test_the_memory_left_is_the_least_of_the_nodes_and_the_control_groups(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "cgroup.controllers").write_text("memory")
    (tmp_path / "a/memory.max").write_text("1000000\n")
    (tmp_path / "a/memory.current").write_text("400000\n")
    texts = {"/proc/self/cgroup": "0::/a\n", "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  4096 kB\n"}
    real = counters._read
    monkeypatch.setattr(counters, "CGROUPS", tmp_path)
    monkeypatch.setattr(counters, "_read", lambda path: texts.get(str(path)) or real(path))
    assert counters.available_bytes() == 600000
    (tmp_path / "a/memory.max").write_text("max\n")
    assert counters.available_bytes() == 4096 * 1024


def test_clocks_of_states_that_are_gone_hold_no_descriptors() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(50):
        ProcessorClock()
    assert descriptors() < before + 5


def test_time_on_the_processor_grows_with_work():
    clock = ProcessorClock()
    before_s, _ = clock.read()
    began_s = time.thread_time()
    while time.thread_time() - began_s < 0.02:
        pass
    ran_s = clock.read()[0] - before_s
    clock.close()
    assert clock.read() == (0.0, 0.0)
    assert ran_s == pytest.approx(0.02, abs=0.02)


def test_queued_time_of_exchanges_is_kept_apart(monkeypatch):
    """The main thread waits 0.1 s for a processor in a pass, and 0.4 s in an exchange."""
    clock = StepClock(torch.device("cpu"))
    readings = iter([1.0, 1.1, 1.5, 1.5, 1.5])
    monkeypatch.setattr(clock._processor, "read", lambda: (0.0, next(readings)))
    clock.restart()
    with clock.collective():
        pass
    assert clock.cut().queued == pytest.approx((0.1, 0.4))
    assert clock.cut().queued == pytest.approx((0.0, 0.0))


def test_the_exchange_that_ends_a_step_is_remembered():
    clock = StepClock(torch.device("cpu"))
    before = time.time()
    with clock.agreeing():
        time.sleep(0.01)
    segments = clock.cut()
    seconds, left_at = segments.agreement()
    assert seconds >= 0.01
    assert before + seconds <= left_at <= time.time()
    assert segments.parts_s()["exposed_comm"] >= 0.01


def test_a_connection_s_bytes_are_counted_between_two_cuts(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    try:
        here, there = (f"127.0.0.1:{one.getsockname()[1]}" for one in (sender, receiver))
        assert ends_of(sender.fileno()) == (here, there)
        of_sender = [(sender.fileno(), os.fstat(sender.fileno()).st_ino)]
        monkeypatch.setattr(counters, "open_connections", lambda: iter(of_sender))
        counter = ConnectionCounter()
        sender.sendall(b"x" * 1000)
        assert receiver.recv(1000, socket.MSG_WAITALL)
        assert counter.cut() == (), "what was sent before the first cut is of no window"
        sender.sendall(b"x" * 5000)
        assert len(receiver.recv(5000, socket.MSG_WAITALL)) == 5000
        (counted,) = counter.cut()
        assert (counted.local, counted.peer, counted.sent_bytes, counted.timeouts) == (here, there, 5000, 0)
        assert counted.segments >= 1
        assert counter.cut() == ()
    finally:
        for one in (sender, receiver, listener):
            one.close()
    assert ends_of(10**6) == ("", "")


@pytest.mark.parametrize("segments", [1, 40])
def test_a_connection_that_takes_the_descriptor_of_a_closed_one_is_not_taken_for_it(monkeypatch, segments):
    """It happens if a peer's process dies and another one joins; the counters of the new one may be behind or ahead."""
    listener = socket.create_server(("127.0.0.1", 0))
    closed, opened = (socket.create_connection(listener.getsockname()) for _ in range(2))
    peers = [listener.accept()[0] for _ in range(2)]
    try:
        closed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        known = (closed.fileno(), os.fstat(closed.fileno()).st_ino)
        monkeypatch.setattr(counters, "open_connections", lambda: iter([known]))
        counter = ConnectionCounter()
        for _ in range(20):
            closed.sendall(b"x" * 100)
            time.sleep(0.001)
        assert counter.cut() == ()
        for _ in range(segments):
            opened.sendall(b"x" * 3000)
        time.sleep(0.05)
        os.dup2(opened.fileno(), known[0])
        assert counter.cut() == ()
    finally:
        for one in (closed, opened, listener, *peers):
            one.close()


def test_segments_are_counted_past_the_end_of_the_kernel_s_counter(monkeypatch):
    """After 2**32 of them, some eighty minutes at 10 Gbit/s, it begins with 0."""
    states = iter([counters.ConnectionState(0.0, 0, 2**32 - 5, 1000, 0.0, 0)])
    later = counters.ConnectionState(0.0, 0, 3, 9000, 0.0, 0)
    monkeypatch.setattr(counters, "open_connections", lambda: iter([(10**6, 1)]))
    monkeypatch.setattr(counters, "state_of", lambda _: next(states, later))
    counter = ConnectionCounter()
    assert counter.cut() == ()
    (counted,) = counter.cut()
    assert (counted.segments, counted.sent_bytes) == (8, 8000)


def test_a_restart_takes_the_peak_that_the_runs_first_start_measured(tmp_path: Path) -> None:
    """With the same device and format."""
    run = RunDir(tmp_path)
    device = torch.device("cpu")
    assert counters.measured_before(run, device, torch.float32) is None
    source = counters.measured_source(torch.float32)
    for peak_flops in (5.0, 6.0):
        about = {"device_name": counters.device_name(device), "peak_flops": peak_flops, "peak_source": source}
        write_event(run.events(0), replace(started(), **about))
    assert counters.measured_before(run, device, torch.float32) == counters.Peak(5.0, source)
    assert counters.measured_before(run, device, torch.bfloat16) is None
