"""What a test run measures of this machine once, for all tests and for all processes that pytest-xdist starts."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from trainspec_cli.cli.load import detect_machine, load, plan_on
from trainspec_cli.launch.probing import probe_machine
from trainspec_cli.spec.results.probe import MachineProbe

PROBED = ("recipe=tiny", "precision=fp32")


def measured_cache(factory: pytest.TempPathFactory) -> Path:
    """Return a cache (TRAINSPEC_CACHE) that has a probe of this machine; $TRAINSPEC_TEST_CACHE outlives a test run."""
    base = factory.getbasetemp()
    of_all = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = Path(os.environ.get("TRAINSPEC_TEST_CACHE") or of_all / "measured")
    cache.mkdir(exist_ok=True)
    read_probe(cache)
    return cache


def read_probe(cache: Path) -> MachineProbe:
    """The probe of two processes, measured where the cache has none; other processes wait for it meanwhile."""
    with (cache / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("TRAINSPEC_CACHE", str(cache))
        loaded = load(PROBED)
        machine = detect_machine(loaded.spec)
        assert machine is not None
        return probe_machine(plan_on(loaded, machine), machine, lambda: None)
