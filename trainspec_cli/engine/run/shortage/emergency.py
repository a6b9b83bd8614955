"""Save the state of a step's beginning where the memory of a rank runs out within the step.

The step's update needs an exchange that this rank does not reach, so no rank has made it: all of them hold the state of
the step's beginning, in pieces. The others may wait in any collective, for ever. So the rank that failed leaves a note
in the run folder, a thread of each other rank finds it, and each rank writes its own piece without exchanging anything.
With the last piece it is a checkpoint like any other, from which the run goes on.
"""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.accelerators import own_stream
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.parts import kept_buffers
from trainspec_cli.engine.marks import Mark, mark, wait_for
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.coordinator import TrainProgress
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.shortages import ShortageNote, leave_note, read_note

LOOK_INTERVAL_S = 0.25
PATIENT_S, MOST_PATIENT_S = 1.0, 5.0
"""A step that lasts longer than this, and twice as long as the one before it, may wait for a rank that failed; every
step that lasts longer than the second may."""
RANKS_A_LOOK = 512
"""For every so many ranks the interval between two looks grows by `LOOK_INTERVAL_S`: they may share the server of a
file system."""
OTHERS_S, OTHERS_TIMES = 30.0, 10.0
"""The others' pieces are waited for so long, and so many times longer than the own one took."""


class Emergency:
    """One rank's part in it. The main thread calls `begin_step` before each step."""

    def __init__(self, run_dir: RunDir, state: TrainState, checkpoints: Checkpoints, watch: StepWatch):
        self._run_dir, self._state, self._checkpoints, self._watch = run_dir, state, checkpoints, watch
        self._progress: TrainProgress | None = None
        self._mark: Mark | None = None
        self._began_s, self._last_s = time.monotonic(), 0.0
        self._saved_step = -1
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.kept: dict[str, Tensor] = {}
        """Values that change within a step (running statistics), as they were when it began."""
        self._buffers = [pair for part in state.parts for pair in kept_buffers(part)]
        if dist.get_world_size() > 1:
            threading.Thread(target=self._look_for_notes, name="emergency", daemon=True).start()

    def begin_step(self, progress: TrainProgress) -> None:
        """The state is that of `progress` until this step's update."""
        self._began_s = time.monotonic()
        self.kept = {f"model.{name}": buffer.clone() for name, buffer in self._buffers}
        self._mark = mark(on_gpu=self._state.clock.on_gpu)
        self._progress = progress

    def restore_kept(self) -> None:
        """Set what changes within a step back to its beginning."""
        for name, buffer in self._buffers:
            buffer.copy_(self.kept[f"model.{name}"])

    def end_step(self) -> None:
        """The update is made: there is nothing to save until the next step begins."""
        self._last_s, self._progress = time.monotonic() - self._began_s, None

    def save(self) -> bool:
        """Save this rank's piece, tell the others, and wait until the checkpoint is whole; False where it is not."""
        progress = self._progress
        assert progress is not None, "a step has begun"
        started = time.monotonic()
        try:
            leave_note(self._run_dir, ShortageNote(dist.get_rank(), progress.step))
            self._save_own(progress)
        except OSError:  # of a full disk, say: the caller reports that nothing was saved
            return False
        own_s = time.monotonic() - started
        deadline = time.monotonic() + OTHERS_S + OTHERS_TIMES * own_s
        while not (whole := self._run_dir.manifest(progress.step).is_file()) and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)
        return whole

    def close(self) -> None:
        self._closed.set()

    def _look_for_notes(self) -> None:
        """A healthy step is not looked at, unless it is long."""
        interval_s = LOOK_INTERVAL_S * (1 + dist.get_world_size() // RANKS_A_LOOK)
        while not self._closed.wait(interval_s):
            progress = self._progress
            patience_s = min(MOST_PATIENT_S, max(PATIENT_S, 2 * self._last_s))
            if progress is None or time.monotonic() - self._began_s < patience_s:
                continue
            note = read_note(self._run_dir)
            if note is not None and note.step == progress.step:
                self._save_own(progress)
                return

    def _save_own(self, progress: TrainProgress) -> None:
        """Save the own piece once. On a GPU by a stream of its own, since that of the step may wait for other ranks."""
        with self._lock:
            if self._saved_step == progress.step:
                return
            assert self._mark is not None, "a step has begun"
            wait_for(self._mark)
            with self._watch.between_steps(), own_stream(self._state.device):
                self._checkpoints.save_where_it_stands(progress.step, progress.samples, self.kept)
            self._saved_step = progress.step
