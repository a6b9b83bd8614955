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
    CannotSayError,
    Choice,
    Fixed,
    Line,
    OrNone,
    RunValues,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import FOLDER, Keys, Spoken, Target, nest, shell_script, torchrun

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
"""A model and its size, as torchtitan's registry names them -> the keys of `model` that they are."""
SAID_OF_MODEL = tuple(f"model.{key}" for key in FLAVORS["llama3.8B"])
ROPE = "torchtitan's Llama 3 stretches the rotary frequencies as Llama 3.1 does, and initialises in its own way"


@dataclass(frozen=True)
class Flavor:
    """The sizes of the model, as a name of the registry."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        for name, sizes in FLAVORS.items():
            if all(run[f"model.{key}"] == size for key, size in sizes.items()):
                return name
        raise CannotSayError("the sizes of " + ", ".join(FLAVORS), "model=llama3_8b")

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if value not in FLAVORS:
            raise CannotSayError(", ".join(FLAVORS))
        return FLAVORS[str(value)]["num_layers"]


NO_PIPELINE = given("layout.pp", 1)
DECAYS_ALL = "one group of parameters decays; trainspec spares norms and biases"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
AN_UPDATE = "its decay is an update ahead of trainspec's at most"
OWN_CUT = "trainspec cuts the layers by planned times; torchtitan cuts them as evenly as it can"
ZERO_BUBBLE = "its zero bubble schedule has two stages on each rank; trainspec's has one"
OPS = "it keeps the results of some operations; trainspec recomputes the attention core alone"

LINES = (
    Line("model.num_layers", "model", Flavor(), approximate=ROPE, also=SAID_OF_MODEL),
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
    Line("layout.stage_layers", "", when=(IN_PIPELINE, unless("layout.stage_layers", None)), approximate=OWN_CUT),
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
    # It has no word for never: this many steps are never reached.
    Line("checkpoint.interval_steps", "checkpoint.interval", OrNone(1_000_000_000)),
    Line("checkpoint.mode", "checkpoint.async_mode", Choice({"async": "async", "sync": "disabled"})),
    Line("checkpoint.keep_last", "checkpoint.keep_latest_k", AtLeast(2)),
    Line("cluster.num_nodes", "--nnodes", place="command"),
    Line("cluster.devices_per_node", "--nproc-per-node", place="command"),
    Line("cluster.device", "", Choice({"cuda": None})),
)

FIXED = (
    Fixed("training.disable_cuda_graphs", True, "CUDA graphs know no pipeline", (IN_PIPELINE,)),
    Fixed(
        "training.disable_cuda_graphs",
        True,
        "CUDA graphs know no exchange of tokens between experts",
        (NO_PIPELINE, unless("layout.ep", 1)),
    ),
    Fixed("checkpoint.enable", True, "trainspec writes checkpoints always"),
    Fixed("checkpoint.last_save_model_only", False, "trainspec's last checkpoint can be resumed from"),
    Fixed("dataloader.dataset", "c4", "the data set that torchtitan registers"),
    Fixed("lr_scheduler.min_lr_factor", 1.0, "the rate does not fall", (CONSTANT,)),
)

CANNOT = {
    "optim.name": "its other optimizers need a group for each kind of parameter",
    "optim.grad_clip_norm": "",
    "layout.zero_stage": "FSDP2 shards gradients always: 2 keeps the parameters after the forward, 3 frees them",
    "layout.etp": "its experts are not divided by tensor parallelism",
    "layout.virtual_stages": "a schedule decides how many stages a rank has",
    "layout.context_method": "it sends keys and values round the ring",
    "precision.reduce": "gradients are summed in float32",
    "precision.matmul": "fp8 is a converter of the model: see torchtitan's config_registry",
    "offload": "it offloads parameters, gradients and optimizer state together",
    "data.source": "",
    "train.eval_interval_steps": "its validator reads a data set of its own",
    "cluster.device": "it trains on GPUs",
}
OF_RECIPE = {
    "data": "it reads Hugging Face datasets that hf_datasets/text_datasets.py registers: c4, or yours beside it",
    "data.tokenizer": "the folder of the tokenizer is Trainer.Config's hf_assets_path",
    "train.max_skipped_steps": "it has no rule for steps that are not finite",
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
"""Section of the configuration -> the call that makes it."""
RECOMPUTES = {None: "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
LOSS = "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)))"


def refused_together(run: RunValues) -> Iterator[Problem]:
    if run["optim.grad_clip_norm"] is None:
        message = "`optim.grad_clip_norm` is null, and torchtitan clips always: it allows a norm"
        yield Problem("not_said", message, "optim.grad_clip_norm", "type optim.grad_clip_norm=1e9")


def module_text(spoken: Spoken, run: RunValues) -> str:
    """Return the Python module; nothing in it is computed but what torchtitan's own functions make."""
    sections = nest(spoken.keys_of("config"))
    family, _, size = str(sections.pop("model")).partition(".")
    recompute = RECOMPUTES[sections.pop("activation_checkpoint")]  # type: ignore[index]
    arguments = ["model_spec=model_spec", f"loss={LOSS}", f"activation_checkpoint={recompute}"]
    for name, values in sections.items():
        assert isinstance(values, dict)
        arguments += [
            f"{name}={CALLS[name]}(",
            *(f"    {key}={_literal(value)}," for key, value in values.items()),
            ")",
        ]
    body = "\n".join(f"        {line}" + ("," if line[-1] not in "(," else "") for line in arguments)
    return (
        f'"""The run {run.recipe} as trainspec planned it, for torchtitan {TARGET.version}."""\n\n'
        f"{IMPORTS.format(family=family)}\n\n"
        f"def {MODULE}() -> Trainer.Config:\n"
        f"    model_spec = model_registry({size!r})\n"
        f"    return Trainer.Config(\n{body}\n    )\n"
    )


def _literal(value: JsonValue) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def render(spoken: Spoken, run: RunValues) -> dict[str, str]:
    command = [*torchrun(run.whole("cluster.num_nodes"), run.whole("cluster.devices_per_node"))]
    command += ["-m torchtitan.train", f"--module {MODULE} --config {MODULE}"]
    about = f"Starts torchtitan with the configuration of {run.recipe} beside this file."
    here = f'export PYTHONPATH={FOLDER}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    return {f"{MODULE}.py": module_text(spoken, run), "launch.sh": shell_script(about, command, {}, needs=[here])}


def settle(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """A rate that falls by a factor of 1 does not fall; a model is one of the recipes' own."""
    if keys.get("lr_scheduler.min_lr_factor") == 1.0:
        values["optim.schedule.kind"] = "constant"
        values.pop("optim.schedule.final_lr_ratio", None)
    sizes = FLAVORS.get(str(keys.get("model")), {})
    return {**values, **{f"model.{key}": value for key, value in sizes.items()}, "optim.name": "adamw"}


TARGET = Target(
    "torchtitan", "torchtitan", "0.3.0", LINES, render, FIXED, CANNOT, OF_RECIPE, (refused_together,), settle
)
