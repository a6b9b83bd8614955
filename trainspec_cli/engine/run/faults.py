"""Inject the faults specified in the recipe into this process, each of them once per run."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.engine.accelerators import host_work
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.recipe.keys.training import Fault, parse_faults
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.paths import RunDir

BY_SUPERVISOR = ("lighthouse",)


class InjectedFault(RuntimeError):  # noqa: N818 - a fault, not an error of trainspec
    """The error raised by `fault=exception(...)`."""


class Faults:
    """The faults that the recipe injects into this rank."""

    def __init__(self, plan: Plan, run_dir: RunDir):
        own = (int(os.environ.get(GROUP, "0")), dist.get_rank())
        self._folder = run_dir.faults_folder
        self._mine = [
            (number, fault)
            for number, fault in enumerate(parse_faults(plan.spec.fault))
            if (fault.group, fault.rank) == own and fault.kind not in BY_SUPERVISOR
        ]

    def inject(self, step: int, state: TrainState) -> None:
        """Inject the faults that are due after `step` updates."""
        throttles = [fault for _, fault in self._mine if fault.kind == "throttle"]
        if throttles:
            due = (fault.seconds for fault in throttles if fault.lasts_at(step))
            state.stages.throttle.sample_s = sum(due)
        allowed = [fault.above for _, fault in self._mine if fault.above is not None and fault.step <= step]
        if allowed:
            state.stages.allowance.samples = min(allowed)
        for number, fault in self._mine:
            if fault.above is not None:
                continue
            if fault.kind == "slow" and fault.lasts_at(step):
                host_work(state.device, seconds=fault.seconds)
            elif fault.kind == "disk_full" and step == fault.step + fault.steps:
                _limit_files(resource.RLIM_INFINITY)
            elif fault.kind in INJECTED and fault.step == step and self._is_first(number, fault):
                inject(fault.kind, state)

    def during_move(self, step: int) -> Callable[[int, int], None]:
        """Return a function that injects the faults of a change of layout after `step` updates. The change calls it
        before each bucket, with (bucket, number of buckets)."""

        def inject_between_buckets(bucket: int, buckets: int) -> None:
            for number, fault in self._mine:
                kind = fault.kind.removeprefix("move_")
                due = kind != fault.kind and fault.step == step and bucket == buckets // 2
                if due and self._is_first(number, fault):
                    inject(kind)

        return inject_between_buckets

    def _is_first(self, number: int, fault: Fault) -> bool:
        """Record that the fault was injected. Called before the fault, because the process may not survive it."""
        self._folder.mkdir(exist_ok=True)
        try:
            (self._folder / f"{number}_{fault.kind}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


INJECTED = ("kill", "stop", "hang", "exception", "oom", "bitflip", "disk_full")
"""Faults that occur at one point in time."""


def inject(kind: str, state: TrainState | None = None) -> None:
    """Inject one of the faults in `INJECTED` into this process."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            while True:
                time.sleep(1)
        case "exception":
            raise InjectedFault("a fault injected by the recipe")
        case "oom":
            raise torch.OutOfMemoryError("a fault injected by the recipe: no memory is left")
        case "bitflip":  # flip the lowest exponent bit of one value
            assert state is not None, "bit flips are not injected into a move"
            values = state.shares[0].local.detach().view(torch.int32).flatten()
            values[values.numel() // 2] ^= 1 << 23
        case "disk_full":
            _limit_files(resource.getpagesize())


def _limit_files(largest_bytes: int) -> None:
    """Make writes beyond this file size fail (EFBIG), as on a full disk, in this process only."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))


# Handle requests to stop: SIGTERM, SIGINT or SIGUSR2 sets a flag, which the next step sends to all ranks.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that request a stop. Batch systems send SIGUSR2 as a warning; SIGUSR1 cannot be used, because NCCL uses
it."""


class StopRequest:
    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> StopRequest:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
