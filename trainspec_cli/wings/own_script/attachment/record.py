"""Write the events of an attached script, and count its steps for the supervisor."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any, Protocol, SupportsFloat

from trainspec_cli.run.folder.event_types.events import CheckpointEvent, EvalEvent, StartEvent, StepEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.paths import RunDir

UNIT = "steps"


class StepCounter(Protocol):
    """The interface of the hook that runs in this process (`wings/own_script/hook/sitecustomize.py`)."""

    def attach(self, before: int, rank: int, world_size: int) -> None: ...

    def attached_step(self) -> None: ...


def attach_counter(rank: int, ranks: int) -> StepCounter | None:
    """Return the hook, which from now on ignores optimizer steps, because torch takes a step when it restores an
    optimizer. None outside a run, or if Python has not loaded the hook (`python -I`)."""
    hook: StepCounter | None = sys.modules.get("_trainspec_steps")  # a module that has this interface
    if hook:
        hook.attach(0, rank, ranks)
    return hook


class StepRecord:
    """Records the events of one rank. Outside a run, nothing is written."""

    def __init__(self, run: RunDir | None, rank: int, ranks: int):
        self._writer = EventWriter(run.events(rank), rank) if run else None
        self._counter = attach_counter(rank, ranks) if run else None
        self._rank = rank
        self._ranks = ranks
        self._since_s = time.monotonic()
        self._waited_s = self._excluded_s = 0.0
        self._figures: dict[str, SupportsFloat] = {}

    def begin(self, step: int, parameters: int, restored_from: str | None) -> None:
        if self._counter:
            self._counter.attach(step, self._rank, self._ranks)
        if self._writer:
            torch: Any = sys.modules.get("torch")
            chip = torch.accelerator.current_accelerator(check_available=True) if torch is not None else None
            module: Any = torch.get_device_module(chip) if chip else None
            is_known = hasattr(module, "get_device_name") and module.is_initialized()
            self._writer.write(
                StartEvent(
                    step=step,
                    world_size=self._ranks,
                    device_name=str(module.get_device_name()) if is_known else f"process ({os.cpu_count()} cores)",
                    params=parameters,
                    peak_flops=0.0,
                    peak_source="",
                    flops_per_token=0.0,
                    unit=UNIT,
                    restored_from=restored_from,
                    pid=os.getpid(),
                    host=socket.gethostname(),
                )
            )
        self._since_s = time.monotonic()

    def log(self, figures: dict[str, SupportsFloat]) -> None:
        self._figures |= figures

    def waited(self, seconds: float) -> None:
        """Add time that the step spent waiting for its data."""
        self._waited_s += seconds

    def step(self, step: int) -> None:
        if self._counter:
            self._counter.attached_step()
        now_s = time.monotonic()
        step_s = max(0.0, now_s - self._since_s - self._excluded_s)
        waited_s = min(self._waited_s, step_s)
        self._since_s = now_s
        self._waited_s = 0.0
        self._excluded_s = 0.0
        figures = self._figures
        self._figures = {}
        if self._writer:
            known = {name: _number(value) for name, value in figures.items()}
            self._writer.write(
                StepEvent(
                    step=step,
                    loss=known.get("loss"),
                    grad_norm=known.get("grad_norm"),
                    lr=known.get("lr"),
                    steps=1,
                    step_time_s=step_s,
                    time_s={"data_wait": waited_s, "other": step_s - waited_s},
                    skipped=False,
                )
            )

    def saved(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        self._since_s += seconds
        if self._writer:
            self._writer.write(CheckpointEvent(step=step, path=path, bytes=size_bytes, seconds=seconds))

    def evaluated(self, step: int, heldout_loss: SupportsFloat, accuracy: SupportsFloat | None, seconds: float) -> None:
        """Record an evaluation. Its `seconds` do not count towards a step's time."""
        self._excluded_s += seconds
        if self._writer:
            event = EvalEvent(step=step, heldout_loss=_number(heldout_loss), seconds=seconds)
            if accuracy is None:  # the size is unknown
                self._writer.write(replace(event, heldout_bits_per_byte=None))
            else:
                self._writer.write(replace(event, heldout_accuracy=_number(accuracy)))


def _number(value: SupportsFloat) -> float | None:
    """Return a value, such as a tensor with a gradient, as a float; None, as in events, if it is not finite."""
    number = float(getattr(value, "detach", lambda: value)())
    return number if math.isfinite(number) else None
