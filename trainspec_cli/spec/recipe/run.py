"""The whole run: one RunSpec is one composed recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.spec.auto import AUTO, Auto
from trainspec_cli.spec.numbers import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.checkpoint import CheckpointSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.init import InitSpec
from trainspec_cli.spec.recipe.kernels import KernelSpec
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import ModelSpec
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.precision import PrecisionSpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer"]


@dataclass(frozen=True)
class TrainSection:
    max_steps: PositiveInt
    seed: NonNegativeInt = 0
    max_skipped_steps: PositiveInt = 10
    """A step whose loss or gradients are not finite updates nothing; this many in a row end the run."""
    eval_interval_steps: PositiveInt | None = None
    """Steps between evaluations on the held-out text; null: one at the end."""
    sample_interval_steps: PositiveInt | None = None
    """Steps between samples of text that the model writes (`sample`); null: one at the end."""
    log_interval_steps: PositiveInt = 10
    """Steps between log lines if the output is not a terminal."""


@dataclass(frozen=True)
class SampleSection:
    """Text that the trained model writes at the end."""

    prompt: str = ""
    max_new_tokens: NonNegativeInt = 0
    """0 writes nothing."""
    temperature: NonNegativeFloat = 0.8


@dataclass(frozen=True)
class RunSection:
    dir: str | Auto = AUTO
    """The run folder; auto is runs/<recipe>/<time>."""
    stop_grace_s: PositiveFloat = 60.0
    """A worker that has not ended this long after a stop request is killed."""
    node_timeout_s: PositiveFloat = 30.0
    """On several nodes: a node that is silent for this long (off, hung, cut off) is lost, and the job ends."""
    preflight: bool = True
    """Before the workers start, refuse a node without enough memory or disk. Several nodes are each measured for some
    seconds, and one far slower than the others is refused."""


@dataclass(frozen=True)
class TrackingSection:
    """Other places to record events; each needs its own extra."""

    tensorboard: bool = False
    """Files in the run folder."""
    wandb: bool = False
    """Weights & Biases, offline in the run folder unless `WANDB_MODE` is set (`wandb sync` uploads it later)."""
    mlflow: bool = False
    """MLflow, in the run folder unless `MLFLOW_TRACKING_URI` names a server."""
    project: str = "trainspec"
    """The project name in Weights & Biases and MLflow."""


@dataclass(frozen=True)
class RunSpec:
    model: ModelSpec
    data: DataSpec
    optim: OptimSpec
    batching: BatchingSpec
    train: TrainSection
    description: str = ""
    """One line for `trainspec recipes`."""
    init: InitSpec = field(default_factory=InitSpec)
    lora: LoraSpec = field(default_factory=LoraSpec)
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    kernels: KernelSpec = field(default_factory=KernelSpec)
    compile: bool = False
    """torch.compile each block."""
    recompute: Recompute | Auto = "none"
    """Activations recomputed in the backward: `selective` those of the attention core, `full` a whole block's."""
    offload: Offload | Auto = "none"
    """The state that is kept in host memory between its uses."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    fault: str = ""
    """Faults to inject, such as `kill(group=1,step=40)`; several are separated by `;`."""
    sample: SampleSection = field(default_factory=SampleSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    run: RunSection = field(default_factory=RunSection)
