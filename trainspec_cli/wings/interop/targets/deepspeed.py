"""DeepSpeed: the JSON for `deepspeed.initialize(config=...)` in the user's script."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.not_carried import SCRIPT
from trainspec_cli.wings.interop.table import (
    ADAM,
    CONSTANT,
    SHARDED,
    AtLeast,
    Choice,
    Fixed,
    Line,
    OrNone,
    RunValues,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import (
    FOLDER,
    USER_SCRIPT,
    Keys,
    Target,
    Translation,
    json_file,
    options,
    shell_script,
)

CONFIG = "ds_config.json"
FALLS = unless("optim.schedule.kind", "constant")
WARMS_UP = unless("optim.schedule.warmup_steps", 0)
DECAYS_ALL = (
    "DeepSpeed applies weight decay unless your script's parameter groups prevent it; trainspec skips norms and biases"
)
COSINE_STEP = "the schedule ends one step after trainspec's, whose cosine ends with the last update"
AUTOTP = "AutoTP only shards layers whose module names it knows"
MODEL_CODE = "the JSON sets the options; your model's code must call deepspeed.checkpointing"

LINES = (
    Line("batching.global_batch_size", "train_batch_size"),
    Line("batching.micro_batch_size", "train_micro_batch_size_per_gpu"),
    Line("derived.grad_accum_steps", "gradient_accumulation_steps"),
    Line("layout.zero_stage", "zero_optimization.stage", when=(SHARDED,)),
    Line("layout.dp_shard", "", when=(SHARDED,)),
    Line("layout.dp_replicate", "", when=(given("derived.shards", 1),)),
    Line("layout.tp", "tensor_parallel.autotp_size", when=(unless("layout.tp", 1),), approximate=AUTOTP),
    Line("layout.cp", "sequence_parallel_size", when=(unless("layout.cp", 1),)),
    Line("layout.context_method", "", Choice({"ulysses": None}), when=(unless("layout.cp", 1),)),
    Line("precision.compute", "bf16.enabled", Choice({"bf16": True}), when=(given("precision.compute", "bf16"),)),
    Line("precision.compute", "fp16.enabled", Choice({"fp16": True}), when=(given("precision.compute", "fp16"),)),
    Line("precision.compute", "", Choice({"fp32": None}), when=(unless("precision.compute", "bf16", "fp16"),)),
    Line("precision.reduce", "communication_data_type", Choice({"fp32": "fp32", "bf16": "bf16"})),
    Line("optim.name", "optimizer.type", Choice({"adamw": "AdamW", "sgd": "SGD"})),
    Line("optim.lr", "optimizer.params.lr"),
    Line("optim.beta1", "optimizer.params.betas[0]", when=(ADAM,)),
    Line("optim.beta2", "optimizer.params.betas[1]", when=(ADAM,)),
    Line("optim.eps", "optimizer.params.eps", when=(ADAM,)),
    Line("optim.weight_decay", "optimizer.params.weight_decay", approximate=DECAYS_ALL),
    Line("optim.grad_clip_norm", "gradient_clipping", OrNone(0.0)),
    Line(
        "optim.schedule.kind",
        "scheduler.type",
        Choice({"cosine": "WarmupCosineLR"}),
        when=(FALLS,),
        approximate=COSINE_STEP,
    ),
    Line("optim.schedule.kind", "scheduler.type", Choice({"constant": "WarmupLR"}), when=(CONSTANT, WARMS_UP)),
    Line(
        "optim.schedule.kind", "", Choice({"constant": None}), when=(CONSTANT, given("optim.schedule.warmup_steps", 0))
    ),
    Line("optim.schedule.warmup_steps", "scheduler.params.warmup_num_steps", AtLeast(1), when=(FALLS,)),
    Line("optim.schedule.warmup_steps", "scheduler.params.warmup_num_steps", when=(CONSTANT, WARMS_UP)),
    Line("optim.schedule.warmup_steps", "", when=(CONSTANT, given("optim.schedule.warmup_steps", 0))),
    Line("optim.lr", "scheduler.params.warmup_max_lr", when=(CONSTANT, WARMS_UP)),
    Line("optim.schedule.final_lr_ratio", "scheduler.params.cos_min_ratio", when=(FALLS,)),
    Line("train.max_steps", "scheduler.params.total_num_steps", when=(FALLS,)),
    Line(
        "recompute",
        "activation_checkpointing.partition_activations",
        Choice({"full": False}),
        when=(unless("recompute", "none"),),
        approximate=MODEL_CODE,
    ),
    Line(
        "offload",
        "zero_optimization.offload_optimizer.device",
        Choice({"optimizer": "cpu"}),
        when=(unless("offload", "none"),),
    ),
    Line("train.log_interval_steps", "steps_per_print"),
    Line("cluster.num_nodes", "--num_nodes", destination="command"),
    Line("cluster.devices_per_node", "--num_gpus", destination="command"),
    Line("cluster.device", "DS_ACCELERATOR", Choice({"cuda": "cuda", "cpu": "cpu"}), destination="environment"),
)

FIXED = (
    Fixed("zero_optimization.stage", 0, "nothing is sharded", (given("derived.shards", 1),)),
    Fixed("data_types.grad_accum_dtype", "fp32", "trainspec accumulates gradients in fp32"),
    Fixed("scheduler.params.warmup_type", "linear", "trainspec's warm-up is linear", (FALLS,)),
    Fixed("scheduler.params.warmup_type", "linear", "trainspec's warm-up is linear", (CONSTANT, WARMS_UP)),
    Fixed("zero_allow_untested_optimizer", True, "SGD is torch's", (given("optim.name", "sgd"),)),
)

LIMITS = {
    "layout.dp_replicate": "ZeRO shards over all data-parallel ranks",
    "layout.sequence_parallel": "AutoTP does not shard norms and residuals",
    "layout.pp": "DeepSpeed's pipeline is a class that your model's code must use",
    "layout.ep": "DeepSpeed's experts are modules that your model's code must use",
    "layout.context_method": "DeepSpeed's sequence parallelism is Ulysses",
    "precision.matmul": "DeepSpeed's fp8 is a module that your model's code must use",
    "optim.schedule.kind": "",
    "optim.name": "DeepSpeed's Muon scales updates differently",
    "comm.gradients": "DeepSpeed's compressed exchanges need special optimizers",
    "offload": "",
}


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem for offloading without ZeRO, and for AutoTP with sequence parallelism."""
    if run["offload"] == "optimizer" and run["derived.shards"] == 1:
        message = "`offload` is optimizer, but DeepSpeed only offloads with ZeRO, and this run shards nothing"
        yield Problem("not_said", message, "offload", "set offload=none, or layout.dp_shard=auto")
    if run["layout.tp"] != 1 and run["layout.cp"] != 1:
        message = f"`layout.cp` is {run['layout.cp']}, but DeepSpeed cannot combine sequence parallelism with AutoTP"
        yield Problem("not_said", message, "layout.cp", "set layout.cp=1 or layout.tp=1")


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    hostfile = [] if run["cluster.num_nodes"] == 1 else ['--hostfile "${HOSTFILE:-hostfile}"']
    command = ["deepspeed", *hostfile, *options(translation.keys_of("command")), '"$SCRIPT"']
    command += ["--deepspeed", f"--deepspeed_config {FOLDER}/{CONFIG}"]
    about = f"Starts your script with DeepSpeed, using the configuration of {run.recipe} next to this file."
    return {
        CONFIG: json_file(translation.keys_of("config")),
        "launch.sh": shell_script(about, command, translation.keys_of("environment"), needs=[USER_SCRIPT]),
    }


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read. Without ZeRO, nothing is sharded; without bf16 and fp16, the format is
    fp32."""
    values.setdefault("precision.compute", "fp32")
    values.setdefault("optim.schedule.kind", "constant")
    if values.get("layout.zero_stage", 0) == 0:
        return {**values, "layout.zero_stage": 3, "layout.dp_shard": 1, "layout.dp_replicate": "auto"}
    if values.get("layout.cp", 1) != 1:
        values["layout.context_method"] = "ulysses"
    return values


TARGET = Target("deepspeed", "DeepSpeed", "0.19.8", LINES, render, FIXED, LIMITS, SCRIPT, (refused_together,), complete)
