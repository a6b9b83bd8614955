"""What a test run measures of this machine once, for all tests and for all processes that pytest-xdist starts."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.tools import probe_machine, probe_path
from trainspec_cli.session.recipe.load import load, plan_on, this_machine


def measured_cache(factory: pytest.TempPathFactory) -> Path:
    """Return a cache (TRAINSPEC_CACHE) that has a probe of this machine; $TRAINSPEC_TEST_CACHE outlives a test run."""
    base = factory.getbasetemp()
    of_all = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = Path(os.environ.get("TRAINSPEC_TEST_CACHE") or of_all / "measured")
    cache.mkdir(exist_ok=True)
    read_probe(cache)
    return cache


DAY_S = 86400.0
MOST_PROCESSES = 4


def probed() -> tuple[Plan, Machine]:
    """The plan of most runs in the tests, as far as a probe depends on it."""
    loaded = load(("recipe=tiny",))
    machine = this_machine(loaded.spec)
    return plan_on(loaded, machine), machine


def read_probe(cache: Path) -> MachineProbe:
    """The probe for `probed()`, measured where the cache has none; other processes wait for it meanwhile."""
    with (cache / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("TRAINSPEC_CACHE", str(cache))
        plan, machine = probed()
        started: list[bool] = []
        probe = probe_machine(plan, machine, lambda: started.append(True))
        if started:
            _serve_all(probe, plan, machine)
        return probe


def _serve_all(probe: MachineProbe, plan: Plan, machine: Machine) -> None:
    """Let the probe serve runs of other sizes and number formats too, and be valid for a day even if other tests have
    disturbed it: tests check what runs do with a prediction, not the prediction."""
    own = probe_path(plan, machine)
    others = (
        probe_path(replace(plan, devices_per_node=processes, compute=compute), machine)
        for processes in range(1, MOST_PROCESSES + 1)
        for compute in ("bf16", "fp32")
    )
    for path in {own, *others}:
        if path != own:
            write_json(path, to_plain(probe))
        os.utime(path, times=(later := time.time() + DAY_S, later))
