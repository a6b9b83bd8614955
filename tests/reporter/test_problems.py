from __future__ import annotations

import json

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.printable import Style
from trainspec_cli.reporter.problems import render_json, render_problems

PLAIN = Style(coloured=False)


def test_a_spot_is_pointed_at_by_one_sign() -> None:
    problem = Problem("bad_yaml", "oh", file="a.yaml", line=12, column=4, excerpt="a: [1, 2")
    assert render_problems([problem], PLAIN) == (
        "error: oh\n  --> a.yaml:12:4\n   12 | a: [1, 2\n      |    ^"
    )  # fmt: skip


def test_a_tab_takes_one_place() -> None:
    problem = Problem("bad_yaml", "oh", file="a.yaml", line=1, column=1, excerpt="\tx: 1")
    assert render_problems([problem], PLAIN).splitlines()[-2:] == ["    1 |  x: 1", "      | ^"]


def test_a_problem_without_a_place() -> None:
    assert render_problems([Problem("c", "oh", hint="do")], PLAIN).splitlines() == ["error: oh", "  hint: do"]


def test_colours_do_not_change_the_text() -> None:
    import re

    problem = Problem("c", "oh", hint="do", file="a", line=1, column=1, excerpt="x")
    coloured = render_problems([problem, problem], Style(coloured=True))
    assert re.sub(r"\x1b\[\d+m", "", coloured) == render_problems([problem, problem], PLAIN)
    assert coloured.count("\x1b[") > 8


def test_an_entry_is_underlined_from_its_column_to_its_end() -> None:
    problem = Problem("unknown_key", "oh", file="a.yaml", line=123, column=3, excerpt="  lrr: 1  \n")
    assert render_problems([problem], PLAIN).splitlines()[-2:] == ["  123 |   lrr: 1", "      |   ^^^^^^"]


def test_a_column_that_is_not_known_is_the_first() -> None:
    problem = Problem("unknown_key", "oh", file="a.yaml", line=1, excerpt="lr")
    assert render_problems([problem], PLAIN).splitlines()[-2:] == ["    1 | lr", "      | ^^"]


def test_of_a_long_line_the_part_around_the_column_is_shown() -> None:
    problem = Problem("bad_yaml", "oh", file="a.jsonl", line=1, column=3001, excerpt="a" * 3000 + "[" + "b" * 5_000_000)
    shown, mark = render_problems([problem], PLAIN).splitlines()[-2:]
    assert shown == f"    1 | …{'a' * 60}[{'b' * 99}…"
    assert mark.index("^") == shown.index("[")
    assert mark.count("^") == 1
    entry = Problem("unknown_key", "oh", file="a", line=1, column=1, excerpt="x" * 161)
    shown, mark = render_problems([entry], PLAIN).splitlines()[-2:]
    assert (shown, mark) == (f"    1 | {'x' * 160}…", f"      | {'^' * 161}")


def test_several_problems_are_counted_and_one_is_not() -> None:
    problem = Problem("c", "oh")
    assert render_problems([problem], PLAIN, "warning") == "warning: oh"
    assert render_problems([problem, problem], PLAIN).split("\n\n") == ["error: oh", "error: oh", "2 problems"]


def test_problems_for_programs() -> None:
    fields = {"code": "c", "message": "oh", "path": "", "hint": "", "file": None, "line": None, "column": None}
    assert json.loads(render_json([Problem("c", "oh", excerpt="x")])) == {"errors": [fields]}
