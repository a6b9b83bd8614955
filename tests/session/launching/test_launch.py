"""`launch` on a run's first node, on another, and without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.session.launching import session as module
from trainspec_cli.session.launching.nodes import Joined, NodeOptions
from trainspec_cli.session.launching.session import Session, launch, show_launch

ALONE = NodeOptions()


@pytest.fixture
def started(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions that are started, and the nodes that join."""
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []

    def start(session: Session) -> int:
        started.append(session)
        return 6

    def join(run_dir: str, node: int, console: Any, *, wait_s: float, joined: Joined, address: Any) -> int:
        assert joined.take_over
        started.append((run_dir, node, wait_s))
        return 5

    monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(module, "join", join)
    return started


def test_a_run_on_this_node_alone(started: list[Session], here: Machine) -> None:
    assert launch(["recipe=tiny", "optim.lr=0.5"], ALONE, force=True, as_json=True) == 6
    (session,) = started
    assert (session.machine, session.reach, session.force, session.as_json) == (here, None, True, True)
    assert session.plan.spec.optim.lr == 0.5
    assert session.console.stderr, "stdout is left to the program that reads it"


@pytest.mark.parametrize("node", [0, 1])
def test_the_first_node_starts_the_run_that_the_others_join(started: list[Any], node: int) -> None:
    nodes = NodeOptions(2, node, "head:29500")
    code = launch(["recipe=tiny", "run.dir=shared", "run.join_timeout_s=1800"], nodes, force=False, as_json=False)
    (what,) = started
    if node:
        assert (code, what) == (5, ("shared", 1, 1800.0))
        return
    assert code == 6
    assert what.plan.num_nodes == 2
    assert (what.reach.head, what.reach.rendezvous_port, what.reach.return_timeout_s) == ("head", 29500, 1800.0)
    assert (what.force, what.as_json) == (False, False)


def test_a_folder_that_holds_a_run_is_not_taken(started: list[Session], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text("{}")
    with pytest.raises(RecipeError):
        launch(["recipe=tiny", "run.dir=mine"], ALONE, force=False, as_json=False)
    assert started == []


def test_what_would_be_started_is_shown_as_text_or_json(
    started: list[Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainspec_cli.session.launching.session.predict", lambda plan, *_, **__: plan)
    shown = json.loads(show_launch(["recipe=tiny", "run.dir=mine"], ALONE, force=False, as_json=True))
    assert shown.keys() == {"run", "command", "environment", "plan"}
    assert shown["run"] == str(tmp_path / "mine")
    assert shown["command"][-1] == str(tmp_path / "mine")
    assert shown["plan"]["spec"]["run"]["dir"] == "mine"
    text = show_launch(["recipe=tiny", "run.dir=mine"], ALONE, force=False, as_json=False)
    assert "trainspec_cli.engine" in text
    assert started == [] and list(tmp_path.iterdir()) == []
