"""Goodput that others published, beside the simulation with the rates that they give."""

from datetime import date

import pytest

from tests.bench.published_goodput import PublishedRun, compare_runs, main


@pytest.fixture(scope="module")
def runs() -> dict[str, PublishedRun]:
    return {run.name: run for run in compare_runs()}


def test_what_agrees_within_two_points_and_what_does_not(runs: dict[str, PublishedRun]) -> None:
    """A run that agrees, or no longer does, changes docs/claims.md and what it says about the others."""
    assert {name for name, run in runs.items() if run.agrees} == {"Llama 3 405B", "MegaScale"}
    assert -0.04 < runs["ByteRobust"].difference < 0, "its rates were not published: those of Llama 3 lose more"
    assert 0 < runs["BLOOM"].difference < 0.05, "failures alone lose less than the run did"
    assert runs["OPT-175B"].difference > 0.2, "people were what this run waited for"


def test_published_progress_is_steps_over_days(runs: dict[str, PublishedRun]) -> None:
    days = (date(2022, 7, 4) - date(2022, 3, 18)).days
    assert runs["BLOOM"].published == pytest.approx((94767 - 12695) * 105.22 / 86400 / days)
    assert not runs["BLOOM"].is_bound and runs["MegaScale"].is_bound


def test_megascale_loses_what_its_own_rates_say(runs: dict[str, PublishedRun]) -> None:
    """A hundred failures of 25 min in four weeks, and half an interval of Daly's for each, beside its checkpoints."""
    mtbf_s = 28 * 86_400 / 100
    interval_s = (2 * 10 * mtbf_s) ** 0.5
    lost = 100 * 1500 / (28 * 86_400) + interval_s / 2 / mtbf_s + 10 / interval_s
    assert runs["MegaScale"].simulated == pytest.approx(1 - lost, abs=0.01)


def test_what_a_source_leaves_open_widens_the_bounds(runs: dict[str, PublishedRun]) -> None:
    told, open_ = runs["MegaScale"], runs["Llama 3 405B"]
    assert told.left_open == ("checkpoints",)
    assert open_.left_open == ("detection", "restart", "checkpoints")
    assert open_.high - open_.low > 2 * (told.high - told.low)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[1].startswith("Llama 3 405B      >90.0%")
