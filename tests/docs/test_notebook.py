"""docs/from_python.ipynb: its cells run in their order, and print what is shown below them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "from_python.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]


def trains(cell: dict[str, Any]) -> bool:
    """Whether it needs a run, whose figures are other ones each time."""
    return "trains" in cell["metadata"].get("tags", [])


def shown(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.slow
def test_plans_print_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in CELLS:
        if not trains(cell):
            exec("".join(cell["source"]), names)
            assert capsys.readouterr().out == shown(cell), "".join(cell["source"])


@pytest.mark.slow
def test_a_run_is_trained_and_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(measured_cache))
    names: dict[str, Any] = {}
    exec("import trainspec_cli as trainspec", names)
    printed = []
    for cell in filter(trains, CELLS):
        exec("".join(cell["source"]), names)
        printed.append(capsys.readouterr().out)
    assert "done 20 steps, loss" in printed[0]
    assert [line.split()[0] for line in printed[1].splitlines()[1:8]] == [part.name for part in names["speed"].parts]
    assert "name='from_a_notebook'" in printed[2]
