"""With an scontrol that says what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.errors import MachineError
from trainspec_cli.launch.slurm import commands as slurm

SAID = "JobId=7 JobName=a b   Requeue=1 Restarts=2 ExcNodeList=(null) PreemptTime=None Comment=x=y"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho '{SAID}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


def test_what_slurm_knows_of_a_job_is_read(calls: Path) -> None:
    known = slurm.show("7")
    assert (known["Restarts"], known["PreemptTime"], known["Comment"]) == ("2", "None", "x=y")


def test_a_lost_host_is_excluded_beside_none_before(calls: Path) -> None:
    slurm.exclude("7", ["node3", "node4"])
    assert calls.read_text().splitlines()[-1] == "update job=7 ExcNodeList=node3,node4"


def test_a_host_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    with pytest.raises(MachineError, match="there is no scontrol on this host"):
        slurm.show("7")
