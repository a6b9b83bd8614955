from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.certify.cases import CLIP_NORM, Case
from trainspec_cli.certify.judge import ClauseCheck, judge
from trainspec_cli.certify.runs import Measured, Run
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.tools import CertifyRunResult, TrainedSteps


def measured(folder: Path, least_clipped_norm: float | None) -> Measured:
    trained = TrainedSteps((2.0, 1.5), least_clipped_norm, "")
    write_json(folder / "result.json", to_plain(CertifyRunResult(trained, None)))
    return Measured(folder)


@pytest.mark.parametrize(
    ("least_clipped_norm", "passed"), [(2 * CLIP_NORM, True), (0.5 * CLIP_NORM, False), (None, False)]
)
def test_equal_losses_count_only_where_clipping_bound(
    tmp_path: Path, least_clipped_norm: float | None, passed: bool
) -> None:
    run = Run(Case("dense", Layout(tp=2)))
    reference = Run(run.case.reference)
    results: dict[Run, Any] = {
        run: measured(tmp_path / "run", least_clipped_norm),
        reference: measured(tmp_path / "reference", 2 * CLIP_NORM),
    }
    assert judge(ClauseCheck("NUM-2", run), results).passed is passed
