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


def test_what_slurm_knows_of_a_job_is_read(calls: Path) -> None:
    known = slurm.show("7")
    assert (known["Restarts"], known["PreemptTime"], known["Comment"]) == ("2", "None", "x=y")


def test_names_and_paths_with_blanks_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "JobId=7 JobName=my run Restarts=9 UserId=me(1) Restarts=2 NumNodes=1 WorkDir=/a Restarts=8 NumNodes=5"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    known = slurm.show("7")
    assert (known["Restarts"], known["NumNodes"], known["WorkDir"]) == ("2", "1", "/a")


def test_a_host_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/slurm/here")
    with pytest.raises(MachineError, match="there is no scontrol on this node"):
        slurm.show("7")
