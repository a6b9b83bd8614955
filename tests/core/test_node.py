"""The names of this node and of its CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core import node


def test_slurms_name_of_a_node_comes_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert node.node_name() == "node7"
    monkeypatch.setenv("SLURMD_NODENAME", "")
    assert node.node_name() == "box"


def test_a_cpu_has_its_makers_name_else_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    assert (node.cpu_name(cpuinfo), node.cpu_flags(cpuinfo)) == ("aarch64", frozenset())
    cpuinfo.write_text("processor : 0\nmodel name\t: A: chip\nflags\t\t: fpu sse\n\nmodel name : other\nflags : amx\n")
    assert (node.cpu_name(cpuinfo), node.cpu_flags(cpuinfo)) == ("A: chip", frozenset({"fpu", "sse"}))
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert node.cpu_name(tmp_path / "nothing") == "arm"
