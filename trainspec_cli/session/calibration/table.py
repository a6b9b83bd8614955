"""Read a table of measured runs from a CSV file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from trainspec_cli.core.errors import Problem, RecipeError, did_you_mean
from trainspec_cli.core.reading.files import exists, read_text
from trainspec_cli.planner.validation.columns import COLUMNS, DERIVED, EXAMPLE, NOT_READ

TEMPLATE = "trainspec backtest --template TABLE.csv writes an example and prints the columns"


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
    at: Any = {"file": str(file), "line": 1}
    if not rows or not {"gpu", "n_gpus"} <= rows[0].keys():
        message = "a table of runs starts with a line of column names, including gpu and n_gpus"
        raise RecipeError(Problem(code="wrong_table", message=message, hint=TEMPLATE, **at))
    known = (*COLUMNS, *NOT_READ, *DERIVED)
    unknown = [
        Problem("unknown_key", f"there is no column `{name}`", hint=did_you_mean(name, known) or TEMPLATE, **at)
        for name in rows[0]
        if name not in known and (name.strip() or any(row[name].strip() for row in rows))
    ]
    if unknown:
        raise RecipeError(unknown)
    return rows


def write_template(file: Path) -> None:
    """Write a table with one example row. Raises RecipeError if the file exists."""
    if file.exists():
        raise RecipeError(Problem("output_exists", f"{file} exists", hint="choose another name"))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([EXAMPLE.keys(), EXAMPLE.values()])
    file.write_text(text.getvalue(), encoding="utf-8")
