"""A run on data that comes slowly: what its events and its report say of it."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab.engine_runs import CPU, MACHINE, DrawnTokens, begin_folder, fill, run_of, trainer_of
from rich.console import Console

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import SLOTS
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.optim.optimizer import clear_gradients
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.collect import collect
from trainspec_cli.reporter.render import render_report
from trainspec_cli.run.folder.accounting import account_run
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

STEPS, READ_S, TIMEOUT_S = 16, 0.1, 60
MICRO_BATCHES = 2
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=16, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=2, micro_batch_size=1),
    train=TrainSection(max_steps=STEPS),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
PLAN = replace(plan(SPEC, MACHINE), peak_flops=1e9)


@pytest.fixture
def state(one_process: None) -> TrainState:
    state = build_train_state(PLAN, CPU)
    fill(state)
    return state


class Source(DrawnTokens):
    """Shows how far the reader and the training are."""

    def __init__(self) -> None:
        super().__init__(16)
        self.asked, self.has_read = ([threading.Event() for _ in range(STEPS)] for _ in range(2))

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        step = own.starts[0] // MICRO_BATCHES
        self.prepare(step)
        self.has_read[step].set()
        return drawn(step)

    def prepare(self, step: int) -> None:
        """Work before the batch of a step is read."""


class LateSource(Source):
    """Begins to read when training already waits."""

    def prepare(self, step: int) -> None:
        assert self.asked[step].wait(TIMEOUT_S)
        time.sleep(READ_S)


class Asking(Coordinator):
    """Lets the source know which step's batch training asks for."""

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        (position, samples), *_ = steps
        self._source.asked[position // samples].set()  # type: ignore[attr-defined]
        return super().take(steps)


def drawn(step: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(50, (1, 16), generator=generator) for _ in range(2)) for _ in range(MICRO_BATCHES)]


def run(state: TrainState, folder: Path, source: Source) -> RunDir:
    run_dir = begin_folder(RunDir(folder))
    write_json(run_dir.plan_json, to_plain(PLAN))
    context = run_of(PLAN, state, run_dir)
    trainer_of(context, source, Asking(context, source)).train()
    return run_dir


def steady_steps(run_dir: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir.events(0)) if event["type"] == "step" and event["step"] > SLOTS]


def wait_share(run_dir: RunDir) -> float:
    """The median share of a step that waits for data; a step delayed by something else does not count."""
    shares = [event["time_s"]["data_wait"] / event["step_time_s"] for event in steady_steps(run_dir)]
    return float(np.median(shares))


def test_a_batch_is_read_while_the_step_before_it_computes(state: TrainState, tmp_path: Path) -> None:
    """The forward pass of a step waits for the next batch; a reader that waited for that pass would deadlock."""
    source, (part,) = Source(), state.parts
    passes = count()

    def wait_for_next_batch(*_: object) -> None:
        following = next(passes) // MICRO_BATCHES + 1
        assert following == STEPS or source.has_read[following].wait(TIMEOUT_S)

    part.register_forward_pre_hook(wait_for_next_batch)
    assert wait_share(run(state, tmp_path, source)) < 0.1


def test_waiting_for_data_is_accounted_and_told(state: TrainState, tmp_path: Path) -> None:
    late = run(state, tmp_path, LateSource())
    waits_s = [event["time_s"]["data_wait"] for event in read_events(late.events(0)) if event["type"] == "step"]
    # On a busy machine, later reads may overlap with slow steps. The timer of a sleep is not exact.
    assert max(waits_s) >= 0.9 * READ_S
    assert account_run(late).data_wait == pytest.approx(sum(waits_s))
    assert "of their time waiting for data" in told(late)


def told(run_dir: RunDir) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(render_report(collect(run_dir.root)))
    return output.getvalue()


def test_events_count_copies_and_allocations_and_the_steady_state_has_none(state: TrainState, tmp_path: Path) -> None:
    steps = [event for event in read_events(run(state, tmp_path, Source()).events(0)) if event["type"] == "step"]
    assert [event["allocations"] for event in steps] == [4] * SLOTS + [0] * (STEPS - SLOTS)
    assert {(event["h2d_copies"], event["h2d_bytes"]) for event in steps} == {(0, 0)}, "the host is the device"


def test_gradients_are_added_up_in_the_buffer_of_their_reduction(state: TrainState) -> None:
    """Those of a block lie in one piece of memory, whatever number of micro-batches they are of."""
    compute_gradients(state, drawn(0), 32)
    (part,) = state.parts
    for block in part.block_modules():
        pieces = {share.to_local().untyped_storage().data_ptr() for share in gradients_of(block)}
        assert len(pieces) == 1


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(state: TrainState) -> None:
    whole = [tuple(torch.cat(tensors) for tensors in zip(*drawn(0), strict=True))]
    found = []
    for micro_batches in (drawn(0), whole):
        compute_gradients(state, micro_batches, 32)
        found.append([share.gradient.clone() for share in state.shares])
        clear_gradients(state.shares)
    for added, at_once in zip(*found, strict=True):
        torch.testing.assert_close(added, at_once, rtol=1e-4, atol=1e-6)


def gradients_of(block: Any) -> list[Any]:
    return [parameter.grad for parameter in block.parameters()]
