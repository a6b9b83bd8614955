from types import SimpleNamespace

import pytest
import torch

from trainspec_cli.engine.observe import counters as memory
from trainspec_cli.engine.observe.counters import MemoryWatch

CPU = torch.device("cpu")


def warnings(watch, steps):
    return [said for step in range(1, steps + 1) if (said := watch.check(step))]


def test_a_leak_is_told_of_once_before_it_kills(monkeypatch):
    """Real memory: every check finds 2 MB more, and the host has as good as none left."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=50e6))
    kept = []
    watch = MemoryWatch(CPU, 0, 400)
    used = watch._usage

    def leaking():
        kept.append(bytearray(b"x" * 2_000_000))
        return used()

    monkeypatch.setattr(watch, "_usage", leaking)
    (said,) = warnings(watch, 300)
    assert "host memory grows" in said
    assert "last step (400)" in said


def readings_of(watch, monkeypatch, **kinds):
    """Let the memory of each kind be what `kinds` say: step -> (bytes used, bytes free)."""
    now = [0]
    monkeypatch.setattr(watch, "_usage", lambda: {kind: reading(now[0]) for kind, reading in kinds.items()})

    def check(step, micro_batch_size=8):
        now[0] = step
        return watch.check(step, micro_batch_size)

    return check


GIB, MIB = 2.0**30, 2.0**20


@pytest.mark.parametrize(
    ("last_step", "free_bytes", "told_at"),
    [
        (400, 100 * MIB, 104),  # the 48th reading of every second step from step 10 on
        (400, 400 * MIB, None),  # full after the last step
        (400, 350 * MIB, None),  # full in fewer steps than the run has, and after its last one all the same
        (190, 10 * MIB, 57),  # the 48th of every step
    ],
)
def test_a_leak_is_told_of_when_a_window_shows_that_it_will_run_out(monkeypatch, last_step, free_bytes, told_at):
    """A leak of 1 MiB per step, with this much memory free."""
    watch = MemoryWatch(CPU, 0, last_step)
    check = readings_of(watch, monkeypatch, host=lambda step: (GIB + step * MIB, free_bytes))
    told = {step: said for step in range(1, last_step + 1) if (said := check(step))}
    if told_at is None:
        assert told == {}
        return
    assert list(told) == [told_at]
    for fact in (" 1.00 MiB per step ", f" step {told_at + free_bytes / MIB:.0f}, ", f"last step ({last_step})"):
        assert fact in told[told_at]


def test_a_leak_on_the_device_is_told_of_by_its_name(monkeypatch):
    check = readings_of(
        MemoryWatch(CPU, 0, 190),
        monkeypatch,
        host=lambda step: (GIB, GIB),
        device=lambda step: (GIB + step * MIB, 10 * MIB),
    )
    (said,) = [said for step in range(1, 191) if (said := check(step))]
    assert said.startswith("device memory grows by 1.00 MiB")


def test_the_first_steps_after_a_start_are_no_leak(monkeypatch):
    """They allocate memory that later ones reuse."""
    check = readings_of(
        MemoryWatch(CPU, 1000, 1100), monkeypatch, host=lambda step: (GIB + min(step, 1009) * 50 * MIB, 100 * MIB)
    )
    assert not any(check(step) for step in range(1001, 1101))


def test_a_micro_batch_of_another_size_begins_the_readings_anew(monkeypatch):
    """It allocates anew. The 48th reading since ten steps after the last new size shows what leaks; a size that was
    there before changes nothing."""
    sizes = {step: 8 if step < 40 else 4 if step % 2 else 8 for step in range(1, 191)}
    watch = MemoryWatch(CPU, 0, 190)
    check = readings_of(watch, monkeypatch, host=lambda step: (GIB + step * MIB, 10 * MIB))
    assert [step for step in range(1, 191) if check(step, sizes[step])] == [41 + 10 + 47]


@pytest.mark.parametrize("last_step", [100, 500])
def test_steady_memory_is_no_leak(last_step, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e6))
    watch = MemoryWatch(CPU, 0, last_step)
    x = torch.randn(100, 100)
    for step in range(1, last_step + 1):
        x = (x @ x) / 100
        assert watch.check(step) is None


def test_a_process_uses_its_resident_memory_and_is_left_what_the_host_has(monkeypatch):
    watch = MemoryWatch(CPU, 0, 100)
    watch._process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=70))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=30, total=1000))
    assert watch._usage() == {"host": (70.0, 30.0)}
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (40, 900))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 560)
    watch._device = torch.device("cuda", 0)
    assert watch._usage() == {"host": (70.0, 30.0), "device": (500.0, 100.0)}, "the allocator's cache is free too"
