"""The diagnosis of a run with more steps than it reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lab.waiting import wait_for
from reporter.diagnosis.conftest import Folder, connection

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis import gather
from trainspec_cli.reporter.diagnosis.watch import LONGEST_S, DiagnosisWatch
from trainspec_cli.run.folder.event_types.events import EvalEvent, VerdictEvent
from trainspec_cli.session.runs.diagnose import VerdictLines, verdicts_of


def test_a_long_run_is_judged_by_its_newest_steps_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "run")
    folder.start()
    folder.steps(1, 60, slow=1)
    folder.steps(61, 100, slow=3)
    (*_, newest) = sorted(verdicts_of(folder.run), key=lambda one: one.since_step)
    assert newest.rank == 3 and not any("it is known" in line for line in newest.evidence)
    monkeypatch.setattr(gather, "MOST_ROWS", 4 * 20)
    monkeypatch.setattr(gather, "LEAST_STEPS", 20)
    (verdict,) = verdicts_of(folder.run)
    assert (verdict.cause, verdict.rank) == ("slow_device", 3)
    assert "steps after 60;" in verdict.evidence[-1]


@pytest.mark.parametrize(("seconds", "count", "is_named"), [(8.0, 2, True), (8.0, 1, False), (1.0, 2, False)])
def test_evaluations_that_take_much_of_the_time_are_named(
    tmp_path: Path, seconds: float, count: int, is_named: bool
) -> None:
    """40 steps take 14 s; no part of a step shows what lies between them."""
    folder = Folder(tmp_path / "run")
    folder.start()
    folder.steps(1, 40)
    folder.write(
        0,
        *(EvalEvent(step=20 * n, heldout_loss=1.0, heldout_accuracy=0.5, seconds=seconds) for n in range(1, count + 1)),
    )
    verdicts = verdicts_of(folder.run)
    found = [verdict for verdict in verdicts if verdict.cause == "evaluation"]
    assert bool(found) is is_named
    if found:
        assert verdicts[0] == found[0], "it costs most"
        assert found[0].cost_s == pytest.approx(count * seconds / 40)


def test_noise_is_not_said_while_a_run_goes_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    folder.start()
    found = [VerdictEvent(step=9, is_over=False, verdict=RunVerdict(cause=cause)) for cause in ("noise", "slow_loader")]
    said: list[str] = []
    lines = VerdictLines(folder.run, ask=None)
    for event in found:
        lines._say(event, said.append)
    assert len(said) == 1 and "slow loader" in said[0]


def test_a_long_diagnosis_does_not_hold_up_the_supervisor(tmp_path: Path) -> None:
    """While a supervisor is busy, its nodes hear nothing from it."""
    folder = Folder(tmp_path / "run")
    folder.start()
    folder.steps(1, 300, slow=1)
    connections = tuple(connection(f"10.0.0.1:{port}", "10.0.0.2:9") for port in range(8))
    for step in range(1, 301, 3):
        for rank in range(folder.ranks):
            folder.counters(rank, step, connections=connections)
    now_s = 0.0
    direct = DiagnosisWatch(folder.run, clock=lambda: now_s)
    now_s = LONGEST_S
    began_s = time.monotonic()
    direct.update(lambda event: None)
    takes_s = time.monotonic() - began_s
    lines = VerdictLines(folder.run, ask=None)
    said: list[str] = []
    looks_s = []

    def look() -> bool:
        began_s = time.monotonic()
        lines.look(said.append)
        looks_s.append(time.monotonic() - began_s)
        return bool(said)

    wait_for(look)
    assert "slow device" in said[0]
    assert max(looks_s) < takes_s / 4
