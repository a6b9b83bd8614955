"""How long probes are kept: those that tell of the machine for good, those that tell of its neighbours for a while."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.launch import probing
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.probe import BUSY, MachineProbe

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)


class Ended:
    stop_requested, exit_code = False, 0


@pytest.mark.parametrize(
    ("displaced", "age_s", "probes"),
    [
        (BUSY / 2, 2 * probing.DISTURBED_HOLDS_S, 1),
        (2 * BUSY, probing.DISTURBED_HOLDS_S / 2, 1),
        (2 * BUSY, 2 * probing.DISTURBED_HOLDS_S, 2),
    ],
)
def test_a_disturbed_probe_is_used_for_a_while(
    displaced: float,
    age_s: float,
    probes: int,
    made_up_probe: MachineProbe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    told, plan = replace(made_up_probe, displaced=displaced), made_up_probe.large.plan
    started: list[int] = []

    def leave_figures(job: Any, *_: object) -> Ended:
        write_json(job.root / "probe.json", to_plain(told))
        return Ended()

    monkeypatch.setattr(probing, "supervise", leave_figures)
    for _ in range(2):
        assert probing.probe_machine(plan, MACHINE, lambda: started.append(1)) == told
        then = time.time() - age_s
        os.utime(probing.probe_path(plan, MACHINE), (then, then))
    assert len(started) == probes
