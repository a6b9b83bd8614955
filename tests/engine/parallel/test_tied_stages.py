"""An embedding that is also the head stands on two stages: it is one matrix under split schedules too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("tied_worker.py")


def test_tied_embeddings_are_one_matrix_under_split_schedules(tmp_path: Path) -> None:
    """Three clipped steps: the norm of the gradients counts the matrix once, and both stages update it alike."""
    command = [sys.executable, str(WORKER), str(tmp_path / "meeting")]
    alone_on_a_core = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=alone_on_a_core)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        alone = found.pop("one process")
        assert found == {schedule: pytest.approx(alone, rel=1e-5) for schedule in ("zero_bubble", "zbv")}
