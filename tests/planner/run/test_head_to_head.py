"""The published comparison of migration, restarts and torchft, planned with trainspec's mechanisms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.head_to_head import (
    INTERVAL_STEPS,
    MECHANISMS,
    PUBLISHED_MIN,
    SPARED,
    STEP_S,
    Planned,
    describe_job,
    implied_failure_s,
    implied_step_s,
    main,
    plan,
)
from trainspec_cli.run.recovery.reliability import durations

PAGE = Path(__file__).parents[3] / "docs/benchmarks.md"


@pytest.fixture(scope="module")
def planned() -> dict[str, Planned]:
    return {mechanism.name: plan(mechanism) for mechanism in MECHANISMS}


def test_each_minute_more_than_the_fitted_run_has_a_cause(planned: dict[str, Planned]) -> None:
    for one in planned.values():
        explained = PUBLISHED_MIN["migration"] + one.step_min + sum(one.lost_min.values())
        assert one.minutes == pytest.approx(explained, abs=0.2)


def test_each_mechanism_loses_less_than_the_one_before(planned: dict[str, Planned]) -> None:
    every, auto, copies, standby, groups, short = (one.minutes for one in planned.values())
    assert PUBLISHED_MIN["migration"] < standby < groups < copies < auto < every < PUBLISHED_MIN["restart"] < short


def test_a_published_restart_takes_longer_than_a_planned_one() -> None:
    """What a failure costs there, less half of its interval, is more than twice a planned restart."""
    job = describe_job()
    restart_s = implied_failure_s(PUBLISHED_MIN["restart"]) - INTERVAL_STEPS * STEP_S / 2
    ours_s = durations(SPARED, job.state_bytes_per_device, job.load_s).restart_s
    assert (restart_s, ours_s) == (pytest.approx(1413, abs=5), pytest.approx(616, abs=5))


def test_a_published_step_of_torchft_takes_more_than_twice_as_long() -> None:
    assert implied_step_s(PUBLISHED_MIN["torchft"]) == pytest.approx(10.5)
    assert implied_step_s(PUBLISHED_MIN["torchft"]) > STEP_S


def test_the_figures_on_the_page(planned: dict[str, Planned], capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Failures on 64 H200")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (.+?) \| (\d[\d,]*) \|", section, re.MULTILINE))
    assert {name: int(minutes.replace(",", "")) for name, minutes in rows.items()} == {
        name: round(one.minutes) for name, one in planned.items()
    }
    main()
    assert len(capsys.readouterr().out.splitlines()) == 6 + len(MECHANISMS)
