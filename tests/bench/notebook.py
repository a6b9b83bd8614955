"""`python tests/bench/notebook.py` runs the cells of docs/from_python.ipynb that only plan, and writes what they print.

Cells with the tag `trains` need a run, whose figures differ each time: they keep the output that is shown."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "docs" / "from_python.ipynb"
Cell = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> tuple[list[Cell], list[Cell]]:
    """Return the cells that only plan, and those that train."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    trains = [cell for cell in cells if "trains" in cell["metadata"].get("tags", [])]
    return [cell for cell in cells if cell not in trains], trains


def run_cells(cells: list[Cell], names: dict[str, Any]) -> Iterator[tuple[Cell, str]]:
    """Run the cells one after the other with the same variables; yield each cell and what it has printed."""
    for cell in cells:
        with redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        yield cell, printed.getvalue()


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell, printed in run_cells(code_cells(notebook)[0], {}):
        lines = printed.splitlines(keepends=True)
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
