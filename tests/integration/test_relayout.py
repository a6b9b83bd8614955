"""Whole runs that change their layout: killed in the middle of a change, and refused the memory for one."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir

RECIPE = (
    *("recipe=tiny", "model.num_layers=4", "cluster.devices_per_node=2", "precision=fp32", "layout=fsdp"),
    *("train.max_steps=20", "checkpoint.interval_steps=8", "checkpoint.mode=sync"),
)
TO_PIPELINE, MOVED = "{step: 10, pp: 2, dp_shard: 1}", "{step: 14, pp: 2, dp_shard: 1, stage_layers: [3, 1]}"
CHANGES = f"scheduler.changes=[{TO_PIPELINE}, {MOVED}]"


def directives(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in read_events(run.directives) if line["type"] == "directive"]


def losses(run: RunDir) -> dict[int, float]:
    """Step -> its loss, the last time that it was made."""
    return {event["step"]: event["loss"] for event in read_events(run.events(0)) if event["type"] == "step"}


@pytest.mark.slow
def test_a_run_changes_its_layout_and_one_killed_meanwhile_repeats_it_to_the_bit(
    trainspec, tmp_path: Path, read_result, whole_of
) -> None:
    ended = trainspec("launch", *RECIPE, CHANGES, "run.dir=changed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    changed = RunDir(tmp_path / "changed")
    first, second = directives(changed)
    assert (first["step"], first["kind"], first["layout"]["pp"], first["counts"]) == (10, "layout", 2, [8])
    assert (second["step"], second["kind"], second["layout"]["stage_layers"]) == (14, "layers", [3, 1])
    assert first["before"]["dp_shard"] == 2
    assert second["before"] == first["layout"]
    assert all(line["applied"] and line["moved_bytes"] and line["peak_bytes"] for line in (first, second))
    assert losses(changed) == pytest.approx(losses(whole_of(*RECIPE)), rel=1e-6)
    said = " ".join(trainspec("report", "changed").stdout.split())
    assert "step 10: " in said and "now pp=2," in said and "was dp_shard=2 zero" in said
    assert "step 14: " in said and "now 3, 1," in said

    fault = "fault=move_kill(step=14,rank=1)"
    ended = trainspec("launch", *RECIPE, CHANGES, fault, "run.dir=killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    killed = RunDir(tmp_path / "killed")
    assert [line["number"] for line in read_events(killed.events(0)) if line["type"] == "directive"] == [1, 2]
    assert [line["layout"] for line in directives(killed)] == [first["layout"], second["layout"]]
    starts = [event["step"] for event in read_events(killed.events(0)) if event["type"] == "start"]
    assert starts == [0, 8]
    assert losses(killed) == losses(changed)
    assert read_result("killed")["weights_sha256"] == read_result("changed")["weights_sha256"]


@pytest.mark.slow
def test_a_run_without_the_memory_for_a_change_keeps_its_layout(trainspec, tmp_path: Path, whole_of) -> None:
    fault = "fault=move_oom(step=10,rank=1)"
    ended = trainspec("launch", *RECIPE, f"scheduler.changes=[{TO_PIPELINE}]", fault, "run.dir=kept")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kept = RunDir(tmp_path / "kept")
    (tried,) = directives(kept)
    assert (tried["applied"], tried["layout"]["pp"]) == (False, 2)
    assert ": rank 1: OutOfMemoryError: " in tried["reason"]
    said = " ".join(ended.stdout.split())
    assert "step 10: " in said and "changed to pp=2: " in said
    plain = whole_of(*RECIPE)
    assert losses(kept) == losses(plain)
    assert read_json(kept.result_json)["weights_sha256"] == read_json(plain.result_json)["weights_sha256"]
    assert json.loads(trainspec("report", "kept", "--json").stdout)["directives"][0]["applied"] is False


SAMPLE_S = 0.1
"""Seconds that a sample takes in all layers together, on every rank; the slow rank takes twice as long."""
SLOWED, RECOVERED = 14, 60


def wait_for_directives(process: subprocess.Popen[str], run: RunDir, count: int) -> None:
    while len(directives(run)) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_layers_move_off_a_slow_pipeline_rank_and_back(start_trainspec, tmp_path: Path) -> None:
    """The run has no end of its own: on a busy machine speeds are known later, and a change that once took long is
    made again only where the steps that are left win as much back. Its work is small, so that its times are those of
    the throttle."""
    usual = [f"throttle(step=0,rank={rank},seconds={SAMPLE_S},steps=100000)" for rank in range(2)]
    slow = f"throttle(step={SLOWED},rank=1,seconds={SAMPLE_S},steps={RECOVERED - SLOWED})"
    recipe = (
        *("recipe=tiny", "model.num_layers=6", "cluster.devices_per_node=2", "precision=fp32", "layout.pp=2"),
        *("layout.dp_shard=1", "batching.global_batch_size=8", "train.max_steps=100000", "data.seq_len=16"),
        *("scheduler.max_stage_layers=5", "scheduler.may_change=[shares,layers]"),
    )
    run = RunDir(tmp_path / "run")
    process = start_trainspec("launch", *recipe, "scheduler=auto", f"fault={';'.join([*usual, slow])}", "run.dir=run")
    wait_for_directives(process, run, 2)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 6, output
    away, back = directives(run)[:2]
    assert (away["kind"], away["layout"]["stage_layers"], away["before"]["stage_layers"]) == ("layers", [4, 2], None)
    assert SLOWED + 3 <= away["step"] < RECOVERED < back["step"]
    assert back["layout"]["stage_layers"] is None
    assert away["reason"].startswith("pipeline rank 1 takes ")
    assert away["expected_s"] < away["before_s"]
    achieved = [line for line in read_events(run.directives) if line["type"] == "achieved"]
    assert achieved[0]["number"] == away["number"]
    assert achieved[0]["achieved_s"] < away["before_s"]


HELD_UP, KILLED = 30, 90
ALONE = 16 * 2 * SAMPLE_S / 2 / 2
"""Seconds that the slow stage of a pipeline of two computes in a step at least."""


@pytest.mark.slow
def test_a_slow_rank_leads_to_another_layout_and_a_killed_run_follows_it(trainspec, tmp_path: Path) -> None:
    """Two stages of one layer each: no layer can move, and there is one data-parallel rank, so shares change nothing.
    With the samples divided over both ranks the slow one gets fewer."""
    usual = [f"throttle(step=0,rank={rank},seconds={SAMPLE_S / 2},steps=1000)" for rank in range(2)]
    slow = f"throttle(step={HELD_UP},rank=1,seconds={SAMPLE_S / 2},steps=1000)"
    recipe = (
        *("recipe=tiny", "model.num_layers=2", "cluster.devices_per_node=2", "precision=fp32", "layout.pp=2"),
        *("layout.dp_shard=1", "batching.global_batch_size=16", "train.max_steps=100"),
        *("checkpoint.interval_steps=25", "checkpoint.mode=sync"),
    )
    faults = f"fault={';'.join([*usual, slow, f'kill(step={KILLED},rank=1)'])}"
    for arguments in (("run.dir=plain",), ("scheduler=auto", faults, "run.dir=run")):
        ended = trainspec("launch", *recipe, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(tmp_path / "run")
    changes = [line for line in directives(run) if line["kind"] == "layout"]
    (away,) = changes
    assert (away["before"]["pp"], away["layout"]["pp"], away["applied"]) == (2, 1, True)
    assert HELD_UP + 3 <= away["step"] < KILLED
    assert "rank 1 " in away["reason"]
    assert away["before_s"] >= ALONE
    (came_to,) = [line for line in read_events(run.directives) if line["type"] == "achieved" and line["number"] == 1]
    assert came_to["achieved_s"] < away["before_s"]

    events = list(read_events(run.events(0)))
    starts = [event["step"] for event in events if event["type"] == "start"]
    assert starts == [0, 75]
    made = [(event["step"], event["loss"]) for event in events if event["type"] == "step"]
    first, again = dict(made[: KILLED + 1]), dict(made[-25:])
    assert {step: first[step] for step in range(76, KILLED + 1)} == {
        step: again[step] for step in range(76, KILLED + 1)
    }
    assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "plain")), rel=1e-6)
    said = " ".join(trainspec("report", "run").stdout.split())
    assert f"step {away['step']}: the layout" in said and "now dp_" in said
    assert " steps are expected, " in said
