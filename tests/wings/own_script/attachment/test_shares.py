"""Shares of an attached script: they follow the measured speeds, are recorded, and are repeated by later starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script.attachment import shares
from trainspec_cli.wings.own_script.attachment.shares import Shares

SAMPLE_S = (0.01, 0.03)
"""Rank 1 needs three times as long for a sample."""


class Ranks:
    """One of two ranks in this process: figures arrive one step later, as over a network."""

    def __init__(self, number: int, given: list[dict[int, list[float]]], gathered: list[object]):
        self.number, self.count, self._given, self._gathered, self._step = number, 2, given, gathered, 0

    def exchange(self, own: list[float]) -> list[list[float]]:
        self._given += [{}] * (self._step + 1 - len(self._given))
        self._given[self._step] = self._given[self._step] | {self.number: own}
        self._step += 1
        before = self._given[self._step - 2] if self._step > 1 else {}
        return [before[number] for number in sorted(before)]

    def gather(self, value: object) -> list[object]:
        if self.number == 0:
            self._gathered.append(value)
        return [self._gathered[-1], value]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(shares.time, "monotonic", lambda: now[0])
    return now


def start(root: Path, largest: int = 12) -> list[Shares]:
    given: list[dict[int, list[float]]] = []
    gathered: list[object] = []
    return [Shares(RunDir(root), Ranks(number, given, gathered), 12, largest) for number in (0, 1)]  # type: ignore


def train(both: list[Shares], clock: list[float], first: int, last: int) -> dict[int, tuple[int, ...]]:
    """Make the steps after `first` and return the shares of each."""
    made = {}
    for step in range(first, last):
        (counts,) = {one.divide(step) for one in both}
        made[step] = counts
        for rank, one in enumerate(both):
            one.begin_step()
            clock[0] += counts[rank] * SAMPLE_S[rank]
            weight = one.weighted(torch.ones(())).item()
            assert weight == pytest.approx(counts[rank] * 2 / 12)
            one.end_step()
    return made


def test_the_slower_rank_takes_fewer_samples_and_a_later_start_follows(tmp_path, clock) -> None:
    made = train(start(tmp_path), clock, 0, 40)
    assert made[0] == made[5] == (6, 6) and made[39] == (9, 3)
    written = [event for event in read_log(tmp_path / "directives.jsonl") if isinstance(event, DirectiveEvent)]
    assert [event.number for event in written] == list(range(1, len(written) + 1))
    assert {step: counts for step, counts in made.items() if counts != made.get(step - 1, (6, 6))} == {
        event.step: event.counts for event in written
    }
    assert "rank 1" in written[0].reason
    assert list(read_log(RunDir(tmp_path).events(0)))
    again = train(start(tmp_path), clock, 5, 40)
    assert again == {step: made[step] for step in range(5, 40)}
    assert train(start(tmp_path), clock, 38, 39) == {38: (9, 3)}


def test_no_rank_exceeds_its_largest_share(tmp_path, clock) -> None:
    assert train(start(tmp_path, 8), clock, 0, 40)[39] == (8, 4)
    with pytest.raises(RecipeError) as error:
        start(tmp_path, 5)
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == ("out_of_range", "largest_share")


@pytest.mark.parametrize("times", [0, 2])
def test_a_loss_that_is_not_weighted_once_per_step_is_an_error(tmp_path, clock, times) -> None:
    one, _ = start(tmp_path)
    one.divide(0)
    one.begin_step()
    for _ in range(times):
        one.weighted(torch.ones(()))
    with pytest.raises(RecipeError) as error:
        one.end_step()
    assert error.value.problems[0].code == "not_weighted"
