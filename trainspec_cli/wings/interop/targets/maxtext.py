"""MaxText: a YAML file on top of MaxText's base.yml, and the command that starts a process on each node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import (
    ADAM,
    CONSTANT,
    SHARDED,
    TOKEN_FILE,
    WSD,
    AtLeast,
    Choice,
    Fixed,
    LastSteps,
    Line,
    OrNone,
    RunValues,
    UnsupportedValueError,
    When,
    Where,
    WholeNumber,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import FOLDER, Keys, Target, Translation, shell_script, yaml_file

FILE = "maxtext.yml"


@dataclass(frozen=True)
class StepsFraction:
    """A number of steps in the recipe. MaxText takes a fraction, multiplies it by the run's number of steps, and rounds
    down."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, int)
        steps = run.whole("train.max_steps")
        fraction = value / steps
        while int(steps * fraction) < value:
            fraction = math.nextafter(fraction, 2)
        return fraction

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, (int, float)):
            raise UnsupportedValueError("a fraction")
        return int(known.whole("train.max_steps") * value)


@dataclass(frozen=True)
class LastFraction:
    """The decay phase of WSD. MaxText's fraction must yield an integer number of steps."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return StepsFraction().write(LastSteps().write(value, run), run)

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return LastSteps().read(StepsFraction().read(value, known), known)


@dataclass(frozen=True)
class PartOf:
    """A factor of an axis's size. When the factors are read, `complete` multiplies them, so they cannot contradict each
    other."""

    key: str

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        return value

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        return known.values.get(self.key, value)


def axis_lines(axis: str, theirs: str, when: tuple[When, ...] = ()) -> tuple[Line, ...]:
    """Return the lines for an axis's two factors: within a node, and across nodes."""
    places = (("ici", f"derived.within_node.{axis}"), ("dcn", f"derived.across_nodes.{axis}"))
    return tuple(Line(ours, f"{place}_{theirs}_parallelism", PartOf(ours), when) for place, ours in places)


SEQUENCE = given("layout.sequence_parallel", True)
PLAIN_TP = unless("layout.sequence_parallel", True)
ZERO_1 = (SHARDED, given("layout.zero_stage", 1))
BY_FSDP = Where(lambda run: run["layout.zero_stage"] != 1 or run["derived.shards"] == 1)
SCHEDULES = Choice({"cosine": "cosine", "wsd": "wsd", "constant": "cosine"})
"""MaxText has no constant schedule. A cosine that ends at its initial value replaces it, and `complete` recognises
it."""
SELECTIVE = "`minimal` keeps the outputs of matmuls; trainspec also keeps those of attention"
KEEPS_ALL = "MaxText always recomputes something: `minimal` keeps the outputs of matmuls"
WARMUP = "MaxText's warm-up starts at 0, one update behind trainspec's"
SHARDING = "XLA inserts the exchanges that the sharding rules require"
NOTHING_HELD_OUT = "MaxText does not hold out samples: it evaluates on separate files (grain_eval_files)"
SEED = "MaxText draws the initial weights differently"

MODEL = (
    Line("model.num_layers", "base_num_decoder_layers"),
    Line("model.hidden_size", "base_emb_dim"),
    Line("model.ffn_size", "base_mlp_dim"),
    Line("model.num_heads", "base_num_query_heads"),
    Line("model.num_kv_heads", "base_num_kv_heads"),
    Line("model.head_dim", "head_dim"),
    Line("model.vocab_size", "vocab_size"),
    Line("model.norm_eps", "normalization_layer_epsilon"),
    Line("model.rope_theta", "rope_max_timescale", WholeNumber()),
    Line("model.tied_embeddings", "logits_via_embedding"),
    Line("model.qk_norm", "use_qk_norm"),
    Line("model.qk_norm", "decoder_block", Choice({False: "llama2", True: "qwen3"})),
    Line("model.activation", "", Choice({"silu": None})),
    Line("model.gated_mlp", "", Choice({True: None})),
)
DATA = (
    Line("data.seq_len", "max_target_length"),
    Line("data.source", "grain_file_type", Choice({"megatron": "mmap"})),
    Line("data.path", "grain_train_files", TOKEN_FILE),
    Line("data.heldout_fraction", "", approximate=NOTHING_HELD_OUT),
)
LAYOUT = (
    *axis_lines("dp_replicate", "data", (BY_FSDP,)),
    *axis_lines("dp_shard", "fsdp", (BY_FSDP,)),
    *axis_lines("dp_shard", "data", ZERO_1),
    *axis_lines("tp", "tensor_sequence", (SEQUENCE,)),
    *axis_lines("tp", "tensor", (PLAIN_TP,)),
    *axis_lines("cp", "context"),
    Line("layout.dp_replicate", "", when=(BY_FSDP,)),
    Line("layout.dp_shard", ""),
    Line("layout.tp", ""),
    Line("layout.cp", ""),
    Line("layout.sequence_parallel", "", approximate=SHARDING, when=(unless("layout.tp", 1),)),
    Line(
        "layout.zero_stage",
        "",
        Choice({3: None}),
        when=(SHARDED, unless("layout.zero_stage", 1)),
        approximate=SHARDING,
    ),
    Line("layout.zero_stage", "shard_optimizer_over_data", Choice({1: True}), when=ZERO_1),
    Line(
        "layout.context_method", "context_parallel_strategy", Choice({"ring": "ring"}), when=(unless("layout.cp", 1),)
    ),
)
REST = (
    Line("derived.device_batch_size", "per_device_batch_size"),
    Line("derived.grad_accum_steps", "gradient_accumulation_steps"),
    Line("batching.micro_batch_size", ""),
    Line("batching.global_batch_size", ""),
    Line("train.max_steps", "steps"),
    Line("train.seed", "init_weights_seed", approximate=SEED),
    Line("train.seed", "data_shuffle_seed", approximate="MaxText orders the samples differently"),
    Line("train.log_interval_steps", "log_period"),
    Line("train.eval_interval_steps", "eval_interval", OrNone(-1)),
    Line("precision.compute", "dtype", Choice({"bf16": "bfloat16", "fp32": "float32"})),
    Line("precision.reduce", "grad_dtype", Choice({"fp32": "float32", "bf16": "bfloat16"})),
    Line("optim.name", "opt_type", Choice({"adamw": "adamw"})),
    Line("optim.lr", "learning_rate"),
    Line("optim.beta1", "adam_b1", when=(ADAM,)),
    Line("optim.beta2", "adam_b2", when=(ADAM,)),
    Line("optim.eps", "adam_eps", when=(ADAM,)),
    Line("optim.weight_decay", "adam_weight_decay", when=(ADAM,), approximate="norms decay too"),
    Line("optim.grad_clip_norm", "gradient_clipping_threshold", OrNone(0.0)),
    Line("optim.schedule.kind", "lr_schedule_type", SCHEDULES, approximate=WARMUP),
    Line("optim.schedule.warmup_steps", "warmup_steps_fraction", StepsFraction()),
    Line("optim.schedule.final_lr_ratio", "learning_rate_final_fraction", when=(unless(CONSTANT.key, "constant"),)),
    Line("optim.schedule.decay_fraction", "wsd_decay_steps_fraction", LastFraction(), when=(WSD,)),
    Line("recompute", "remat_policy", Choice({"full": "full"}), when=(unless("recompute", "selective"),)),
    Line(
        "recompute",
        "remat_policy",
        Choice({"selective": "minimal"}),
        when=(given("recompute", "selective"),),
        approximate=SELECTIVE,
    ),
    Line("checkpoint.interval_steps", "checkpoint_period", AtLeast(1)),
    Line("checkpoint.keep_last", "max_num_checkpoints_to_keep"),
    Line("checkpoint.mode", "async_checkpointing", Choice({"async": True, "sync": False})),
    Line("cluster.device", "hardware", Choice({"cuda": "gpu_multiprocess", "cpu": "cpu"})),
    Line("cluster.num_nodes", "num_slices"),
    Line("cluster.devices_per_node", ""),
)
FIXED = (
    Fixed("ici_fsdp_parallelism", 1, "zero_stage 1 shards the optimizer over the data axis", ZERO_1),
    Fixed("dcn_fsdp_parallelism", 1, "zero_stage 1 shards the optimizer over the data axis", ZERO_1),
    Fixed("base_config", "base.yml", "MaxText's defaults for all other keys"),
    Fixed("run_name", "trainspec", "the name of the run's folder"),
    Fixed("base_output_directory", "output", "the folder for checkpoints"),
    Fixed("dataset_type", "grain", "MaxText's reader for files"),
    Fixed("weight_dtype", "float32", "trainspec's weights are kept in fp32"),
    Fixed("mu_dtype", "float32", "the first moment is kept in fp32"),
    Fixed("mlp_activations", ["silu", "linear"], "a gated SiLU"),
    Fixed("normalize_embedding_logits", False, "trainspec does not scale logits"),
    Fixed("enable_dropout", False, "trainspec has no dropout"),
    Fixed("learning_rate_final_fraction", 1.0, "the learning rate is constant", (CONSTANT,)),
    Fixed("wsd_decay_style", "linear", "trainspec's decay is linear", (WSD,)),
    Fixed("save_checkpoint_on_start", False, "trainspec writes no checkpoint before the first step"),
)
LIMITS = {
    "data.source": "trainspec only emits MaxText's reader for Megatron's NAME.bin with NAME.idx",
    "layout.pp": "MaxText's pipeline is a loop over stages in one program, without trainspec's schedules",
    "layout.context_method": "MaxText's Ulysses needs TPU kernels",
    "layout.zero_stage": "XLA frees gathered parameters after use or, with zero_stage 1, keeps a full copy",
    "layout.dp_replicate": "with zero_stage 1, MaxText shards the optimizer over all data-parallel ranks",
    "recompute": KEEPS_ALL,
    "optim.name": "",
    "precision.matmul": "MaxText's quantisation recipes differ",
}
NOT_CARRIED = {
    "compile": "only affects the speed; XLA compiles the entire step",
    "data.tokenizer": "the data consists of token ids",
}


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if the recipe enables evaluation, because MaxText needs separate files for that."""
    if run["train.eval_interval_steps"] is not None:
        message = "`train.eval_interval_steps` is set, but MaxText evaluates on separate files"
        hint = "set train.eval_interval_steps=null, and set eval_interval and grain_eval_files yourself"
        yield Problem("not_said", message, "train.eval_interval_steps", hint)


ADDRESSES = (
    'export JAX_COORDINATOR_IP="${JAX_COORDINATOR_IP:?the first node}"',
    'export JAX_COORDINATOR_PORT="${JAX_COORDINATOR_PORT:-29500}"',
    'export NODE_RANK="${NODE_RANK:?this node, from 0}"',
)


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    nodes = run.whole("cluster.num_nodes")
    about = f"Trains {run.recipe} with MaxText: one process on each node uses all of its devices."
    command = ["python -m maxtext.trainers.pre_train.train", f"{FOLDER}/{FILE}"]
    needs = [*ADDRESSES, f"export NNODES={nodes}"] if run["cluster.device"] == "cuda" else []
    return {FILE: yaml_file(translation.keys_of("config")), "launch.sh": shell_script(about, command, {}, needs=needs)}


AXES = {
    "dp_replicate": ("data",),
    "dp_shard": ("fsdp",),
    "tp": ("tensor", "tensor_sequence"),
    "cp": ("context",),
}


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read: multiply the factors of each axis, and compute batch sizes and nodes from the
    axes."""
    if keys.get("learning_rate_final_fraction") == 1.0:
        values |= {"optim.schedule.kind": "constant"}
    sizes = {axis: _product(names, keys) for axis, names in AXES.items()}
    if min(sizes.values()) < 1:
        return values
    if keys.get("shard_optimizer_over_data") is True:
        sizes |= {"dp_shard": sizes["dp_replicate"], "dp_replicate": 1}
    values |= {f"layout.{axis}": size for axis, size in sizes.items()}
    if sizes["dp_shard"] > 1 and "layout.zero_stage" not in values:
        values["layout.zero_stage"] = 3
    values["layout.sequence_parallel"] = _product(("tensor_sequence",), keys) > 1
    nodes = math.prod(_size(key, keys) for key in keys if key.startswith("dcn_"))
    world = math.prod(sizes.values())
    ranks = sizes["dp_replicate"] * sizes["dp_shard"]
    values |= {"cluster.num_nodes": nodes, "cluster.devices_per_node": world // nodes}
    each = keys.get("per_device_batch_size")
    if isinstance(each, (int, float)):
        accumulated = keys.get("gradient_accumulation_steps", 1)
        values["batching.micro_batch_size"] = max(1, round(each * world / ranks))
        if isinstance(accumulated, int):
            values["batching.global_batch_size"] = round(each * world * accumulated)
    return values


def _product(names: tuple[str, ...], keys: Keys) -> int:
    return math.prod(_size(f"{place}_{name}_parallelism", keys) for name in names for place in ("ici", "dcn"))


DEFAULT_SIZES = {
    "ici_fsdp_parallelism": -1,
    "dcn_data_parallelism": -1,
}
"""Axes that use all remaining devices by default, according to MaxText's base.yml."""


def _size(key: str, keys: Keys) -> int:
    size = keys.get(key, DEFAULT_SIZES.get(key, 1))
    return size if isinstance(size, int) else -1


TARGET = Target(
    "maxtext",
    "MaxText",
    "0.2.5",
    (*MODEL, *DATA, *LAYOUT, *REST),
    render,
    FIXED,
    LIMITS,
    NOT_CARRIED,
    (refused_together,),
    complete,
)
