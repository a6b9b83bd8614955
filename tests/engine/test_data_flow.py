"""A run on data that comes slowly: what its events and its report say of it. Times are compared with each other."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.build import Machinery, build_machinery
from trainspec_cli.engine.data.loader import read_ahead
from trainspec_cli.engine.data.staging import SLOTS, Staging
from trainspec_cli.engine.optim.update import clear_gradients
from trainspec_cli.engine.signals import StopRequest
from trainspec_cli.engine.step import compute_gradients
from trainspec_cli.engine.trainer import Trainer
from trainspec_cli.planner.plan import plan
from trainspec_cli.report.collect import collect
from trainspec_cli.report.render import render_report
from trainspec_cli.rundir.accounting import account_run
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.batching import BatchingSpec
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.cluster import ClusterSpec, Machine
from trainspec_cli.spec.data import DataSpec
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.optim import OptimSpec
from trainspec_cli.spec.run import RunSpec, TrainSection

STEPS, FORWARD_S = 16, 0.05
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=16, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=2, micro_batch_size=1),
    train=TrainSection(max_steps=STEPS),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
PLAN = replace(plan(SPEC, Machine("host", cpu_cores=1, memory_bytes=2**34, bf16=False)), peak_flops=1e9)


@pytest.fixture
def built(one_process: None) -> Machinery:
    built = build_machinery(PLAN, torch.device("cpu"))
    for share in built.shares:
        torch.nn.init.normal_(share.local, std=0.1)
    return built


class SlowSource:
    """Each read is held up."""

    def __init__(self, delay_s: float):
        self.delay_s, self.staging = delay_s, Staging(torch.device("cpu"))

    def batches(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        return read_ahead(self._read, self.staging, start, end)

    def _read(self, step: int) -> list[MicroBatch]:
        time.sleep(self.delay_s)
        return drawn(step)

    def counted(self, positions: np.ndarray) -> int:
        return 16 * len(positions)

    def evaluate(self) -> None:
        return None

    def summarise(self, evaluated: None) -> dict[str, Any]:
        return {}

    def write_sample(self) -> None:
        return None


def drawn(step: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(50, (1, 16), generator=generator) for _ in range(2)) for _ in range(2)]


def run(built: Machinery, folder: Path, delay_s: float) -> RunDir:
    run_dir = RunDir(folder)
    write_json(run_dir.plan_json, to_plain(PLAN))
    write_json(run_dir.run_json, {"recipe": "slow", "created_at": 0.0})
    Trainer(PLAN, run_dir, SlowSource(delay_s), "", built, StopRequest()).run()
    return run_dir


def steady_steps(run_dir: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir.events(0)) if event["type"] == "step" and event["step"] > SLOTS]


def wait_share(run_dir: RunDir) -> float:
    steps = steady_steps(run_dir)
    return sum(event["time_s"]["data_wait"] for event in steps) / sum(event["step_time_s"] for event in steps)


def usual_step_s(built: Machinery, folder: Path) -> float:
    return float(np.median([event["step_time_s"] for event in steady_steps(run(built, folder, 0.0))]))


def test_reading_ahead_hides_a_slow_reader_until_it_is_slower_than_a_step(built: Machinery, tmp_path: Path) -> None:
    (part,) = built.parts
    part.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
    step_s = usual_step_s(built, tmp_path / "quick")
    hidden, exposed = (run(built, tmp_path / str(factor), factor * step_s) for factor in (0.5, 1.5))
    print(f"data wait: {wait_share(hidden):.1%} of the step at 50%, {wait_share(exposed):.1%} at 150%")
    assert wait_share(hidden) < 0.1
    assert 0.15 < wait_share(exposed) < 0.5, "a third, by arithmetic"
    buckets = account_run(exposed)
    assert buckets["data_wait"] > 0.3 * buckets["productive"]
    assert "of their time for data" in told(exposed)
    assert "of their time for data" not in told(hidden)


def told(run_dir: RunDir) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(render_report(collect(run_dir.root)))
    return output.getvalue()


def test_events_count_copies_and_allocations_and_the_steady_state_has_none(built: Machinery, tmp_path: Path) -> None:
    steps = [event for event in read_events(run(built, tmp_path, 0.0).events(0)) if event["type"] == "step"]
    assert [event["allocations"] for event in steps] == [4] * SLOTS + [0] * (STEPS - SLOTS)
    assert {(event["h2d_copies"], event["h2d_bytes"]) for event in steps} == {(0, 0)}, "the host is the device"


def test_gradients_are_added_up_in_the_buffer_of_their_reduction(built: Machinery) -> None:
    """Those of a block lie in one piece of memory, whatever number of micro-batches they are of."""
    compute_gradients(built, drawn(0), 32)
    (part,) = built.parts
    for block in part.block_modules():
        pieces = {share.to_local().untyped_storage().data_ptr() for share in gradients_of(block)}
        assert len(pieces) == 1


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(built: Machinery) -> None:
    whole = [tuple(torch.cat(tensors) for tensors in zip(*drawn(0), strict=True))]
    found = []
    for micro_batches in (drawn(0), whole):
        compute_gradients(built, micro_batches, 32)
        found.append([share.gradient.clone() for share in built.shares])
        clear_gradients(built.shares)
    for added, at_once in zip(*found, strict=True):
        torch.testing.assert_close(added, at_once, rtol=1e-4, atol=1e-6)


def gradients_of(block: Any) -> list[Any]:
    return [parameter.grad for parameter in block.parameters()]
