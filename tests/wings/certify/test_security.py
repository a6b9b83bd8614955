"""Security clauses: how findings are judged, and a launched run that is attacked."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.program import ProgramEnd
from trainspec_cli.wings.certify import launched
from trainspec_cli.wings.certify.clauses import SECURITY, make_finding
from trainspec_cli.wings.certify.launched import Bench, UntrustedClient, listening, measure_security


def bench(folder: Path) -> Bench:
    return Bench(folder, detect(look_for_gpus=False), 2, ("recipe=tiny",), 8)


@pytest.mark.clause("SEC-1")
@pytest.mark.parametrize(
    ("ports", "passed", "beyond"),
    [
        ({("127.0.0.1", 1), ("::1", 2), ("127.9.9.9", 3)}, True, "none"),
        ({("127.0.0.1", 1), ("0.0.0.0", 2)}, False, "0.0.0.0"),
        ({("::", 1)}, False, "::"),
        (set(), False, "none"),
    ],
    ids=["loopback", "every interface", "every interface of IPv6", "no port"],
)
def test_only_loopback_addresses_may_listen(ports: set[tuple[str, int]], passed: bool, beyond: str) -> None:
    finding = make_finding("SEC-1", "2-processes", launched.judge_ports(ports))
    assert (finding.passed, finding.figures["beyond"]) == (passed, beyond)


@pytest.mark.clause("SEC-3")
@pytest.mark.parametrize(("mode", "passed"), [(0o600, True), (0o640, False), (0o602, False), (0o611, False)])
def test_a_file_that_other_users_may_open_is_found(tmp_path: Path, mode: int, passed: bool) -> None:
    run = tmp_path / "run"
    run.mkdir(0o700)
    (run / "plan.json").touch(0o600)
    (run / "plan.json").chmod(mode)
    finding = make_finding("SEC-3", "2-processes", launched.judge_modes(run))
    assert finding.passed is passed
    assert finding.figures.get("first") == (None if passed else "run/plan.json")


def test_the_pickle_of_the_attack_runs_code_when_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "it's here"
    pickle.loads(launched.pickled_code(marker))
    assert marker.exists()


def test_a_socket_of_a_child_is_found() -> None:
    script = "import socket, sys; one = socket.create_server(('127.0.0.1', 0)); print(one.getsockname()[1], flush=True); sys.stdin.read()"  # fmt: skip # noqa: E501
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:  # fmt: skip # noqa: E501
        assert child.stdout is not None and child.stdin is not None
        port = int(child.stdout.readline())
        assert ("127.0.0.1", port) in listening(psutil.Process())
        child.stdin.close()


def test_an_attack_sends_data_to_a_port_and_holds_connections(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        client = UntrustedClient(RunDir(tmp_path), tmp_path / "marker")
        client._attack(server.getsockname())
        assert len(client._held) == launched.IDLE
        accepted = [server.accept()[0] for _ in range(5)]
        assert all(connection.recv(8) for connection in accepted)
        client.close()
        assert not (tmp_path / "marker").exists(), "the client does not run what it sends"


@pytest.mark.clause("SEC-4")
@pytest.mark.parametrize(
    ("end", "figure"),
    [
        (ProgramEnd(4, "plan.json was altered, rank00000.safetensors was altered"), "refused"),
        (ProgramEnd(0, "plan.json rank00000.safetensors"), "exit code 0"),
        (ProgramEnd(1, "plan.json rank00000.safetensors"), "exit code 1"),
        (ProgramEnd(4, "something is wrong"), "exit code 4"),
        (ProgramEnd(4, "Traceback: plan.json rank00000.safetensors"), "exit code 4"),
        (ProgramEnd(None, "plan.json rank00000.safetensors"), "exit code None"),
    ],
    ids=["named", "accepted", "no documented code", "not named", "a traceback", "no end"],
)
def test_an_altered_file_must_be_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: ProgramEnd, figure: str
) -> None:
    run = RunDir(tmp_path / "run")
    run.checkpoint(3).mkdir(parents=True)
    (run.checkpoint(3) / "rank00000.safetensors").write_bytes(b"ab")
    run.plan_json.write_text('{"spec": {"optim": {"lr": 0.5}}}')
    monkeypatch.setattr(launched, "_resume", lambda _bench, _run: end)
    finding = make_finding("SEC-4", "2-processes", launched._judge_alterations(bench(tmp_path), run, tmp_path))
    assert finding.passed is (figure == "refused")
    assert all(str(finding.figures[name]).startswith(figure) for name in ("checkpoint", "plan"))
    assert (run.checkpoint(3) / "rank00000.safetensors").read_bytes() == b"ab", "a copy is altered"
    assert (tmp_path / "checkpoint/checkpoints/step_00000003/rank00000.safetensors").read_bytes() != b"ab"


def test_nothing_is_launched_without_clauses(tmp_path: Path) -> None:
    assert measure_security(bench(tmp_path), []) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.clause("SEC-1", "SEC-2", "SEC-3", "SEC-4")
@pytest.mark.slow
def test_an_attacked_run_keeps_the_clauses(tmp_path: Path) -> None:
    ticks: list[int] = []
    found = measure_security(replace(bench(tmp_path), on_tick=lambda: ticks.append(1)), SECURITY)
    assert [finding.clause for finding in found] == list(SECURITY)
    assert [finding for finding in found if not finding.passed] == []
    assert ticks
    figures = {finding.clause: finding.figures for finding in found}
    assert figures["SEC-1"]["listening"] == figures["SEC-2"]["ports"]
    assert figures["SEC-4"] == {"certificate": "refused", "checkpoint": "refused", "plan": "refused"}
