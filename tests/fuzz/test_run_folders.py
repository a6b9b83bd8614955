"""Run folders that a crash, a full disk or a stranger has damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzz.conftest import STRANGE, damaged_bytes, some_variants, tell
from lab.drawing import slow_after

from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.event_types.events import (
    PARTS,
    CheckpointEvent,
    EndedMark,
    EndEvent,
    EvalEvent,
    LaunchMark,
    RecoveryEvent,
    SampleEvent,
    SetFigures,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

SPEC = RunSpec(
    model=DecoderModel(1, 64, 2, 2, 32, 128, 512),
    data=DataSpec(seq_len=16, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=2),
    train=TrainSection(max_steps=4),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
BEGIN = {"world_size": 1, "device_name": "a chip", "peak_flops": 1e9, "peak_source": "measured", "params": 15}
STEP = {"loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens": 32, "samples": 2, "step_time_s": 1.0, "skipped": False}
EVAL = {"heldout_loss": 2.0, "heldout_bits_per_byte": 3.0, "xz_bits_per_byte": 2.5, "seconds": 0.5}
RECOVERY = {"change": "restart", "group": None, "stall_s": None, "lost_steps": 1}


def make_run(root: Path, created_at: float = 1000.0) -> RunDir:
    """A run of four steps, ended in order, as a launch leaves it."""
    run = RunDir(root)
    about = {"recipe": "tiny", "created_at": created_at, "data_dir": None, "resumes": [], "digest": "d", "argv": []}
    write_json(run.run_json, about)
    write_json(run.plan_json, to_plain(plan(SPEC, Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True))))
    result = {"status": "done", "exit_code": 0, "peak_memory_bytes": 10**6, "weights_sha256": "ab"}
    write_json(run.result_json, result)
    run.composed_yaml.write_text("train:\n  max_steps: 4\n")
    writer = EventWriter(run.events(0), 0)
    writer.write(StartEvent(step=0, flops_per_token=1e6, unit="tokens", **BEGIN))
    for step in range(1, 5):
        writer.write(StepEvent(step=step, time_s=dict.fromkeys(PARTS, 0.125), **STEP))
    writer.write(RecoveryEvent(step=4, **RECOVERY))
    writer.write(EvalEvent(step=4, sets={"other": SetFigures(loss=1.0, bits_per_byte=2.0)}, **EVAL))
    writer.write(CheckpointEvent(step=4, path="p", bytes=9, seconds=0.5, written_s=0.6))
    writer.write(SampleEvent(step=4, prompt="once", text="upon"))
    writer.write(WarningEvent(step=4, message="hot"))
    writer.write(EndEvent(step=4, status="done", weights_sha256="ab"))
    writer.close()
    marks = EventWriter(run.supervisor_events, 0)
    marks.write(LaunchMark())
    marks.write(EndedMark(exit_code=0))
    marks.close()
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    return run


JSON_FILES = ("run_json", "plan_json", "result_json", "slurm_json", "pid_json")
CONTENT = {
    "slurm_json": {"job_id": "12"},
    "pid_json": {"pid": 1, "host": "h", "launch_id": "l"},
}


COMMANDS = {
    "runs": ("runs",),
    "report": ("report", "runs/tiny/one"),
    "report as JSON": ("report", "runs/tiny/one", "--json"),
    "report as a page": ("report", "runs/tiny/one", "--html", "page.html"),
    "resume, which leaves nothing": ("resume", "runs/tiny/one"),
    "export of a step that is not there": ("export", "runs/tiny/one", "--output", "out", "--step", "3"),
}
"""Those that read a run and start nothing."""
REPORT = [command for name, command in COMMANDS.items() if name.startswith("report")]


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_after(2, JSON_FILES))
def test_a_file_of_a_run_with_a_strange_value_or_damaged_bytes(project: Path, name: str, count: int) -> None:
    run = make_run(project / "runs/tiny/one")
    path: Path = getattr(run, name)
    content = json.loads(path.read_text()) if path.exists() else CONTENT[name]
    variants = [json.dumps(variant).encode() for variant in some_variants(content, count)]
    for damaged in (*variants, *damaged_bytes(json.dumps(content).encode(), count)):
        path.write_bytes(damaged)
        for command in COMMANDS.values():
            tell(*command)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_events_with_strange_values_or_damaged_bytes(project: Path, count: int) -> None:
    run = make_run(project / "runs/tiny/one")
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    for variant in some_variants(events, 2 * count, seed=1):
        lines = variant if isinstance(variant, list) else [variant]
        run.events(0).write_text("".join(json.dumps(event) + "\n" for event in lines))
        for command in REPORT:
            tell(*command)
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    for path in (run.events(0), run.supervisor_events):
        content = path.read_bytes()
        for damaged in damaged_bytes(content, count):
            path.write_bytes(damaged)
            for command in REPORT:
                tell(*command)
        path.write_bytes(content)


NAMES = ["run.json", "plan.json", "result.json", "pid.json", "slurm.json", "kernels.json", "composed.yaml"]


@pytest.mark.parametrize("name", slow_after(1, NAMES))
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_something_else_in_the_place_of_a_file(project: Path, name: str, kind: str) -> None:
    run = make_run(project / "runs/tiny/one")
    path = run.root / name
    path.unlink(missing_ok=True)
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    for command in COMMANDS.values():
        tell(*command)


def test_one_damaged_run_hides_no_other(project: Path) -> None:
    make_run(project / "runs/tiny/whole", created_at=1000.0)
    for number, content in enumerate(("{", "[]", '{"recipe": 7}', "\xff")):
        folder = project / f"runs/tiny/damaged{number}"
        shutil.copytree(project / "runs/tiny/whole", folder)
        (folder / "run.json").write_bytes(content.encode("latin-1"))
    code, said = tell("runs")
    assert code == 0 and said.count(" damaged ") == 4 and "tiny    done" in said
    listed: list[dict[str, Any]] = json.loads(tell("runs", "--json")[1])
    assert sorted(line["status"] for line in listed) == ["damaged"] * 4 + ["done"]
    code, said = tell("report", "last")
    assert code == 0 and "runs/tiny/whole" in said
    assert " runs/tiny/damaged1, which" in said and "expected a JSON object" in said


def test_where_all_runs_are_damaged_last_is_none(project: Path) -> None:
    make_run(project / "runs/tiny/one").run_json.write_text("{")
    assert tell("runs")[0] == 0
    code, said = tell("report", "last")
    assert code == 2 and "is damaged" in said


def test_a_run_named_by_what_no_folder_is_called(project: Path) -> None:
    for name in ("", ".", "/", "..", "x" * 5000, "a" * 256, "\ud800", *filter(None, map(str, STRANGE))):
        if "\0" not in name and not name.startswith("-"):
            assert tell("report", name)[0] == 2
            assert tell("resume", name)[0] == 2


def test_the_line_of_a_damaged_event_is_told(project: Path) -> None:
    run = make_run(project / "runs/tiny/one")
    lines = run.events(0).read_text().splitlines()
    lines[2] = lines[2].replace('"step": 2', '"step": "two"')
    run.events(0).write_text("\n".join(lines) + "\n")
    code, said = tell("report", "runs/tiny/one")
    assert code == 4 and "rank00000.jsonl:3" in said and "`step` is 'two'; " in said
