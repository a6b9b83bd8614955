"""torchtitan: a Python module whose function returns a `Trainer.Config`, started by `torchrun -m torchtitan.train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.wings.interop.table import (
    CONSTANT,
    IN_PIPELINE,
    SHARDED,
    WSD,
    AtLeast,
    Choice,
    Fixed,
    Line,
    OrNone,
    RunValues,
    UnsupportedValueError,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import (
    FOLDER,
    Keys,
    Target,
    Translation,
    call_lines,
    nest,
    shell_script,
    torchrun,
)

MODULE = "trainspec_run"
LLAMA3: JsonObject = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "norm_eps": 1e-5,
}
LLAMA3 |= {"tied_embeddings": False, "qk_norm": False, "attention_bias": "none"}
QWEN3: JsonObject = {"vocab_size": 151936, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6}
QWEN3 |= {"qk_norm": True, "attention_bias": "none"}


def _sizes(
    family: Mapping[str, JsonValue], layers: int, hidden: int, heads: int, ffn: int, **others: JsonValue
) -> JsonObject:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_size": ffn}
    return {**family, **sizes, **others, "gated_mlp": True, "activation": "silu"}


FLAVORS: Mapping[str, JsonObject] = {
    "llama3.8B": _sizes(LLAMA3, 32, 4096, 32, 14336),
    "llama3.70B": _sizes(LLAMA3, 80, 8192, 64, 28672),
    "llama3.405B": _sizes(LLAMA3, 126, 16384, 128, 53248),
    "qwen3.0.6B": _sizes(QWEN3, 28, 1024, 16, 3072, tied_embeddings=True),
    "qwen3.1.7B": _sizes(QWEN3, 28, 2048, 16, 6144, tied_embeddings=True),
    "qwen3.4B": _sizes(QWEN3, 36, 2560, 32, 9728, tied_embeddings=True),
    "qwen3.8B": _sizes(QWEN3, 36, 4096, 32, 12288, tied_embeddings=False),
    "qwen3.14B": _sizes(QWEN3, 40, 5120, 40, 17408, tied_embeddings=False),
    "qwen3.32B": _sizes(QWEN3, 64, 5120, 64, 25600, tied_embeddings=False),
}
"""Model and size in torchtitan's registry -> the values of `model` keys that they imply."""
MODEL_KEYS = tuple(f"model.{key}" for key in FLAVORS["llama3.8B"])
ROPE = "torchtitan's Llama 3 scales rotary frequencies like Llama 3.1, and initialises weights differently"


@dataclass(frozen=True)
class Flavor:
    """The sizes of the model, which torchtitan's registry identifies by a name."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        for name, sizes in FLAVORS.items():
            if all(run[f"model.{key}"] == size for key, size in sizes.items()):
                return name
        raise UnsupportedValueError("the sizes of " + ", ".join(FLAVORS), "model=llama3_8b")

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if value not in FLAVORS:
            raise UnsupportedValueError(", ".join(FLAVORS))
        return FLAVORS[str(value)]["num_layers"]


NO_PIPELINE = given("layout.pp", 1)
DECAYS_ALL = "torchtitan applies weight decay to all parameters; trainspec skips norms and biases"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
AN_UPDATE = "torchtitan's decay is at most one update ahead of trainspec's"
EVEN_SPLIT = "trainspec splits the layers by planned time, torchtitan as evenly as possible"
ZERO_BUBBLE = "torchtitan's zero-bubble schedule has two stages per rank; trainspec's has one"
OPS = "torchtitan keeps the results of some operations; trainspec recomputes only the attention core"

LINES = (
    Line("model.num_layers", "model", Flavor(), approximate=ROPE, also=MODEL_KEYS),
    Line("data.seq_len", "training.seq_len"),
    Line("batching.micro_batch_size", "training.local_batch_size", when=(NO_PIPELINE,)),
    Line("derived.rank_batch_size", "training.local_batch_size", when=(IN_PIPELINE,)),
    Line("batching.micro_batch_size", "parallelism.pipeline_parallel_microbatch_size", when=(IN_PIPELINE,)),
    Line("batching.global_batch_size", "training.global_batch_size"),
    Line("train.max_steps", "training.steps"),
    Line("train.seed", "debug.seed"),
    Line("train.log_interval_steps", "metrics.log_freq"),
    Line("optim.name", "", Choice({"adamw": None})),
    Line("optim.lr", "optimizer.lr"),
    Line("optim.beta1", "optimizer.betas[0]"),
    Line("optim.beta2", "optimizer.betas[1]"),
    Line("optim.eps", "optimizer.eps"),
    Line("optim.weight_decay", "optimizer.weight_decay", approximate=DECAYS_ALL),
    Line("optim.grad_clip_norm", "training.max_norm"),
    Line(
        "optim.schedule.kind",
        "lr_scheduler.decay_type",
        Choice({"cosine": "cosine", "wsd": "linear", "constant": "linear"}),
        approximate=AN_UPDATE,
    ),
    Line("optim.schedule.warmup_steps", "lr_scheduler.warmup_steps"),
    Line(
        "optim.schedule.final_lr_ratio", "lr_scheduler.min_lr_factor", when=(unless("optim.schedule.kind", "constant"),)
    ),
    Line("optim.schedule.decay_fraction", "lr_scheduler.decay_ratio", when=(WSD,)),
    Line("layout.dp_replicate", "parallelism.data_parallel_replicate_degree"),
    Line("layout.dp_shard", "parallelism.data_parallel_shard_degree"),
    Line("layout.tp", "parallelism.tensor_parallel_degree"),
    Line("layout.cp", "parallelism.context_parallel_degree"),
    Line("layout.ep", "parallelism.expert_parallel_degree"),
    Line("layout.pp", "parallelism.pipeline_parallel_degree"),
    Line(
        "layout.pipeline_schedule",
        "parallelism.pipeline_parallel_schedule",
        Choice(SCHEDULES),
        when=(IN_PIPELINE, unless("layout.pipeline_schedule", "zero_bubble")),
    ),
    Line(
        "layout.pipeline_schedule",
        "parallelism.pipeline_parallel_schedule",
        Choice(SCHEDULES),
        when=(IN_PIPELINE, given("layout.pipeline_schedule", "zero_bubble")),
        approximate=ZERO_BUBBLE,
    ),
    Line("layout.stage_layers", "", when=(IN_PIPELINE, unless("layout.stage_layers", None)), approximate=EVEN_SPLIT),
    Line(
        "layout.virtual_stages",
        "",
        Choice({2: None}),
        when=(IN_PIPELINE, given("layout.pipeline_schedule", "interleaved")),
    ),
    Line(
        "layout.virtual_stages",
        "",
        Choice({1: None}),
        when=(IN_PIPELINE, unless("layout.pipeline_schedule", "interleaved")),
    ),
    Line("layout.sequence_parallel", "parallelism.enable_sequence_parallel"),
    Line(
        "layout.zero_stage",
        "parallelism.fsdp_reshard_after_forward",
        Choice({3: "always", 2: "never"}),
        when=(SHARDED,),
    ),
    Line("layout.context_method", "", Choice({"ring": None}), when=(unless("layout.cp", 1),)),
    Line("precision.compute", "training.mixed_precision_param", Choice({"bf16": "bfloat16", "fp32": "float32"})),
    Line("precision.reduce", "training.mixed_precision_reduce", Choice({"fp32": "float32"})),
    Line("compile", "compile.enable"),
    Line(
        "recompute",
        "activation_checkpoint",
        Choice({"none": None, "full": "full"}),
        when=(unless("recompute", "selective"),),
    ),
    Line(
        "recompute",
        "activation_checkpoint",
        Choice({"selective": "selective"}),
        when=(given("recompute", "selective"),),
        approximate=OPS,
    ),
    # torchtitan has no value for "never", so use an interval that no run reaches.
    Line("checkpoint.interval_steps", "checkpoint.interval", OrNone(1_000_000_000)),
    Line("checkpoint.mode", "checkpoint.async_mode", Choice({"async": "async", "sync": "disabled"})),
    Line("checkpoint.keep_last", "checkpoint.keep_latest_k", AtLeast(2)),
    Line("cluster.num_nodes", "--nnodes", destination="command"),
    Line("cluster.devices_per_node", "--nproc-per-node", destination="command"),
    Line("cluster.device", "", Choice({"cuda": None})),
)

FIXED = (
    Fixed("training.disable_cuda_graphs", True, "CUDA graphs do not support a pipeline", (IN_PIPELINE,)),
    Fixed(
        "training.disable_cuda_graphs",
        True,
        "CUDA graphs do not support the exchange of tokens between experts",
        (NO_PIPELINE, unless("layout.ep", 1)),
    ),
    Fixed("checkpoint.enable", True, "trainspec always writes checkpoints"),
    Fixed("checkpoint.last_save_model_only", False, "trainspec can resume from its last checkpoint"),
    Fixed("dataloader.dataset", "c4", "a dataset that torchtitan registers"),
    Fixed("lr_scheduler.min_lr_factor", 1.0, "the learning rate is constant", (CONSTANT,)),
)

LIMITS = {
    "optim.name": "torchtitan's other optimizers need a parameter group for each kind of parameter",
    "optim.grad_clip_norm": "",
    "layout.zero_stage": "FSDP2 always shards gradients: stage 2 keeps parameters after the forward pass, 3 frees them",
    "layout.etp": "torchtitan does not shard experts by tensor parallelism",
    "layout.virtual_stages": "the schedule determines the number of stages per rank",
    "layout.context_method": "torchtitan sends keys and values around a ring",
    "precision.reduce": "torchtitan sums gradients in float32",
    "precision.matmul": "torchtitan's fp8 is a model converter: see its config_registry",
    "offload": "torchtitan offloads parameters, gradients and optimizer state together",
    "data.source": "",
    "train.eval_interval_steps": "torchtitan's validator reads a separate dataset",
    "cluster.device": "torchtitan only trains on GPUs",
}
OF_RECIPE = {
    "data": "torchtitan reads datasets registered in hf_datasets/text_datasets.py: c4, or yours if you add it",
    "data.tokenizer": "the tokenizer's folder is Trainer.Config's hf_assets_path",
    "train.max_skipped_steps": "torchtitan does not handle non-finite steps",
}
IMPORTS = """from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{family} import model_registry
from torchtitan.trainer import Trainer
"""
CALLS = {
    "optimizer": "default_adamw",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "checkpoint": "CheckpointManager.Config",
    "compile": "CompileConfig",
    "metrics": "MetricsProcessor.Config",
    "debug": "DebugConfig",
    "dataloader": "HuggingFaceTextDataLoader.Config",
}
"""Section of the configuration -> the call that builds the section."""
RECOMPUTES = {None: "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
LOSS = "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)))"


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if the recipe does not clip gradients."""
    if run["optim.grad_clip_norm"] is None:
        message = "`optim.grad_clip_norm` is null, but torchtitan always clips"
        yield Problem("not_said", message, "optim.grad_clip_norm", "set optim.grad_clip_norm=1e9")


def module_text(translation: Translation, run: RunValues) -> str:
    """Return the Python module, which only contains literal values and calls of torchtitan's functions."""
    sections = nest(translation.keys_of("config"))
    family, _, size = str(sections.pop("model")).partition(".")
    recompute = RECOMPUTES[sections.pop("activation_checkpoint")]  # type: ignore[index]
    arguments = ["model_spec=model_spec,", f"loss={LOSS},", f"activation_checkpoint={recompute},"]
    for name, values in sections.items():
        assert isinstance(values, dict)
        literals = {key: repr(tuple(one) if isinstance(one, list) else one) for key, one in values.items()}
        arguments += call_lines(name, CALLS[name], literals)
    body = "\n".join(f"        {line}" for line in arguments)
    return (
        f'"""The run {run.recipe} as trainspec planned it, for torchtitan {TARGET.version}."""\n\n'
        f"{IMPORTS.format(family=family)}\n\n"
        f"def {MODULE}() -> Trainer.Config:\n"
        f"    model_spec = model_registry({size!r})\n"
        f"    return Trainer.Config(\n{body}\n    )\n"
    )


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    command = [*torchrun(run.whole("cluster.num_nodes"), run.whole("cluster.devices_per_node"))]
    command += ["-m torchtitan.train", f"--module {MODULE} --config {MODULE}"]
    about = f"Starts torchtitan, using the configuration of {run.recipe} next to this file."
    here = f'export PYTHONPATH={FOLDER}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return {f"{MODULE}.py": module_text(translation, run), "launch.sh": shell_script(about, command, {}, needs=[here])}


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read. A minimal factor of 1 means a constant rate; a flavor implies the sizes of
    its model."""
    if keys.get("lr_scheduler.min_lr_factor") == 1.0:
        values["optim.schedule.kind"] = "constant"
        values.pop("optim.schedule.final_lr_ratio", None)
    sizes = FLAVORS.get(str(keys.get("model")), {})
    return {**values, **{f"model.{key}": value for key, value in sizes.items()}, "optim.name": "adamw"}


TARGET = Target(
    "torchtitan", "torchtitan", "0.3.0", LINES, render, FIXED, LIMITS, OF_RECIPE, (refused_together,), complete
)
