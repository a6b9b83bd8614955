"""The data of a start: prepared, looked for again, and its problems placed in the recipe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.session.recipe import data as of_session
from trainspec_cli.session.recipe.load import load


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What is prepared, without its work."""
    asked: list[Any] = []

    def prepare(data: Any, on_progress: Any) -> Path:
        asked.append(data)
        on_progress("reading", 0.5, 3)
        return tmp_path

    notes = SimpleNamespace(check=lambda data, vocab_size: [f"{vocab_size} tokens are known"])
    monkeypatch.setattr(of_session, "prepare", prepare)
    monkeypatch.setattr(of_session.Collection, "open", lambda folder: notes)
    return asked


def test_tokens_are_made_and_what_is_odd_about_them_is_told(
    prepared: list[Any], tmp_path: Path, console: RunConsole, shown: Any
) -> None:
    loaded = load(["recipe=tiny"])
    assert of_session.prepare_data(loaded, console) == tmp_path
    assert prepared == [loaded.spec.data]
    assert shown.getvalue().splitlines() == ["reading", "512 tokens are known"]


def test_samples_are_found_and_phantoms_need_no_folder(prepared: list[Any], console: RunConsole) -> None:
    assert of_session.prepare_data(load(["recipe=tiny_unet3d"]), console) is None
    assert prepared == []


@pytest.mark.parametrize("kind", [RecipeError, MachineError])
def test_a_problem_of_the_data_stands_where_the_recipe_says_it(
    kind: type[RecipeError], monkeypatch: pytest.MonkeyPatch, console: RunConsole
) -> None:
    def fail(*_: object) -> None:
        raise kind(Problem("empty_data", "nothing is there", "data.max_bytes"))

    monkeypatch.setattr(of_session, "prepare", fail)
    with pytest.raises(kind) as raised:
        of_session.prepare_data(load(["recipe=tiny", "data.max_bytes=1000"]), console)
    assert type(raised.value) is kind
    assert raised.value.problems[0].where() == "command line:2"
