"""Whole runs whose ranks are not equally fast: passes that sleep, so that the machine's own speed does not count.

All assertions about time concern these sleeps: with even shares, a slow step takes at least as long.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lab.waiting import wait_for

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

RANKS, SLOW_RANK = 4, 2
SAMPLES = 24
SAMPLE_S = 0.03
"""Seconds per sample on every rank; the slow one takes twice as long."""
SLOW_STEP_S = SAMPLES / RANKS * 2 * SAMPLE_S
SLOWED, RECOVERED = 14, 64
RECIPE = (
    *("recipe=tiny", f"cluster.devices_per_node={RANKS}", f"batching.global_batch_size={SAMPLES}", "precision=fp32"),
    *("layout=fsdp", "train.log_interval_steps=1", "checkpoint.interval_steps=10"),
)


def slow_for(steps: int) -> str:
    usual = [f"throttle(step=0,rank={rank},seconds={SAMPLE_S},steps=1000)" for rank in range(RANKS)]
    return f"fault={';'.join([*usual, f'throttle(step={SLOWED},rank={SLOW_RANK},seconds={SAMPLE_S},steps={steps})'])}"


def directives(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_events(run.directives) if line["type"] == "directive"]


def compute_s(run: RunDir) -> dict[int, float]:
    """Step -> what the slow rank computed in it, the last time that it was made."""
    steps = [event for event in read_events(run.events(SLOW_RANK)) if event["type"] == "step"]
    return {event["step"]: event["time_s"]["forward"] + event["time_s"]["backward"] for event in steps}


def losses(run: RunDir) -> list[float]:
    return [event["loss"] for event in read_events(run.events(0)) if event["type"] == "step"]


def samples_in(run: RunDir, step: int) -> int:
    """Samples of the slow rank in a step."""
    earlier = [given["counts"][SLOW_RANK] for given in directives(run) if given["step"] < step]
    return earlier[-1] if earlier else SAMPLES // RANKS


def changes_of_slow_rank(run: RunDir) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The directive that takes samples from the rank while it is slow, and the one that gives them back."""
    given, fair = (directives(run) if run.directives.exists() else []), SAMPLES // RANKS
    during = (one for one in given if SLOWED < one["step"] < RECOVERED and one["counts"][SLOW_RANK] <= fair - 2)
    after = (one for one in given if one["step"] >= RECOVERED and one["counts"][SLOW_RANK] >= fair - 1)
    return next(during, None), next(after, None)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_shares_follow_a_rank_that_slows_down_and_recovers(
    start_trainspec, trainspec, tmp_path: Path, zero_stage: int
) -> None:
    """The run has no end of its own: other work of the machine makes ranks slow too, so that shares change more often
    there, and later."""
    recipe = (*RECIPE, f"layout.zero_stage={zero_stage}", "optim.schedule.kind=constant")
    run = RunDir(tmp_path / "run")
    given = (slow_for(RECOVERED - SLOWED), "scheduler=auto", "train.max_steps=100000", "run.dir=run")
    process = start_trainspec("launch", *recipe, *given)
    while None in (changes := changes_of_slow_rank(run)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 6, output
    slowed, recovered = changes
    assert slowed and recovered and slowed["step"] >= SLOWED + 3
    took_s = compute_s(run)
    for step in range(SLOWED + 1, RECOVERED + 1):
        assert took_s[step] >= samples_in(run, step) * 2 * SAMPLE_S
    eased = sorted(took_s[step] for step in range(slowed["step"] + 1, RECOVERED))
    assert eased[len(eased) // 2] < SLOW_STEP_S
    assert f"step {slowed['step']}: shares are now " in output
    assert "recovered" not in output
    said = trainspec("report", "run").stdout
    assert f"step {recovered['step']}: shares are now " in said
    assert " achieved" in said
    reported = json.loads(trainspec("report", "run", "--json").stdout)["directives"]
    assert [one["counts"] for one in reported] == [one["counts"] for one in directives(run)]

    last = f"train.max_steps={len(losses(run))}"
    ended = trainspec("launch", *recipe, last, "scheduler=off", "run.dir=even")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    even = RunDir(tmp_path / "even")
    assert losses(run) == pytest.approx(losses(even), rel=1e-6)
    assert not even.directives.exists()


@pytest.mark.clause("SCHED-4")
@pytest.mark.slow
def test_advice_leaves_the_bits_alone(trainspec, tmp_path: Path, read_result) -> None:
    """The rank is slow for longer than advice waits, half a minute."""
    for mode, fault in (("advise", slow_for(200)), ("off", "fault=''")):
        ended = trainspec("launch", *RECIPE, "train.max_steps=140", fault, f"scheduler={mode}", f"run.dir={mode}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    advice = directives(RunDir(tmp_path / "advise"))
    assert advice and not any(one["applied"] for one in advice)
    assert read_result("advise")["weights_sha256"] == read_result("off")["weights_sha256"]


@pytest.mark.clause("SCHED-3")
@pytest.mark.slow
def test_a_run_killed_after_a_directive_follows_it_again(
    trainspec, start_trainspec, kill_everything, tmp_path: Path, read_result
) -> None:
    """A resume starts from the checkpoint before the directive and follows it at the same step: every resume computes
    the same bits until it decides something new from its own measurements."""
    process = start_trainspec(
        "launch", *RECIPE, "train.max_steps=28", slow_for(1000), "scheduler=auto", "run.dir=first"
    )
    first = RunDir(tmp_path / "first")
    wait_for(lambda: directives(first), process, every_s=0.01)
    kill_everything(process)
    (given,) = directives(first)
    assert first.checkpoint_steps()[-1] == 10
    for copy in ("second", "damaged"):
        shutil.copytree(first.root, tmp_path / copy)
    followed_until = 28
    computed = []
    for name in ("first", "second"):
        ended = trainspec("resume", name)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        run = RunDir(tmp_path / name)
        followed, *decided = directives(run)
        assert followed == given
        followed_until = min([followed_until, *(one["step"] for one in decided)])
        steps = [event for event in read_events(run.events(0)) if event["type"] == "step"]
        computed.append({event["step"]: event["loss"] for event in steps})  # the last time that a step was made
        took_s = compute_s(run)
        assert all(took_s[step] >= SLOW_STEP_S for step in range(SLOWED + 1, given["step"] + 1))
        eased = [took_s[step] < SLOW_STEP_S for step in range(given["step"] + 1, 29)]
        assert sum(eased) > len(eased) / 2
    assert followed_until > given["step"]
    for step in range(11, followed_until + 1):
        assert computed[0][step] == computed[1][step]
    if followed_until == 28:
        assert read_result("first")["weights_sha256"] == read_result("second")["weights_sha256"]

    damaged = RunDir(tmp_path / "damaged")
    text = damaged.directives.read_text()
    damaged.directives.write_text(text.replace('"number": 1', '"number": 2'))
    ended = trainspec("resume", "damaged")
    assert ended.returncode == 4, ended.stdout + ended.stderr
    said = ended.stdout + ended.stderr
    assert "directive 2 where 1 " in said
    assert "Traceback" not in said
