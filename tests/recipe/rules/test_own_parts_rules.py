"""What is wrong with a source that is one of several is said of its own key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recipe.rules.test_optim_rules import SPEC

from trainspec_cli.recipe.keys.run import PartSpec
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.recipe.own_code import own_code_of
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.session.recipe.load import examine

PLAIN = replace(SPEC, optim=OptimSpec(lr=1e-3))


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("def texts(count=1):\n    yield 'text' * count\n")
    return f"{tmp_path / 'mine.py'}:texts"


@pytest.mark.parametrize(
    ("part", "path", "hint"),
    [
        (PartSpec("jsonll"), "data.validation.v.source", "did you mean data.validation.v.source=jsonl?"),
        (PartSpec("phantom"), "data.validation.v.source", "type data.validation.v.source=jsonl, or another of these"),
        (
            PartSpec("python_stdlib", options={"count": 1}),
            "data.validation.v.options",
            "leave it out, or type data.validation.v.source=FILE.py:NAME",
        ),
        (
            PartSpec("CODE", path="x"),
            "data.validation.v.path",
            "type data.validation.v.path=null data.validation.v.options.path=x",
        ),
        (PartSpec("CODE", options={"size": 1}), "data.validation.v.source", ""),
    ],
    ids=["misspelt", "no text", "options", "path", "another argument"],
)
def test_a_part_that_is_wrong_is_refused(code: str, part: PartSpec, path: str, hint: str) -> None:
    part = replace(part, source=part.source.replace("CODE", code))
    problems = {one.path: one for one in check(replace(PLAIN, data=replace(PLAIN.data, validation={"v": part})))}
    assert hint in problems[path].hint


def test_code_of_parts_is_checked_and_named_like_the_others(code: str) -> None:
    part = PartSpec(code, options={"count": 2})
    spec = replace(PLAIN, data=replace(PLAIN.data, validation={"v": part}))
    assert check(spec) == []
    assert [(one.path, one.text, one.options) for one in own_code_of(spec)] == [
        ("data.validation.v.source", code, ("count",))
    ]


def test_a_file_of_a_part_is_sought_in_the_current_folder(code: str, tmp_path: Path) -> None:
    given = ["recipe=tiny", "data.validation.v.source=mine.py:texts"]
    assert examine(given, tmp_path).draft.data.validation["v"].source == code
