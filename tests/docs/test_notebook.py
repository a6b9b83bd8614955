"""docs/from_python.ipynb: its cells run in their order, and print what is shown below them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.notebook import NOTEBOOK, Cell, code_cells, run_cells

PLANS, TRAINS = code_cells(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


def shown(cell: Cell) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def test_plans_print_what_is_shown() -> None:
    for cell, printed in run_cells(PLANS, {}):
        assert printed == shown(cell), "python tests/bench/notebook.py"


@pytest.mark.slow
def test_a_run_is_trained_and_read(tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(measured_cache))
    names: dict[str, Any] = {}
    exec("import trainspec_cli as trainspec", names)
    printed = [printed for _, printed in run_cells(TRAINS, names)]
    assert "done 20 steps, loss" in printed[0]
    assert [line.split()[0] for line in printed[1].splitlines()[1:8]] == [part.name for part in names["speed"].parts]
    assert "name='from_a_notebook'" in printed[2]
