"""What a diagnosis says of a run that is longer than it looks at."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis.conftest import Folder

from trainspec_cli.diagnosis import gather
from trainspec_cli.session.runs.diagnose import verdicts_of


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
    assert verdict.evidence[-1] == "it is known from the steps after 60: those before are more than are looked at"
