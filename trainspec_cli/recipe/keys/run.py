"""The complete run: a RunSpec is one composed recipe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from trainspec_cli.core.reading.files import exists, expand
from trainspec_cli.core.reading.hub_cache import HubName, hub_name, locate_checkpoint
from trainspec_cli.recipe.field_types import (
    AUTO,
    Auto,
    AutoInt,
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    PositiveFloat,
    PositiveInt,
    Range,
)
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.framework import FrameworkSpec
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.training import BatchingSpec, CommSpec, LoraSpec, OptimSpec, SchedulerSpec

# The data: text that is tokenised once into token shards, or images and volumes that are read in place.


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE tokenizer, which is trained on the data unless a file is specified."""

    vocab_size: Annotated[int, Range(257)] = 4096
    """Size of the vocabulary to train."""
    path: str | None = None
    """A `tokenizer.json` file for the `tokenizers` library, which then determines `vocab_size`."""
    end_of_document: str | None = None
    """The end-of-document token in that file; if null, common names are tried (`<|endoftext|>`, `</s>`, ...)."""
    code: str = ""
    """A user-defined tokenizer: `FILE.py:NAME`, `package.module:NAME`, or a name registered by a package."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments for the user-defined tokenizer, by name."""

    @property
    def is_trained(self) -> bool:
        """Return whether the tokenizer is trained on the data."""
        return self.path is None and not self.code


Documents = Literal["python_stdlib", "text", "jsonl", "parquet", "arrow", "chat", "tokens", "nanogpt", "megatron"]


@dataclass(frozen=True)
class PartSpec:
    """One source of a mixture or of the validation data."""

    source: Documents | str
    path: str | None = None
    text_field: str = "text"
    weight: float = 1.0
    """Weight of this source. Its fraction of the samples is its weight divided by the sum of all weights."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments for the user-defined code, by name."""

    @property
    def is_own(self) -> bool:
        """Return whether the documents come from user-defined code."""
        return self.source not in SOURCES


@dataclass(frozen=True)
class PhantomSpec:
    """Synthetic MR images, which are identical in every run regardless of its seed."""

    samples: PositiveInt = 1024
    """Number of training samples per epoch, not counting held-out samples."""


SampleSource = Literal["phantom", "images", "volumes"]
SAMPLE_SOURCES = get_args(SampleSource)
"""Sources of images or volumes, for convolutional networks. All other sources are converted to tokens."""
SOURCES = (*get_args(Documents), "mixture", *SAMPLE_SOURCES)
"""The sources that ship with trainspec."""


@dataclass(frozen=True)
class DataSpec:
    seq_len: PositiveInt
    """Number of tokens per sample; 1 for images and volumes."""
    source: Literal[Documents, "mixture", SampleSource] | str
    """`tokens` is a folder written by `trainspec data prepare`; text is prepared at launch and cached.

    `arrow` is a Hugging Face dataset as written by `save_to_disk`; `nanogpt` and `megatron` are files of token ids,
    read in place; `mixture` draws from several sources by weight. `chat` means conversations (`messages`, ShareGPT or
    Alpaca) or completions (`prompt`, `completion`), with one format per file: JSON lines, a JSON array, or a table.
    `images` is a folder with one sub-folder of images per class, and `volumes` is a folder of image and label pairs.
    User-defined code that yields documents: `FILE.py:NAME`, `package.module:NAME`, or a name registered by a
    package."""
    path: str | None = None
    """File, folder or glob; python_stdlib and phantom need no path."""
    text_field: str = "text"
    """The JSON field or table column that contains the text."""
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    """The tokenizer for the text."""
    heldout_fraction: Annotated[float, Range(0, 1, includes_low=False, includes_high=False)] = 0.02
    """Fraction of the documents or samples that are held out for evaluation, selected by hashing each one."""
    max_bytes: PositiveInt | None = None
    """Maximum number of bytes of text to read."""
    phantom: PhantomSpec = field(default_factory=PhantomSpec)
    """The synthetic volumes (phantom only)."""
    document_masks: bool = False
    """True if attention stays within each document of a sample; conversations are always kept separate."""
    chat_template: str | None = None
    """`chatml`, or a Jinja file; null: the template in the tokenizer's folder (chat only)."""
    loss_on: Literal["replies", "all"] = "replies"
    """The part of a conversation to train on: the assistant's replies, or everything (chat only)."""
    mixture: dict[str, PartSpec] = field(default_factory=dict)
    """The sources by name (mixture only)."""
    validation: dict[str, PartSpec] = field(default_factory=dict)
    """Additional evaluation texts by name, each of which is used in full; their weights are ignored."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments for the user-defined code, by name."""

    @property
    def is_own(self) -> bool:
        """Return whether the documents come from user-defined code."""
        return self.source not in SOURCES

    @property
    def masks_documents(self) -> bool:
        return self.document_masks or any(part.source == "chat" for part in self.parts.values())

    @property
    def parts(self) -> dict[str, PartSpec]:
        """Return the training sources by name."""
        if self.source == "mixture":
            return self.mixture
        return {"": PartSpec(self.source, self.path, self.text_field, options=self.options)}

    def with_part(self, part: PartSpec) -> DataSpec:
        """Return these data settings with `part` as their only source."""
        one = {"source": part.source, "path": part.path, "text_field": part.text_field, "options": part.options}
        return replace(self, **one, mixture={}, validation={})  # type: ignore[arg-type]

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """Return the unit over which a batch's loss is averaged and in which speed is measured."""
        return "samples" if self.source in SAMPLE_SOURCES else "tokens"


Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer"]
ComputeFormat = Literal["bf16", "fp16", "fp32", "tf32"]
MatmulFormat = Literal["compute", "fp8", "mxfp8", "nvfp4"]
HUGGING_FACE = "hf:"
DCP_FILE, LITGPT_FILE, NANOGPT_FILE = ".metadata", "lit_model.pth", "ckpt.pt"
"""Files that identify weights from other projects, as opposed to a trainspec run."""


@dataclass(frozen=True)
class CheckpointSpec:
    interval_steps: AutoInt | None = AUTO
    """Number of steps between checkpoints; null: only one at the end (and when the run is stopped).

    auto: the first one after a minute of training (shorter runs write only the final one), then at intervals of one to
    ten minutes, depending on the measured cost of a checkpoint and the cluster's failure rate (Daly 2006)."""
    mode: Literal["async", "sync"] = "async"
    """async: training waits only for a copy in memory, which is then written in the background; sync: training waits
    until the checkpoint is on disk."""
    memory_interval_steps: PositiveInt | None = None
    """Number of steps between copies in the nodes' memory (/dev/shm), where each node also keeps the copy of its
    predecessor; null: no copies.

    They outlive the workers: a run that restarts on the same nodes, or with one node replaced, resumes from them. They
    take up twice the size of the state (four times on two or more nodes) until the run has ended normally."""
    keep_last: PositiveInt = 2
    """Number of complete checkpoints to keep; older ones are deleted."""
    keep_best: bool = False
    """Write a checkpoint at each evaluation with the lowest held-out loss so far, and keep it in addition to the latest
    checkpoints."""


@dataclass(frozen=True)
class PrecisionSpec:
    compute: ComputeFormat | Auto = AUTO
    """The compute format. auto: bf16 if it is faster than fp32 (GPUs since Ampere, CPUs with AMX), otherwise fp32."""
    reduce: Literal["bf16", "fp32"] = "fp32"
    """The format of gradient sums across ranks."""
    matmul: MatmulFormat = "compute"
    """The format in which linear layers multiply; `compute` means the compute format."""


@dataclass(frozen=True)
class InitSpec:
    from_: str | None = None
    """`hf:FOLDER`, a Hugging Face checkpoint; `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`, a checkpoint in this machine's
    Hub cache; the folder of a distributed torch checkpoint (DCP, also from torchtitan and Megatron) or of a litgpt
    checkpoint; or the folder of a trainspec run. null: random weights from the seed.

    Only weights are loaded; the optimizer state, the step number and the data start afresh."""

    @property
    def hugging_face(self) -> Path | None:
        """Return the folder of a Hugging Face checkpoint; None for any other weights."""
        return None if self._named is None else locate_checkpoint(self._named)

    @property
    def hub_name(self) -> HubName | None:
        """Return the name of a checkpoint on the Hub; None for any other weights."""
        return None if self._named is None else hub_name(self._named)

    @property
    def _named(self) -> str | None:
        """Return the text after `hf:`."""
        if self.from_ is None or not self.from_.startswith(HUGGING_FACE):
            return None
        return self.from_.removeprefix(HUGGING_FACE)

    @property
    def other(self) -> Path | None:
        """Return the folder of weights from a project other than Hugging Face or trainspec; None for any other
        weights."""
        folder = self._folder
        files = (DCP_FILE, LITGPT_FILE, NANOGPT_FILE)
        return folder if folder is not None and any(exists(folder / name) for name in files) else None

    @property
    def run(self) -> Path | None:
        return None if self.other is not None else self._folder

    @property
    def _folder(self) -> Path | None:
        """Return the folder specified without `hf:`."""
        return None if self.from_ is None or self._named is not None else expand(self.from_)


@dataclass(frozen=True)
class TrainSection:
    max_steps: PositiveInt
    """Number of steps of `batching.global_batch_size` samples; the product is the number of samples on which the run
    trains. If the batch size changes (`batching.schedule`), the same samples take a different number of steps. It can
    be replaced by `tokens` or `epochs`."""
    tokens: PositiveInt | None = None
    """Replaces `max_steps`: number of tokens to train on (samples, for images and volumes), rounded up to full steps.

    The run ends once it has trained on them, even if some steps had fewer samples (`batching.on_loss: shrink`)."""
    epochs: PositiveFloat | None = None
    """Replaces `max_steps`: number of passes over the data; trainspec counts its samples. 0.5 trains on half of them.
    As with `tokens`, the samples determine when the run ends."""
    seed: NonNegativeInt = 0
    """The seed for the weights and the sample order."""
    max_skipped_steps: PositiveInt = 10
    """The run ends after this many consecutive steps with a non-finite loss or gradient. Such a step updates
    nothing."""
    eval_interval_steps: PositiveInt | None = None
    """Number of steps between evaluations on the held-out text; null: one evaluation at the end."""
    early_stop_evals: PositiveInt | None = None
    """The run ends successfully after this many consecutive evaluations without a new lowest held-out loss; null: it
    always takes all steps."""
    sample_interval_steps: PositiveInt | None = None
    """Number of steps between text samples generated by the model (`sample`); null: one at the end."""
    log_interval_steps: PositiveInt = 10
    """Number of steps between log lines when the output is not a terminal."""
    loss: str = ""
    """A user-defined loss that replaces cross-entropy, called as `loss(logits, targets, **loss_options)`:
    `FILE.py:NAME`, `package.module:NAME`, or a name registered by a package. The held-out loss stays cross-entropy."""
    loss_options: dict[str, Option] = field(default_factory=dict)
    """Additional arguments for the user-defined loss, by name."""
    callbacks: tuple[str, ...] = ()
    """User-defined classes that are notified of steps, evaluations and checkpoints: `FILE.py:NAME`,
    `package.module:NAME`, or a name registered by a package."""


@dataclass(frozen=True)
class SampleSection:
    """Text that the trained model generates at the end."""

    prompt: str = ""
    """The text that the generated sample continues."""
    max_new_tokens: NonNegativeInt = 0
    """Number of tokens to generate; 0: no sample."""
    temperature: NonNegativeFloat = 0.8
    """Divides the logits before a token is sampled; 0: always take the most likely token."""


@dataclass(frozen=True)
class RunSection:
    dir: str | Auto = AUTO
    """The run folder; auto is runs/<recipe>/<time>."""
    name: str = ""
    """A name that commands find the run by, such as `trainspec report NAME`."""
    tags: tuple[str, ...] = ()
    """Words for selecting runs, as in `trainspec runs --tag WORD`."""
    stop_grace_s: PositiveFloat = 60.0
    """A worker that is still running this long after a stop request is killed."""
    node_timeout_s: PositiveFloat = 30.0
    """On several nodes: a node whose processes are silent for this long is treated as lost
    (`resilience.after_node_loss`). On Linux, a node that is off or disconnected is lost after an eighth of this time,
    but at least two seconds, because its system acknowledges nothing."""
    join_timeout_s: PositiveFloat = 300.0
    """On several nodes: time limit for nodes to start after the first one (a slow prologue, a container image to pull),
    for a lost node to return, and for the others to wait for the first node."""
    preflight: bool = True
    """Before the workers start, reject a node without enough memory or disk. On several nodes, measure each of them for
    a few seconds, and reject one that is far slower than the others. If a run restarts (without Slurm), a node that has
    failed twice for the same cause is always checked before it is used again."""


@dataclass(frozen=True)
class TrackingSection:
    """Additional trackers that record events; each one needs a separate pip extra."""

    tensorboard: bool = False
    """TensorBoard files in the run folder."""
    wandb: bool = False
    """Weights & Biases, offline in the run folder unless `WANDB_MODE` is set (`wandb sync` uploads it later)."""
    mlflow: bool = False
    """MLflow, in the run folder unless `MLFLOW_TRACKING_URI` names a server."""
    project: str = "trainspec"
    """The project name in Weights & Biases and MLflow."""
    trackers: tuple[str, ...] = ()
    """User-defined trackers, which record every event of rank 0: `FILE.py:NAME`, `package.module:NAME`, or a name
    registered by a package."""


@dataclass(frozen=True)
class ObserveSection:
    """Diagnostics that a run collects in addition to the events of its steps."""

    deeper_look: bool = True
    """When the diagnosis finds what is slowing the run down, the suspected rank profiles itself for three steps (one if
    steps take seconds), and the verdict names the line of code or the operations.

    It costs nothing until then. A run profiles at most eight times, once per location, and keeps 1 MiB each time."""


@dataclass(frozen=True)
class RunSpec:
    model: ModelSpec
    """The model to train: its family and sizes."""
    data: DataSpec
    """The data to train on."""
    optim: OptimSpec
    """The optimizer and the learning rate."""
    batching: BatchingSpec
    """The batch size, and how a batch is divided."""
    train: TrainSection
    """How long the run trains, and how often it evaluates."""
    description: str = ""
    """A one-line description for `trainspec list recipe`."""
    init: InitSpec = field(default_factory=InitSpec)
    """The weights that the run starts from."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    """Low-rank adapters, trained instead of all weights."""
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    """The hardware: this machine, or a described cluster."""
    framework: FrameworkSpec = field(
        default_factory=lambda: FrameworkSpec(name="trainspec", counted=True, expandable_segments=True)
    )
    """The training framework that `trainspec plan` assumes; only trainspec's own engine can be launched."""
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    """How the work is distributed among ranks: data, tensor, pipeline, context and expert parallelism."""
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    """The formats in which the run computes, sums and multiplies."""
    comm: CommSpec = field(default_factory=CommSpec)
    """The wire format of gradients and parameters."""
    kernels: KernelSpec = field(default_factory=KernelSpec)
    """The implementation of each operation."""
    compile: bool = False
    """Compile each block with torch.compile."""
    recompute: Recompute | Auto = "none"
    """Activations to recompute in the backward pass: `selective` all except the results of matmuls and attention
    (Megatron and torchtitan: only those of the attention core), `full` those of an entire block."""
    offload: Offload | Auto = "none"
    """The part of the state that is kept in host memory while it is not in use."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    """When checkpoints are written and removed."""
    resilience: ResilienceSpec = field(default_factory=ResilienceSpec)
    """How a run survives failures."""
    scheduler: SchedulerSpec = field(default_factory=SchedulerSpec)
    """How the run adapts to measured speeds."""
    fault: str = ""
    """Faults to inject, such as `kill(group=1,step=40)`; separate multiple faults with `;`."""
    sample: SampleSection = field(default_factory=SampleSection)
    """Text that the trained model generates."""
    tracking: TrackingSection = field(default_factory=TrackingSection)
    """Additional trackers that record events."""
    observe: ObserveSection = field(default_factory=ObserveSection)
    """Diagnostics that a run collects in addition to the events of its steps."""
    run: RunSection = field(default_factory=RunSection)
    """The run folder, the run's name, and limits for its processes."""

    @property
    def ends_by_samples(self) -> bool:
        """Return whether the run ends once it has trained on its samples, regardless of the number of steps, instead of
        at `max_steps`. This is the case if the batch size changes, or if the recipe specifies the amount of data."""
        return self.batching.schedule.kind != "constant" or (
            self.train.tokens is not None or self.train.epochs is not None
        )
