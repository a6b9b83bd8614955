"""Events of training itself: its start, steps, evaluations, checkpoints and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.canonical import ABSENT, Absent
from trainspec_cli.recipe.records import Count, Rate, Seconds, WorldSize
from trainspec_cli.run.folder.event_types.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent(Event):
    """The workers of a launch, a resume or a restart are ready to train."""

    type: Literal["start"] = "start"
    step: Count
    world_size: WorldSize
    device_name: str
    params: Count
    peak_flops: Rate
    """Peak of one device; `peak_source` says how it is known."""
    peak_source: str
    flops_per_token: Rate
    unit: str = "tokens"
    restored_from: str | None = None
    """The checkpoint's folder."""
    pid: int | Absent = ABSENT
    host: str | Absent = ABSENT


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    type: Literal["step"] = "step"
    step: Count
    loss: float | None
    grad_norm: float | None
    lr: float | Absent | None = ABSENT
    tokens: Count | Absent = ABSENT
    """Absent for images and volumes, which count samples."""
    samples: Count | Absent = ABSENT
    steps: Count | Absent = ABSENT
    """1, of a command of one's own: neither tokens nor samples are known of it."""
    step_time_s: Seconds
    time_s: dict[str, Seconds]
    """Seconds of each part (`PARTS`)."""
    exchange_s: Seconds | Absent = ABSENT
    """Time in which an exchange between ranks went on; absent where none did beside the computation."""
    exposed_s: Seconds | Absent = ABSENT
    """The part of `exchange_s` in which the rank computed nothing."""
    queued_s: Seconds | Absent = ABSENT
    """Time in which the main thread could run and had no processor, in parts other than exposed communication."""
    noise_scale: float | Absent | None = ABSENT
    """Noise scale of the gradients, in samples (`balance/batch/noise.py`), averaged over the steps so far; None where
    it is infinite."""
    skipped: bool
    """The loss or the gradients were not finite, and nothing was updated."""
    h2d_copies: Count | Absent = ABSENT
    h2d_bytes: Count | Absent = ABSENT
    """Batches copied to the device; 0 where it is the host itself."""
    allocations: Count | Absent = ABSENT
    """Buffers made for batches, and calls to a GPU's driver for memory; what malloc does on a CPU is not counted."""
    group: Count | Absent | None = ABSENT
    """The replica group that wrote this event; `groups` took part in the step."""
    groups: tuple[Count, ...] | Absent = ABSENT
    took: tuple[Count, ...] | Absent = ABSENT
    """(first sample, samples) of this group."""

    @property
    def units(self) -> int:
        """Tokens, or samples where no tokens are counted (images, volumes), or the step alone."""
        for counted in (self.tokens, self.samples, self.steps):
            if not isinstance(counted, Absent):
                return counted
        raise AssertionError("a step counts tokens, samples or itself")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetFigures:
    loss: float | None
    bits_per_byte: float | None
    """None where the number of bytes is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent(Event):
    """The held-out data were evaluated. Text has bits per byte, images have an accuracy, volumes have Dice."""

    type: Literal["eval"] = "eval"
    step: Count
    heldout_loss: float | None
    heldout_bits_per_byte: float | Absent | None = ABSENT
    xz_bits_per_byte: float | Absent | None = ABSENT
    sets: dict[str, SetFigures] | Absent = ABSENT
    """The figures of each set by name, where there are several."""
    heldout_accuracy: float | Absent | None = ABSENT
    heldout_dice: float | Absent | None = ABSENT
    seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEvent(Event):
    """Text that the model wrote."""

    type: Literal["sample"] = "sample"
    step: Count
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str
    """Decoded, without the middle of a long part."""
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstTextEvent(Event):
    """The first text of the first batch, with the mask of what is trained on."""

    type: Literal["first_text"] = "first_text"
    step: Count
    tokens: Count
    """Tokens that could be targets."""
    trained: Count
    """Those that are: the loss counts them."""
    parts: tuple[TextPart, ...]
    """The text, cut where training begins and ends; only its first parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent(Event):
    type: Literal["checkpoint"] = "checkpoint"
    step: Count
    path: str
    bytes: Count
    seconds: Seconds
    """How long training waited."""
    written_s: Seconds | Absent | None = ABSENT
    """The time until it was whole on disk, beside later steps."""
    waited_s: Seconds | Absent | None = ABSENT
    """The time that the run's end waited for the last one, outside any step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CadenceEvent(Event):
    """`checkpoint.interval_steps: auto` has chosen an interval, for these reasons."""

    type: Literal["cadence"] = "cadence"
    step: Count
    interval_steps: Count
    blocked_s: Seconds
    drag_s: Seconds
    written_s: Seconds
    step_time_s: Seconds
    mtbf_s: float | None = None
    failures: Count | Absent = ABSENT
    """Failures of this run that `mtbf_s` takes into account; absent: none were seen."""
    observed_s: Seconds | Absent = ABSENT
    """The time that the run had been running when they had been counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarningEvent(Event):
    type: Literal["warning"] = "warning"
    step: Count
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(Event):
    type: Literal["end"] = "end"
    step: Count
    status: str
    weights_sha256: str | None = None
