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


SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show job") echo "Partition=main NumNodes=2-2 ExcNodeList={excluded}" ;;
  "show partition") echo "TotalNodes={nodes} TotalCPUs=64" ;;
  "show hostnames") echo "$3" | tr , '\\n' ;;
  update*) echo "$@" > {log} ;;
esac
"""


@pytest.mark.parametrize(
    ("nodes", "excluded", "always", "left"),
    [
        (8, "(null)", None, "c"),
        (8, "a,b", None, "a,b,c"),
        (4, "a,b", None, "b,c"),
        (4, "a,b", "a", "a,c"),
        (3, "c", None, "c"),
        (2, "a", None, ""),
    ],
    ids=["the first", "one more", "the newest alone", "the user's own stay", "the same again", "none can be spared"],
)
def test_a_job_avoids_lost_hosts_as_long_as_enough_are_left(
    tmp_path: Path, monkeypatch, nodes: int, excluded: str, always: str | None, left: str
) -> None:
    log = tmp_path / "log"
    (tmp_path / "scontrol").write_text(SCONTROL.format(excluded=excluded, nodes=nodes, log=log))
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm.exclude("7", ["c"], always)
    assert log.read_text().split() == ["update", "job=7", f"ExcNodeList={left}"]


def test_without_slurm_nobody_was_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    assert not slurm.is_preempted("7")
