"""Read a table of measured runs from a CSV file."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import exists, read_text


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows as dictionaries by column name. Raises RecipeError for a file that is not a table of runs."""
    if not exists(file):
        raise RecipeError(Problem(code="missing_file", message=f"no such file: {file}", file=str(file)))
    try:
        lines = csv.DictReader(io.StringIO(read_text(file), newline=""))
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in lines]
    except csv.Error as error:
        problem = Problem("wrong_table", f"this is not a table: {error}", file=str(file), line=lines.line_num)
        raise RecipeError(problem) from error
    if not rows or not {"gpu", "n_gpus"} <= rows[0].keys():
        message = "a table of runs starts with a line of column names, including gpu and n_gpus"
        raise RecipeError(Problem(code="wrong_table", message=message, file=str(file), line=1))
    return rows
