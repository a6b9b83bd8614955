from types import SimpleNamespace

import pytest
import torch

from trainspec_cli.engine.observe import memory
from trainspec_cli.engine.observe.memory import MemoryWatch

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
    assert "host memory grows by" in said
    assert "before the last one (400)" in said


@pytest.mark.parametrize("last_step", [100, 5000])
def test_steady_memory_is_no_leak(last_step, monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1e6))
    watch = MemoryWatch(CPU, 0, last_step)
    x = torch.randn(200, 200)
    for step in range(1, last_step + 1):
        x = (x @ x) / 200
        assert watch.check(step) is None
