import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "leaving_worker.py"


@pytest.mark.slow
def test_a_worker_leaves_without_taking_the_interpreter_down(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "TRAINSPEC_STORE_FILE": str(tmp_path / "store")}
    worker = subprocess.run([sys.executable, WORKER, tmp_path], env=os.environ | place, capture_output=True, text=True)
    assert (worker.returncode, worker.stdout) == (0, "said")
    assert (tmp_path / "handled").exists()
