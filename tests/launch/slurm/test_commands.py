"""With an scontrol that says what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.launch.slurm import commands as slurm


@pytest.mark.parametrize(
    ("said", "preempted"),
    [
        ("   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=2026-01-01T00:01:00", True),
        ("   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=None", False),
        ("   SecsPreSuspend=0", False),
    ],
)
def test_slurm_tells_a_preemption_from_a_scancel(tmp_path: Path, monkeypatch, said: str, preempted: bool) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.is_preempted("7") is preempted


def test_without_slurm_nobody_was_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    assert not slurm.is_preempted("7")
