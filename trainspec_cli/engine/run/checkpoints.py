"""The run's checkpoints: begun when due, put off while one is being written, awaited at the end, and told of."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import torch.distributed as dist

from trainspec_cli.engine.build.train_state import Machinery
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.memory import Place, clear
from trainspec_cli.engine.checkpoint.saver import Saved, Saver
from trainspec_cli.engine.checkpoint.store import Restored, load_newest
from trainspec_cli.engine.comm.joint_errors import raise_together
from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.engine.run.cadence import Cadence
from trainspec_cli.rundir.event_types import CadenceEvent, CheckpointEvent, WarningEvent
from trainspec_cli.rundir.memory import make_memory_folder
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import ABSENT
from trainspec_cli.spec.results.plan import Plan


class Checkpoints:
    """Of one rank; every rank makes the same calls at the same steps, and decides by what all have agreed on."""

    def __init__(
        self, plan: Plan, run_dir: RunDir, built: Machinery, recipe_digest: str, journal: Journal | GroupJournal
    ):
        self._plan, self._run_dir, self._built = plan, run_dir, built
        self._recipe_digest, self._journal = recipe_digest, journal
        self._memory = find_place(run_dir) if plan.spec.checkpoint.memory_interval_steps else None
        self._saver = Saver(run_dir, built.held, built.device, plan.spec.checkpoint.keep_last, self._memory)
        self._cadence = Cadence(plan)
        self._saved_step = -1
        self._due_since: int | None = None
        self._put_off = False
        self._begun: int | None = None
        """The step whose checkpoint may still be being written, as far as all ranks know."""
        self._newest: Saved | None = None

    def resume(self) -> Restored | None:
        """Restore the newest whole checkpoint; None where there is none."""
        restored = load_newest(self._run_dir, self._built.held, self._built.device, self._memory)
        if restored:
            self._cadence.start_at(restored.manifest.step)
            if restored.slot is None:
                self._saved_step = restored.manifest.step
            else:
                self._saver.keep_slot(restored.slot)
        if self._plan.spec.checkpoint.mode == "async" and self._plan.spec.checkpoint.interval_steps is not None:
            self._saver.prepare()
        return restored

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing one; each step tells the others."""
        return self._saver.busy

    def note_step(self, step: int, step_time_s: float, *, writing: bool) -> None:
        """What a step's figures say, the same on every rank: `writing` is whether any rank was when it ended."""
        self._cadence.note_step(step_time_s, writing=writing)
        if self._begun is not None and step > self._begun and not writing:
            self._end_pending()

    def after_step(self, step: int, samples: int, *, writes: bool = True) -> None:
        """Begin a checkpoint where one is due and none is being written.

        `samples` have been taken so far, by all ranks; not `writes`: another replica group does it for this one.
        """
        if self._cadence.is_due(step) and self._due_since is None:
            self._due_since = step
        if not writes:
            self._due_since = None
        if self._begun is not None or not writes:
            return
        if self._due_since is None:
            self._copy_if_due(step, samples)
            return
        if self._due_since < step:
            self._tell_put_off(self._due_since, step)
        self._due_since, self._saved_step = None, step
        if self._plan.spec.checkpoint.mode == "async":
            self._begun = step
            self._saver.begin(self._about(step, samples))
        else:
            self._end(self._saver.save(self._about(step, samples)))

    def _copy_if_due(self, step: int, samples: int) -> None:
        """In memory alone; one that falls due while another is being written is left out."""
        interval = self._plan.spec.checkpoint.memory_interval_steps
        if interval and step % interval == 0:
            self._begun = step
            self._saver.begin(self._about(step, samples), to_disk=False)

    def save_last(self, step: int, samples: int) -> None:
        """The state of the last step, whole on disk when this returns. Raises MachineError where that cannot be."""
        started = time.perf_counter()
        finished = self._saver.wait()
        waited_s = time.perf_counter() - started
        if finished and not finished.in_memory:
            self._tell(finished, waited_s)
        if self._saved_step != step:
            saved = self._saver.save(self._about(step, samples))
            self._tell(saved, saved.written_s)
        raise_together(self._newest.error if self._newest else None)
        self._saver.close()
        if self._memory:
            clear(self._memory)

    def _about(self, step: int, samples: int) -> About:
        return About(step, samples, self._plan.spec.train.seed, self._recipe_digest)

    def _end_pending(self) -> None:
        self._begun = None
        finished = self._saver.take_finished()
        assert finished is not None, "no rank was writing"
        self._end(finished)

    def _end(self, saved: Saved) -> None:
        if saved.in_memory:
            return
        self._tell(saved)
        chosen = self._cadence.learn(None if saved.error else (saved.blocked_s, saved.written_s))
        if chosen:
            self._journal.write(CadenceEvent(step=saved.about.step, **asdict(chosen)))

    def _tell(self, saved: Saved, waited_s: float = 0.0) -> None:
        """A periodic one that failed is a warning: training goes on. `waited_s`: outside any step."""
        self._newest = saved
        step = saved.about.step
        if saved.error:
            self._warn(step, f"{saved.error}; the checkpoints before it are whole")
            return
        self._journal.write(
            CheckpointEvent(
                step=step,
                path=str(self._run_dir.checkpoint(step)),
                bytes=saved.bytes,
                seconds=saved.blocked_s,
                written_s=saved.written_s,
                waited_s=waited_s or ABSENT,
            )
        )

    def _tell_put_off(self, due: int, step: int) -> None:
        """The first time; it goes on like that."""
        if not self._put_off:
            self._warn(
                step,
                f"the checkpoint due at step {due} was put off to step {step}: the one before it was still being "
                "written; a longer checkpoint.interval_steps avoids that",
            )
        self._put_off = True

    def _warn(self, step: int, message: str) -> None:
        self._journal.write(WarningEvent(step=step, message=message))


def find_place(run_dir: RunDir) -> Place:
    """torchrun says how many ranks a host has."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Place(make_memory_folder(run_dir), rank, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
