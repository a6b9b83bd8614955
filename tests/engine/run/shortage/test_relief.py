"""Steps in which memory runs out: made again in place, or saved as they began; in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.drawing import slow_after
from lab.engine_runs import CPU, MACHINE, DrawnTokens, begin_folder, events_of, run_of, trainer_of, with_spec
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.files import kept_buffers
from trainspec_cli.engine.checkpoint.saver import load_newest
from trainspec_cli.engine.data.loader import cut_micro_batches
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.optim.optimizer import clear_gradients
from trainspec_cli.engine.parallel.pipeline import forget_visits
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.shortage import (
    NOT_SAVED,
    OutOfMemory,
    PassesOutOfMemory,
    is_out_of_memory,
    recall_reliefs,
)
from trainspec_cli.engine.run.step import compute_gradients
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, ScheduleSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting
from trainspec_cli.run.folder.event_types.events import MemoryEvent
from trainspec_cli.run.folder.events import EventWriter, read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.recovery.memory import build_ladder

pytestmark = pytest.mark.usefixtures("one_process")

STEPS, BATCH, TOKENS = 4, 4, 16
EXPERTS = ExpertSpec(num_experts=2, top_k=1, expert_ffn_size=8, balance_rate=0.1)
SPEC = RunSpec(
    model=DecoderModel(2, 32, 2, 1, 16, 48, 50, experts=EXPERTS),
    data=DataSpec(seq_len=TOKENS, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3, schedule=ScheduleSpec(kind="constant")),
    batching=BatchingSpec(global_batch_size=BATCH),
    train=TrainSection(max_steps=STEPS),
    cluster=ClusterSpec(devices_per_node=1, device="cpu"),
)
SOURCE = DrawnTokens(TOKENS)


Start = Callable[..., TrainingRun]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(fault=..., micro=4): a run of one process that can take less memory."""

    def start(
        fault: str = "", micro: int = BATCH, name: str = "run", ladder: bool = True, compute: str = "fp32"
    ) -> TrainingRun:
        batching = replace(SPEC.batching, micro_batch_size=micro)
        made = replace(plan(replace(SPEC, fault=fault, batching=batching), MACHINE), peak_flops=1e9, compute=compute)  # type: ignore[arg-type]
        if ladder:
            made = replace(made, memory_ladder=build_ladder(made.memory_setting, may_offload=False))
        return run_of(made, build_train_state(made, CPU), begin_folder(RunDir(tmp_path / name)))

    return start


def train(context: TrainingRun) -> None:
    trainer = trainer_of(context, SOURCE)
    try:
        trainer.train()
    finally:
        trainer.watch.close()


def weights(state: TrainState) -> list[Tensor]:
    return [tensor.clone() for tensor in state.held.tensors()]


def test_a_process_of_its_own_makes_the_step_again_with_smaller_micro_batches(start: Start) -> None:
    even, short = start(name="even"), start("oom(step=1,above=1)")
    train(even)
    train(short)
    for ours, theirs in zip(weights(short.state), weights(even.state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    ours, theirs = ([event["loss"] for event in events_of(context, "step")] for context in (short, even))
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=1e-6)
    given = list(read_events(short.run_dir.directives))
    sizes = [(one["step"], one["failed"]["micro_batch_size"], one["taken"]["micro_batch_size"]) for one in given]
    assert sizes == [(1, 4, 2), (1, 2, 1)], "and the steps after it begin with what was left"
    assert not any(one["restarts"] for one in given)
    assert [one["taken"] for one in given] == [one["taken"] for one in events_of(short, "memory")]


def test_an_error_without_a_message_is_named_in_the_reason(start: Start) -> None:
    """Python's own MemoryError has none."""
    context, failures = start(), [MemoryError()]
    trainer = trainer_of(context, SOURCE)

    def attempt() -> None:
        compute_gradients(context.state, SOURCE.read(OwnSamples((0,), (2,))), 2 * TOKENS)
        if failures:
            raise PassesOutOfMemory(BATCH) from failures.pop()

    trainer.relief.make_step(TrainProgress(), attempt)
    (written,) = read_events(context.run_dir.directives)
    assert written["reason"].endswith(": MemoryError")
    trainer.relief.close()
    trainer.coordinator.leave()
    trainer.watch.close()


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize(("micro_batch", "compute"), slow_after(1, [(1, "fp32"), (2, "fp32"), (2, "bf16")]))
def test_passes_that_were_cut_short_leave_nothing_behind(start: Start, at: str, micro_batch: int, compute: str) -> None:
    """In the first micro-batch, or in the second, when gradients have been added up (of bf16 ones in fp32); in the
    midst of the model."""
    context = start(compute=compute)
    trainer = trainer_of(context, SOURCE)
    state, pairs = context.state, [SOURCE.read(OwnSamples((first,), (2,)))[0] for first in (0, 2, 4)]
    compute_gradients(state, pairs, 6 * TOKENS)
    wanted = [share.gradient.clone() for share in state.shares]  # type: ignore[union-attr]
    clear_gradients(state.shares)
    forget_visits(state.routers)
    passes, attempts = 0, 0

    def fail_in_the_midst(*_arguments: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == micro_batch:
            raise torch.OutOfMemoryError("no memory")

    block = state.parts[0].block_modules()[0].attention
    (block.register_forward_hook if at == "forward" else block.register_full_backward_hook)(fail_in_the_midst)

    def attempt() -> Tensor:
        nonlocal attempts
        attempts += 1
        return compute_gradients(state, pairs, 6 * TOKENS)

    trainer.relief.make_step(TrainProgress(), attempt)
    assert attempts == 2
    for share, gradient in zip(state.shares, wanted, strict=True):
        torch.testing.assert_close(share.gradient, gradient, rtol=1e-6, atol=1e-7)
    assert [int(router.tokens_per_expert_E.sum()) for router in state.routers] == [6 * TOKENS] * 2
    trainer.relief.close()
    trainer.coordinator.leave()


def test_the_beginning_of_a_step_that_cannot_be_made_is_saved(start: Start) -> None:
    """One sample is the least that these processes can take; the next start continues there, not a step later."""
    context = start("oom(step=2,above=0)", micro=2)
    with pytest.raises(OutOfMemory, match=r"batches of 1 .*recompute=none") as raised:
        train(context)
    assert raised.value.shortage.failed == MemorySetting(1, "none", "none")
    assert raised.value.shortage.layout == "one process"
    assert raised.value.exit_code == 5
    assert ": micro-batches of 2 " in str(raised.value)
    assert context.run_dir.checkpoint_steps() == [2]
    whole = start(name="whole")
    short = with_spec(whole, train=TrainSection(max_steps=2))
    train(short)
    again = start(name="again")
    again.run_dir.checkpoints.mkdir(parents=True)
    context.run_dir.checkpoint(2).rename(again.run_dir.checkpoint(2))
    restored = load_newest(again.run_dir, again.state.held, CPU)
    assert restored is not None and restored.manifest.about.samples == 2 * BATCH
    for ours, theirs in zip(weights(again.state), weights(short.state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_state_that_cannot_be_saved_is_reported_and_the_shortage_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "save_independently", fail)
    context = start("oom(step=2,above=0)", micro=1)
    with pytest.raises(OutOfMemory):
        train(context)
    assert [event["message"] for event in events_of(context, "warning")] == [NOT_SAVED]
    assert context.run_dir.checkpoint_steps() == []


def test_without_a_ladder_a_shortage_ends_the_run_at_once(start: Start) -> None:
    context = start("oom(step=1,above=1)", ladder=False)
    with pytest.raises(OutOfMemory, match="micro-batches of 4 "):
        train(context)
    assert context.run_dir.checkpoint_steps() == []
    assert not context.run_dir.directives.exists()


def test_memory_that_runs_out_elsewhere_is_told_too(start: Start) -> None:
    context = start("oom(step=1)")
    with pytest.raises(OutOfMemory, match="no memory") as raised:
        train(context)
    assert raised.value.shortage.failed == MemorySetting(BATCH, "none", "none")
    other = start("exception(step=1)", name="other")
    with pytest.raises(RuntimeError, match="fault injected"):
        train(other)


def test_statistics_of_a_step_that_was_not_made_are_not_saved(tmp_path: Path) -> None:
    """Batch norm's running statistics change in each micro-batch's backward."""
    spec = RunSpec(
        model=ConvModel(architecture="resnet", input_size=(8, 8), widths=(8,), blocks=(1,), num_classes=2),
        data=replace(SPEC.data, seq_len=1, source="phantom"),
        optim=SPEC.optim,
        batching=BatchingSpec(global_batch_size=4, micro_batch_size=2),
        train=TrainSection(max_steps=2),
        cluster=SPEC.cluster,
    )
    made = replace(plan(spec, MACHINE), peak_flops=1e9)
    made = replace(made, memory_ladder=build_ladder(made.memory_setting, keeps_micro_batches=True, may_offload=False))
    run_dir = begin_folder(RunDir(tmp_path / "conv"))
    state = build_train_state(made, CPU)
    after_first: list[Tensor] = []
    trainer = trainer_of(run_of(made, state, run_dir), Pictures(1))
    beat = trainer.watch.beat
    trainer.watch.beat = lambda step: (after_first.extend(statistics(state)), beat(step))[1]  # type: ignore[method-assign]
    backwards = 0

    def fail_in_the_last(kind: str, samples: int) -> None:
        nonlocal backwards
        backwards += kind == "backward"
        if backwards == 4:  # two of the first step, two of the second
            raise torch.OutOfMemoryError("no memory")

    state.stages.allowance.check = fail_in_the_last  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory):
        trainer.train()
    trainer.watch.close()
    assert any(not torch.equal(now, then) for now, then in zip(statistics(state), after_first, strict=True))
    load_newest(run_dir, state.held, CPU)
    for now, then in zip(statistics(state), after_first, strict=True):
        assert torch.equal(now, then)


def statistics(state: TrainState) -> list[Tensor]:
    return [buffer.clone() for _, buffer in kept_buffers(state.parts[0])]


class Pictures(DrawnTokens):
    def read(self, own: OwnSamples) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(own.starts[0])
        whole = torch.randn(own.samples, 3, 8, 8, generator=generator), torch.arange(own.samples) % 2
        return cut_micro_batches(whole, own)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error: Exception, found: bool) -> None:
    assert is_out_of_memory(error) is found


def test_what_torch_raises_on_this_host_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


# What a later start follows


def relieved(run_dir: RunDir, taken: MemorySetting, layout: str = "one process", size: int = 4) -> None:
    writer = EventWriter(run_dir.directives, -1)
    failed = MemorySetting(size, "none", "none")
    writer.write(MemoryEvent(step=3, layout=layout, failed=failed, taken=taken, restarts=True, reason="x"))
    writer.close()


def test_a_later_start_recalls_what_was_taken_in_its_layout(start: Start) -> None:
    context, taken = start(), MemorySetting(2, "none", "none")
    relieved(context.run_dir, taken)
    relieved(context.run_dir, MemorySetting(1, "full", "none"), layout="dp_shard=2")
    assert recall_reliefs(context.plan, context.run_dir).memory_setting == taken
    silent: Plan = replace(context.plan, memory_ladder=())
    assert recall_reliefs(silent, context.run_dir) is silent


@pytest.mark.parametrize("taken", [MemorySetting(0, "none", "none"), MemorySetting(1, "most", "none")])  # type: ignore[arg-type]
def test_a_directive_that_cannot_be_followed_is_refused(start: Start, taken: MemorySetting) -> None:
    context = start()
    relieved(context.run_dir, taken)
    with pytest.raises(MachineError, match="cannot follow"):
        recall_reliefs(context.plan, context.run_dir)
