"""What another engine is asked, and what it answers: records that travel as JSON, beside tensors in safetensors files.

docs/spec/engine-protocol.md says the same in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import Recompute
from trainspec_cli.spec.results.tools import Device

SCHEMA = "trainspec.engine/1"
REQUEST, ANSWER = "request.json", "answer.json"
MODEL, BATCHES, CHECKPOINT = "model", "batches.safetensors", "checkpoint"
TOKENS = "tokens"

Asked = Literal["losses", "gradients", "weights"]


@dataclass(frozen=True)
class EngineOptimizer:
    """An update as torch's optimizer of that name makes it, of all parameters alike."""

    name: Literal["sgd", "adamw"]
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EngineRequest:
    """request.json: a run of a few steps."""

    schema: str
    name: str
    """The run's name."""
    device: Device
    processes: int
    layout: Layout
    """How the work is spread over the processes."""
    compute: Literal["fp32", "bf16"]
    recompute: Recompute
    compile: bool
    model: str
    """A folder: the model and its first weights, as Hugging Face has them."""
    batches: str
    """A file: `tokens`, (steps, samples, length + 1) in int64; the last length of them are what the others predict."""
    first_step: int
    """Steps made before this run begins, by the one whose checkpoint it begins with."""
    steps: int
    """The run ends after so many steps, those before it counted."""
    optimizer: EngineOptimizer
    clip_from: int | None
    """From this step on, counted from 0, the whole gradient is clipped to `clip_norm`; null: never."""
    clip_norm: float
    asks: tuple[Asked, ...]
    save_after: int | None = None
    """Write a checkpoint after so many steps, into the folder `save_to`."""
    save_to: str = ""
    resume_from: str = ""
    """Begin with the checkpoint in this folder."""


@dataclass(frozen=True)
class EngineAnswer:
    """answer.json: what a run gave, or why it was not made."""

    schema: str
    declined: str = ""
    """The reason why this engine makes no such run; empty: it was made."""
    losses: tuple[float, ...] = ()
    """The mean loss over all tokens of each step, before its update."""
    gradients: str = ""
    """A file: the gradients of the first step's batch, before any update and any clipping, in fp32."""
    weights: str = ""
    """A file: the weights after the last step, in fp32."""
    versions: dict[str, str] = field(default_factory=dict)
    """The engine and what it stands on, for the record."""
