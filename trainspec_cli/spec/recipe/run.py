"""The whole run: one RunSpec is one composed recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainspec_cli.reading.files import expand
from trainspec_cli.spec.field_types import (
    AUTO,
    Auto,
    AutoInt,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec
from trainspec_cli.spec.recipe.comm import CommSpec
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.kernels import KernelSpec
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import ModelSpec
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec
from trainspec_cli.spec.recipe.scheduler import SchedulerSpec

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer"]
ComputeFormat = Literal["bf16", "fp16", "fp32", "tf32"]
MatmulFormat = Literal["compute", "fp8", "mxfp8", "nvfp4"]
HUGGING_FACE = "hf:"


@dataclass(frozen=True)
class CheckpointSpec:
    interval_steps: AutoInt | None = None
    """Steps between checkpoints; null writes one only at the end (and on a stop).

    auto: as often as the checkpoints' measured cost and the cluster's failure rate ask for (Daly 2006).
    """
    mode: Literal["async", "sync"] = "async"
    """async: training waits for a copy in memory, which is then written in the background; sync: until it is on
    disk."""
    memory_interval_steps: PositiveInt | None = None
    """Steps between copies in the nodes' memory (/dev/shm), each node also keeping its predecessor's; null: none.

    They outlive the workers: a run that restarts on the same nodes, or with one of them replaced, resumes from them.
    They take twice the state's size (four times with two nodes or more) until the run has ended normally.
    """
    keep_last: PositiveInt = 2
    """Older whole checkpoints are removed."""


@dataclass(frozen=True)
class PrecisionSpec:
    compute: ComputeFormat | Auto = AUTO
    """auto: bf16 if the chip multiplies it natively, else fp32."""
    reduce: Literal["bf16", "fp32"] = "fp32"
    """The format in which gradients are summed across ranks."""
    matmul: MatmulFormat = "compute"
    """The format in which linear layers multiply; `compute` is the compute format."""


@dataclass(frozen=True)
class InitSpec:
    from_: str | None = None
    """`hf:FOLDER`, a Hugging Face checkpoint, or the folder of a run of trainspec; null: drawn from the seed.

    Only weights are loaded: the optimizer, the step and the data start from the beginning.
    """

    @property
    def hugging_face(self) -> Path | None:
        if self.from_ is None or not self.from_.startswith(HUGGING_FACE):
            return None
        return expand(self.from_.removeprefix(HUGGING_FACE))

    @property
    def run(self) -> Path | None:
        return None if self.from_ is None or self.hugging_face else expand(self.from_)


@dataclass(frozen=True)
class TrainSection:
    max_steps: PositiveInt
    """Steps of `batching.global_batch_size` samples, which together are the run's samples. A batch that changes
    (`batching.schedule`) trains as many in another number of steps."""
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
    comm: CommSpec = field(default_factory=CommSpec)
    kernels: KernelSpec = field(default_factory=KernelSpec)
    compile: bool = False
    """torch.compile each block."""
    recompute: Recompute | Auto = "none"
    """Activations recomputed in the backward: `selective` those of the attention core, `full` a whole block's."""
    offload: Offload | Auto = "none"
    """The state that is kept in host memory between its uses."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    fault: str = ""
    """Faults to inject, such as `kill(group=1,step=40)`; several are separated by `;`."""
    sample: SampleSection = field(default_factory=SampleSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    run: RunSection = field(default_factory=RunSection)
