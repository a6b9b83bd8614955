"""When a rank runs out of memory within a step, save the state from the beginning of the step. The step's update needs
an exchange that this rank does not reach, so no rank has made the update: together, the ranks still hold the state from
the beginning of the step. The other ranks may be stuck in any collective. So the failed rank notifies them through the
supervisor. On each rank, a thread receives the note and writes the rank's piece without any exchange. Once the last
piece has been written, the pieces form an ordinary checkpoint, from which the run continues.
"""

from __future__ import annotations

import gc
import re
import resource
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.accelerators import device_memory, on_chip, own_stream, release_unused
from trainspec_cli.engine.checkpoint.files import kept_buffers
from trainspec_cli.engine.comm.json_collectives import broadcast_json, errors_together
from trainspec_cli.engine.digest import Mark, wait_for
from trainspec_cli.engine.observe.journal import DirectiveLog
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.optim.optimizer import clear_gradients
from trainspec_cli.engine.parallel.data_parallel import abandon_passes
from trainspec_cli.engine.parallel.pipeline import forget_visits
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.recipe.records import read_record, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Relief, Shortage
from trainspec_cli.run.channel.messages import ShortageNote
from trainspec_cli.run.folder.accounting import read_reliefs
from trainspec_cli.run.folder.event_types.events import MemoryEvent, WarningEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.recovery.memory import next_setting, rank_setting, with_reliefs

POLL_S = 0.25
OTHERS_S, OTHERS_TIMES = 30.0, 10.0
"""Time limit for the other ranks' pieces: a constant in seconds, plus a multiple of the time that this rank's piece
took."""


class Emergency:
    """Writes one rank's part of an emergency checkpoint. The main thread calls `begin_step` before each step."""

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints, watch: StepWatch):
        self._run_dir = run.run_dir
        self._supervisor = run.supervisor
        self._state = run.state
        self._checkpoints = checkpoints
        self._watch = watch
        self._progress: TrainProgress | None = None
        self._mark: Mark | None = None
        self._saved_step = -1
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.kept: dict[str, Tensor] = {}
        """Copies, from the beginning of the step, of values that change within it (running statistics)."""
        self.buffers = [pair for part in run.state.parts for pair in kept_buffers(part)]
        if dist.get_world_size() > 1:
            threading.Thread(target=self._await_notes, name="emergency", daemon=True).start()

    def begin_step(self, progress: TrainProgress) -> None:
        """Begin a step. Until its update, the state remains that of `progress`."""
        self.kept = {f"model.{name}": buffer.clone() for name, buffer in self.buffers}
        self._mark = self._state.clock.mark()
        self._progress = progress

    def end_step(self) -> None:
        """Record that the update has been made. Until the next step begins, there is nothing to save."""
        self._progress = None

    def save(self) -> bool:
        """Save this rank's piece, notify the other ranks, and wait for the checkpoint. Return whether it is
        complete."""
        progress = self._progress
        assert progress is not None, "called within a step"
        started = time.monotonic()
        try:
            self._supervisor.send(ShortageNote(dist.get_rank(), progress.step))
            self._save_own(progress)
        except OSError:  # for example if the disk is full; the caller reports that nothing was saved
            return False
        own_s = time.monotonic() - started
        deadline = time.monotonic() + OTHERS_S + OTHERS_TIMES * own_s
        while not (whole := self._run_dir.manifest(progress.step).is_file()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return whole

    def close(self) -> None:
        self._closed.set()

    def _await_notes(self) -> None:
        """Wait for notes from failed ranks. A note may concern the step that follows this rank's current step."""
        notes: list[ShortageNote] = []
        while not self._closed.wait(POLL_S):
            notes += self._supervisor.receive(ShortageNote)
            progress = self._progress
            if progress is not None and any(note.step == progress.step for note in notes):
                self._save_own(progress)
                return

    def _save_own(self, progress: TrainProgress) -> None:
        """Save this rank's piece once. On a GPU this uses a separate stream, because the step's stream may be waiting
        for other ranks."""
        with self._lock:
            if self._saved_step == progress.step:
                return
            assert self._mark is not None, "called within a step"
            wait_for(self._mark)
            with self._watch.between_steps(), own_stream(self._state.device):
                self._checkpoints.save_independently(progress.step, progress.samples, self.kept)
            self._saved_step = progress.step


# Detect out-of-memory errors, and report them to the supervisor with measurements.


OUT_OF_MEMORY = "out_of_memory"
"""The error code of out-of-memory errors."""
_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA(_ERROR| error:) ?(OUT_OF_MEMORY|out of memory)|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|Cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
"""Messages of out-of-memory errors that torch and its libraries raise as plain RuntimeErrors."""


class OutOfMemory(WorkerError):  # noqa: N818 - the field's term
    """A rank ran out of memory, and its processes cannot continue."""

    def __init__(self, shortage: Shortage, message: str, hint: str):
        super().__init__(message, code=OUT_OF_MEMORY, hint=hint)
        self.shortage = shortage


class PassesOutOfMemory(Exception):  # noqa: N818 - as above
    """A rank ran out of memory in a forward or backward pass, so no rank can have made the step's update."""

    def __init__(self, samples: int):
        super().__init__(f"out of memory in the forward or backward pass of {samples} samples at a time")
        self.samples = samples


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a failed allocation, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def measure_shortage(plan: Plan, setting: MemorySetting, device: torch.device) -> Shortage:
    """Return a record of the shortage in `plan`'s layout, with this process's current memory use and its limit."""
    layout = plan.layout.describe()
    if on_chip(device):
        memory = device_memory(device)
        return Shortage(setting, layout, memory.reserved, memory.total)
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in soft if limit != resource.RLIM_INFINITY]
    return Shortage(setting, layout, psutil.Process().memory_info().rss, min(limits, default=None))


def describe_cause(cause: BaseException) -> str:
    """Return the first line of an error's message, or the error's name if it has no message, like a bare
    MemoryError."""
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def out_of_memory(plan: Plan, shortage: Shortage, cause: BaseException) -> OutOfMemory:
    """Return the error that ends this process. The supervisor restarts the run if there is another setting to try."""
    failed = shortage.failed
    message = f"out of memory with {failed.describe()}: {describe_cause(cause)}"
    tried = [one for one in plan.memory_ladder if rank_setting(one) < rank_setting(failed)]
    if tried:
        message += f"; tried before: {'; '.join(one.describe() for one in tried)}"
    hint = "use a smaller model, a shorter data.seq_len, or more devices that share the state (layout.dp_shard)"
    if plan.spec.scheduler.mode == "off" and failed.micro_batch_size > 1:
        smaller = f"batching.micro_batch_size={failed.micro_batch_size // 2}"
        hint = f"set {smaller}, or scheduler=advise, which lets a run reduce its memory use by itself and continue"
    return OutOfMemory(shortage, message, hint)


# Handle steps that run out of memory: repeat a step with smaller micro-batches, or save the state for a restart.
#
# A rank that does not communicate with others repeats the step in place. Otherwise, the other ranks are waiting in
# collectives that this rank has left. They save the state from the beginning of the step (`Emergency`), all processes
# end, and the supervisor restarts them with the next setting of the plan's ladder (`run/recovery/memory.py`). With
# replica groups, the failed group heals from the others instead.


Made = TypeVar("Made")
NOT_SAVED = "out of memory, and the state could not be saved: the run continues from an earlier checkpoint"


def recall_reliefs(plan: Plan, run_dir: RunDir) -> Plan:
    """Return `plan` with the layout changes that the run has made so far because it ran out of memory. Only rank 0
    reads them, because another replica group may be writing. Raises MachineError on every rank if a change cannot be
    followed."""
    found: list[Relief] = []
    if not plan.memory_ladder:
        return plan
    with errors_together():
        if dist.get_rank() == 0:
            found = read_reliefs(run_dir, plan.layout.describe())
    lines = [to_plain(relief) for relief in found]
    return with_reliefs(plan, broadcast_json(lines, lambda lines: [read_record(Relief, line) for line in lines]))


class MemoryRelief:
    """Takes steps in one layout, and handles out-of-memory errors. Called collectively by all ranks of the replica
    group."""

    def __init__(self, run: TrainingRun, checkpoints: Checkpoints, watch: StepWatch, limit: Callable[[int], None]):
        """`limit` is called to set the maximum number of samples that a rank may process at a time."""
        self._run = run
        self._limit = limit
        self._log = DirectiveLog(run.run_dir, run.journal)
        self._setting = run.plan.memory_setting
        self._emergency: Emergency | None = None
        if run.plan.memory_ladder and run.group is None:
            checkpoints.agree()
            self._emergency = Emergency(run, checkpoints, watch)

    def make_step(self, progress: TrainProgress, attempt: Callable[[], Made]) -> Made:
        """Return the result of `attempt`, which takes the step after `progress` and may be called several times.

        Raises OutOfMemory if a rank ran out of memory and these processes cannot continue.
        """
        while True:
            if self._emergency:
                self._emergency.begin_step(progress)
            try:
                made = attempt()
            except PassesOutOfMemory as error:
                failure = error  # the memory held by the error's frames is freed below, after this handler
            else:
                if self._emergency:
                    self._emergency.end_step()
                return made
            self._relieve(progress, failure)

    def explain(self, error: Exception) -> OutOfMemory | None:
        """If this rank ran out of memory outside a step's passes, return the error with measurements."""
        if not is_out_of_memory(error):
            return None
        shortage = measure_shortage(self._run.plan, self._setting, self._run.state.device)
        return out_of_memory(self._run.plan, shortage, error)

    def close(self) -> None:
        self._log.close()
        if self._emergency:
            self._emergency.close()

    def _relieve(self, progress: TrainProgress, failure: PassesOutOfMemory) -> None:
        """Prepare the step for another attempt, or save the state and raise OutOfMemory."""
        cause = failure.__cause__ or failure
        failed = replace(self._setting, micro_batch_size=failure.samples)
        shortage = measure_shortage(self._run.plan, failed, self._run.state.device)
        traceback.clear_frames(cause.__traceback__)
        traceback.clear_frames(failure.__traceback__)
        clear_gradients(self._run.state.shares)
        # These processes can repeat the step if no other process waits for this rank and the next setting reduces the
        # memory of the same model. Any other change requires a restart.
        alone = dist.get_world_size() == 1 and hasattr(FSDPModule, "reset_iter_state")  # since torch 2.13
        taken = next_setting(self._run.plan.memory_ladder, failed)
        if alone and taken and (taken.recompute, taken.offload) == (failed.recompute, failed.offload):
            self._begin_anew()
            self._log.write(
                MemoryEvent(
                    step=progress.step,
                    layout=shortage.layout,
                    failed=shortage.failed,
                    taken=taken,
                    restarts=False,
                    reason=f"out of memory: {describe_cause(cause)}",
                    used_bytes=shortage.used_bytes,
                    limit_bytes=shortage.limit_bytes,
                    group=self._run.group_field,
                )
            )
            self._setting = taken
            self._limit(taken.micro_batch_size)
            return
        if self._emergency and not self._emergency.save():
            self._run.journal.write(WarningEvent(step=progress.step, message=NOT_SAVED))
        raise out_of_memory(self._run.plan, shortage, cause)

    def _begin_anew(self) -> None:
        """Undo the changes that the step's passes have made."""
        for part in self._run.state.parts:
            abandon_passes(part)
        clear_gradients(self._run.state.shares)
        forget_visits(self._run.state.routers)
        self._run.state.stages.noise.begin(None)
        if self._emergency:
            for name, buffer in self._emergency.buffers:
                buffer.copy_(self._emergency.kept[f"model.{name}"])
        gc.collect()
        release_unused(self._run.state.device)
