"""User-defined callbacks and trackers: their events, isolation from the run's random numbers, and errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.run.folder.event_types.events import EndEvent, EvalEvent, StepEvent
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan

STEP = StepEvent(step=3, loss=1.5, grad_norm=1.0, samples=8, step_time_s=0.1, time_s={}, skipped=False)
WATCH = """
import json, random
import numpy as np
import torch

class Watch:
    HEAD
    def __init__(self, run):
        self.run = run
        (run.folder / "seen.txt").write_text(run.recipe["optim"]["name"])
    def on_step(self, event):
        random.random(), np.random.rand(), torch.rand(3)
        BODY
        with (self.run.folder / "seen.txt").open("a") as file:
            file.write(f" {self.run.rank}:{event.step}:{event.loss}")
    def on_end(self, event):
        self.on_step(STEP)

class Tracker:
    def __init__(self, run):
        self.file = (run.folder / "tracked.txt").open("w")
    def record(self, event):
        self.file.write(event.type + " ")
    def close(self):
        self.file.close()
"""


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Any]:
    """journal(rank, head, body, **train): of a run with the callback and the tracker."""
    opened = []

    def make(rank: int = 0, head: str = "", body: str = "", text: str = "Watch") -> Journal:
        file = tmp_path / f"watch{len(opened)}.py"
        file.write_text(WATCH.replace("HEAD", head).replace("BODY", body))
        base = build_plan(Case("dense", optimizer="adamw"), "cpu").spec
        spec: RunSpec = replace(
            base,
            train=replace(base.train, callbacks=(f"{file}:{text}",)),
            tracking=replace(base.tracking, trackers=(f"{file}:Tracker",)),
        )
        (tmp_path / "run").mkdir(exist_ok=True)
        opened.append(Journal(RunDir(tmp_path / "run"), rank, spec))
        return opened[-1]

    yield make


def seen(tmp_path: Path) -> str:
    return (tmp_path / "run" / "seen.txt").read_text()


def test_events_arrive_and_random_generators_stay(tmp_path: Path, journal: Any) -> None:
    made = journal()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    made.write(STEP)
    made.write(EvalEvent(step=3, heldout_loss=1.0))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    made.close()
    assert seen(tmp_path) == "adamw 0:3:1.5"
    assert (tmp_path / "run" / "tracked.txt").read_text() == "step eval "


@pytest.mark.parametrize(("head", "is_told"), [("", False), ("every_rank = True", True)])
def test_other_ranks_are_told_where_the_class_says_so(tmp_path: Path, journal: Any, head: str, is_told: bool) -> None:
    journal(rank=1, head=head).write(STEP)
    assert (tmp_path / "run" / "seen.txt").exists() == is_told
    assert not (tmp_path / "run" / "tracked.txt").exists()


def test_an_error_ends_the_run_in_its_own_words(tmp_path: Path, journal: Any) -> None:
    made = journal(body="raise OSError('full')")
    with pytest.raises(WorkerError) as caught:
        made.write(STEP)
    assert "watch0.py:Watch raised OSError: full " in str(caught.value)
    assert "watch0.py:13, in on_step: " in str(caught.value)


def test_one_that_is_optional_is_left_out_after_an_error(tmp_path: Path, journal: Any) -> None:
    made = journal(head="optional = True", body="raise OSError('full')")
    made.write(STEP)
    made.write(replace(STEP, step=4))
    made.close()
    events = list(read_events(RunDir(tmp_path / "run").events(0)))
    assert [event["type"] for event in events] == ["step", "warning", "step"]
    assert events[1]["message"].endswith(" without it")


@pytest.mark.parametrize(
    ("head", "text", "words", "hint"),
    [
        (
            "def on_stp(self, event): ...",
            "Watch",
            "`on_stp`",
            "`on_st",
        ),
        ("", "Tracker", "on_start, on_step", "def on_step"),
        ("def __new__(cls, run): raise KeyError('x')", "Watch", "raised KeyError: 'x'", ""),
    ],
)
def test_a_class_that_is_wrong_is_refused(journal: Any, head: str, text: str, words: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        journal(head=head, text=text)
    assert words in str(caught.value) and hint in caught.value.problems[0].hint


def test_the_end_is_an_event_too(tmp_path: Path, journal: Any) -> None:
    with pytest.raises(WorkerError, match=r"NameError: .* end of step 9"):
        journal().write(EndEvent(step=9, status="done"))
