"""Megatron-LM: a shell script with the arguments of pretrain_gpt.py and the environment variables that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import (
    ADAM,
    IN_PIPELINE,
    SHARDED,
    TOKEN_FILE,
    WSD,
    Choice,
    Fixed,
    LastSteps,
    Line,
    OrNone,
    RunValues,
    Times,
    UnsupportedValueError,
    Where,
    WholeNumber,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import Keys, Target, Translation, options, shell_script, torchrun

FILE = "pretrain.sh"


@dataclass(frozen=True)
class StageLayers:
    """The layers of each pipeline stage, such as `Et*17|t*15L`. The embedding comes first and the loss last."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, list)
        return "E" + "|".join(f"t*{layers}" for layers in value) + "L"

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        stages = str(value).removeprefix("E").removesuffix("L").split("|")
        if not all(stage.startswith("t*") and stage[2:].isdecimal() for stage in stages):
            raise UnsupportedValueError("E, then t*N for each stage, separated by |, then L")
        return [int(stage[2:]) for stage in stages]


@dataclass(frozen=True)
class HeldOut:
    """The fraction of held-out data. Megatron takes percentages for training, validation and test data."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, (int, float))
        return f"{100 * (1 - value):.12g},{100 * value:.12g},0"

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        parts = [float(part) for part in str(value).split(",") if part.replace(".", "", 1).isdecimal()]
        if len(parts) != 3 or not sum(parts):
            raise UnsupportedValueError("three numbers: training, validation, test")
        return float(f"{parts[1] / sum(parts):.12g}")


@dataclass(frozen=True)
class OneMore:
    """A seed of 0 or more. Megatron's seeds start at 1."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, int)
        return value + 1

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, int) or value < 1:
            raise UnsupportedValueError("a positive whole number")
        return value - 1


def _by_fsdp(run: RunValues) -> bool:
    return run["layout.zero_stage"] in (2, 3) and run["derived.shards"] != 1


BY_FSDP = Where(_by_fsdp)
BEFORE_BLACKWELL = unless("derived.arch", "blackwell")
"""On chips before Blackwell, exchanges must be launched before the kernels that they overlap with."""
ZERO_1 = (SHARDED, given("layout.zero_stage", 1))
FALLS = unless("optim.schedule.kind", "constant")
AN_UPDATE = "Megatron's decay is at most one update behind trainspec's"
PADDED = "Megatron pads the vocabulary to a multiple of 128 x tp"
SEED = "Megatron's seed is higher by one, because it must be positive; the initial weights are drawn differently"
ATTENTION = "Megatron recomputes the attention core, according to its list of modules"
BY_DOCUMENT = "Megatron holds out the last documents; trainspec selects them by a hash"

MODEL = (
    Line("model.num_layers", "--num-layers"),
    Line("model.hidden_size", "--hidden-size"),
    Line("model.ffn_size", "--ffn-hidden-size"),
    Line("model.num_heads", "--num-attention-heads"),
    Line("model.num_kv_heads", "--num-query-groups"),
    Line("model.head_dim", "--kv-channels"),
    Line("model.vocab_size", "--vocab-size", approximate=PADDED),
    Line("model.norm_eps", "--norm-epsilon"),
    Line("model.rope_theta", "--rotary-base", WholeNumber()),
    Line(
        "model.activation",
        "--swiglu",
        Choice({"silu": True}),
        when=(given("model.gated_mlp", True),),
        also=("model.gated_mlp",),
    ),
    Line("model.tied_embeddings", "--untie-embeddings-and-output-weights", Choice({False: True, True: False})),
    Line("model.attention_bias", "--add-qkv-bias", Choice({"none": False, "qkv": True})),
    Line("model.qk_norm", "--qk-layernorm"),
    Line("model.learned_positions", "--position-embedding-type", Choice({0: "rope"})),
)
DATA = (
    Line("data.seq_len", "--seq-length"),
    Line("data.seq_len", "--max-position-embeddings"),
    Line("data.source", "", Choice({"megatron": None})),
    Line("data.path", "--data-path", TOKEN_FILE),
    Line("data.heldout_fraction", "--split", HeldOut(), approximate=BY_DOCUMENT),
)
LAYOUT = (
    Line("layout.tp", "--tensor-model-parallel-size"),
    Line("layout.sequence_parallel", "--sequence-parallel", when=(unless("layout.tp", 1),)),
    Line("layout.cp", "--context-parallel-size"),
    Line(
        "layout.context_method",
        "--cp-comm-type",
        Choice({"ring": "p2p", "ulysses": "a2a"}),
        when=(unless("layout.cp", 1),),
    ),
    Line("layout.pp", "--pipeline-model-parallel-size"),
    Line("layout.pipeline_schedule", "", Choice({"1f1b": None, "interleaved": None}), when=(IN_PIPELINE,)),
    Line(
        "layout.virtual_stages",
        "--num-virtual-stages-per-pipeline-rank",
        when=(IN_PIPELINE, unless("layout.virtual_stages", 1), given("layout.stage_layers", None)),
    ),
    Line("layout.virtual_stages", "", when=(IN_PIPELINE,)),
    Line(
        "layout.stage_layers",
        "--pipeline-model-parallel-layout",
        StageLayers(),
        when=(IN_PIPELINE, unless("layout.stage_layers", None)),
    ),
    Line(
        "layout.zero_stage",
        "--data-parallel-sharding-strategy",
        Choice({2: "optim_grads", 3: "optim_grads_params"}),
        when=(BY_FSDP,),
    ),
    Line("layout.zero_stage", "--use-distributed-optimizer", Choice({1: True}), when=ZERO_1),
    Line("layout.dp_shard", ""),
    Line(
        "layout.dp_replicate", "--num-distributed-optimizer-instances", when=(*ZERO_1, unless("layout.dp_replicate", 1))
    ),
    Line("layout.dp_replicate", "", when=(given("derived.shards", 1),)),
)
REST = (
    Line("batching.micro_batch_size", "--micro-batch-size"),
    Line("batching.global_batch_size", "--global-batch-size"),
    Line("train.max_steps", "--train-iters"),
    Line("train.max_steps", "--lr-decay-iters"),
    Line("train.seed", "--seed", OneMore(), approximate=SEED),
    Line("train.log_interval_steps", "--log-interval"),
    Line("train.eval_interval_steps", "--eval-interval", when=(unless("train.eval_interval_steps", None),)),
    Line("precision.compute", "--bf16", Choice({"bf16": True}), when=(given("precision.compute", "bf16"),)),
    Line("precision.compute", "--fp16", Choice({"fp16": True}), when=(given("precision.compute", "fp16"),)),
    Line("precision.compute", "", Choice({"fp32": None}), when=(unless("precision.compute", "bf16", "fp16"),)),
    Line(
        "precision.reduce",
        "--accumulate-allreduce-grads-in-fp32",
        Choice({"fp32": True}),
        when=(given("precision.reduce", "fp32"),),
    ),
    Line(
        "precision.reduce", "--grad-reduce-in-bf16", Choice({"bf16": True}), when=(given("precision.reduce", "bf16"),)
    ),
    Line(
        "precision.matmul",
        "--fp8-recipe",
        Choice({"fp8": "tensorwise", "mxfp8": "mxfp8"}),
        when=(unless("precision.matmul", "compute"),),
    ),
    Line("optim.name", "--optimizer", Choice({"adamw": "adam", "sgd": "sgd"})),
    Line("optim.lr", "--lr"),
    Line("optim.beta1", "--adam-beta1", when=(ADAM,)),
    Line("optim.beta2", "--adam-beta2", when=(ADAM,)),
    Line("optim.eps", "--adam-eps", when=(ADAM,)),
    Line("optim.weight_decay", "--weight-decay"),
    Line("optim.grad_clip_norm", "--clip-grad", OrNone(0.0)),
    Line(
        "optim.schedule.kind",
        "--lr-decay-style",
        Choice({"constant": "constant", "cosine": "cosine", "wsd": "WSD"}),
        approximate=AN_UPDATE,
    ),
    Line("optim.schedule.warmup_steps", "--lr-warmup-iters"),
    Line("optim.schedule.final_lr_ratio", "--min-lr", Times("optim.lr"), when=(FALLS,)),
    Line("optim.schedule.decay_fraction", "--lr-wsd-decay-iters", LastSteps(), when=(WSD,)),
    Line("recompute", "--recompute-granularity", Choice({"full": "full"}), when=(given("recompute", "full"),)),
    Line(
        "recompute",
        "--recompute-granularity",
        Choice({"selective": "selective"}),
        when=(given("recompute", "selective"),),
        approximate=ATTENTION,
    ),
    Line("checkpoint.interval_steps", "--save-interval", when=(unless("checkpoint.interval_steps", None),)),
    Line("checkpoint.interval_steps", "", when=(given("checkpoint.interval_steps", None),)),
    Line("checkpoint.mode", "--async-save", Choice({"async": True, "sync": False})),
    Line("cluster.num_nodes", "--nnodes", destination="command"),
    Line("cluster.devices_per_node", "--nproc-per-node", destination="command"),
    Line("cluster.device", "", Choice({"cuda": None})),
)
LINES = (*MODEL, *DATA, *LAYOUT, *REST)

FIXED = (
    Fixed("--group-query-attention", True, "--num-query-groups sets the number of groups"),
    Fixed("--normalization", "RMSNorm", "trainspec's decoders have RMSNorm"),
    Fixed("--disable-bias-linear", True, "trainspec's linear layers have no bias"),
    Fixed("--attention-dropout", 0.0, "trainspec has no dropout"),
    Fixed("--hidden-dropout", 0.0, "trainspec has no dropout"),
    Fixed("--tokenizer-type", "NullTokenizer", "the data consists of token ids"),
    Fixed("--use-megatron-fsdp", True, "Megatron-FSDP implements ZeRO 2 and 3", (BY_FSDP,)),
    Fixed("--use-distributed-optimizer", True, "Megatron-FSDP needs it", (BY_FSDP,)),
    Fixed("--ckpt-format", "fsdp_dtensor", "Megatron-FSDP's checkpoint format", (BY_FSDP,)),
    Fixed("--lr-wsd-decay-style", "linear", "trainspec's decay is linear", (WSD,)),
    Fixed("--recompute-method", "uniform", "every block is recomputed", (given("recompute", "full"),)),
    Fixed("--recompute-num-layers", 1, "each block is recomputed separately", (given("recompute", "full"),)),
    Fixed("--fp8-format", "e4m3", "trainspec's format", (unless("precision.matmul", "compute"),)),
    Fixed("--eval-iters", 0, "no evaluation", (given("train.eval_interval_steps", None),)),
    Fixed("--save", "checkpoints", "the folder for checkpoints"),
    Fixed(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        1,
        "launches the exchanges of tp and cp in order",
        (Where(lambda run: not _by_fsdp(run) and (run["layout.tp"] != 1 or run["layout.cp"] != 1)), BEFORE_BLACKWELL),
        "environment",
    ),
)

LIMITS = {
    "data.source": "Megatron only reads NAME.bin with NAME.idx",
    "layout.pipeline_schedule": "",
    "layout.dp_replicate": "Megatron-FSDP shards over all data-parallel ranks; zero_stage 1 supports replicas",
    "optim.name": "",
    "offload": "Megatron's optimizer offload needs Transformer Engine's precision-aware optimizer",
    "cluster.device": "Megatron only trains on GPUs",
}
NOT_CARRIED = {
    "checkpoint.keep_last": "Megatron keeps every checkpoint; --save-retain-interval deletes some of them",
    "compile": "only affects the speed; Megatron has hand-written fused kernels",
    "data.tokenizer": "the data consists of token ids",
}


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if the recipe writes asynchronous checkpoints, which Megatron-FSDP does not support."""
    if run["checkpoint.mode"] == "async" and _by_fsdp(run):
        message = "`checkpoint.mode` is async, but Megatron-FSDP writes checkpoints synchronously"
        yield Problem("not_said", message, "checkpoint.mode", "set checkpoint.mode=sync")


WITHOUT_ORDER = "unset CUDA_DEVICE_MAX_CONNECTIONS  # FSDP rejects the value 1"


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    command = torchrun(run.whole("cluster.num_nodes"), run.whole("cluster.devices_per_node"))
    command += ['"$MEGATRON/pretrain_gpt.py"', *options(translation.keys_of("config"))]
    needs = [': "${MEGATRON:?set MEGATRON to the folder of Megatron-LM}"']
    needs += [WITHOUT_ORDER] if _by_fsdp(run) else []
    about = f"Trains {run.recipe} with Megatron-LM, as trainspec planned it."
    return {FILE: shell_script(about, command, translation.keys_of("environment"), needs=needs)}


WITHOUT_FLAGS: dict[str, JsonValue] = {
    "precision.compute": "fp32",
    "model.attention_bias": "none",
    "model.qk_norm": False,
    "model.tied_embeddings": True,
    "checkpoint.mode": "sync",
    "layout.sequence_parallel": False,
}
"""How Megatron behaves without certain flags."""


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read. Missing flags mean Megatron's defaults; without a sharding flag, the state is
    not sharded."""
    values = {**WITHOUT_FLAGS, **values}
    if "--swiglu" in keys:
        values |= {"model.activation": "silu", "model.gated_mlp": True}
    if "--data-path" in keys:
        values["data.source"] = "megatron"
    return sharded(values)


def sharded(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the values with an unsharded layout, unless a key sets the sharding."""
    if "layout.zero_stage" not in values:
        return {**values, "layout.dp_shard": 1, "layout.dp_replicate": "auto"}
    return values


TARGET = Target(
    "megatron", "Megatron-LM", "core 0.19.2", LINES, render, FIXED, LIMITS, NOT_CARRIED, (refused_together,), complete
)
