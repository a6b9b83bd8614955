"""An embedding that is also the head stands on two stages: it is one matrix under split schedules too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.ranks import outputs

WORKER = Path(__file__).with_name("tied_worker.py")


def test_tied_embeddings_are_one_matrix_under_split_schedules(tmp_path: Path) -> None:
    """Three clipped steps: the norm of the gradients counts the matrix once, and both stages update it alike."""
    for output in outputs(WORKER, [(tmp_path / "meeting", rank) for rank in range(2)]):
        found = json.loads(output.splitlines()[-1])
        alone = found.pop("one process")
        assert found == {schedule: pytest.approx(alone, rel=1e-5) for schedule in ("zero_bubble", "zbv")}
