"""Accelerate: the YAML for `accelerate launch --config_file`, which starts the user's script with FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.core.errors import Problem
from trainspec_cli.wings.interop.not_carried import SCRIPT
from trainspec_cli.wings.interop.table import REPLICATED, SHARDED, Choice, Fixed, Line, RunValues, given, unless
from trainspec_cli.wings.interop.target import (
    FOLDER,
    USER_SCRIPT,
    Target,
    Translation,
    options,
    shell_script,
    yaml_file,
)

CONFIG = "accelerate.yaml"
BY_FSDP = (unless("derived.is_ddp", True),)
IN_MESH = "parallelism_config.parallelism_config_"
REDUCED = "gradients are summed in the mixed_precision format, unless your script sets a MixedPrecisionPolicy"

LINES = (
    Line("cluster.num_nodes", "num_machines"),
    Line("derived.world_size", "num_processes"),
    Line("cluster.devices_per_node", ""),
    Line("cluster.device", "use_cpu", Choice({"cuda": False, "cpu": True})),
    Line("layout.dp_replicate", f"{IN_MESH}dp_replicate_size", when=BY_FSDP),
    Line("layout.dp_shard", f"{IN_MESH}dp_shard_size", when=BY_FSDP),
    Line("layout.tp", f"{IN_MESH}tp_size", when=BY_FSDP),
    Line("layout.cp", f"{IN_MESH}cp_size", when=BY_FSDP),
    Line("layout.dp_replicate", "", when=(REPLICATED,)),
    Line("layout.context_method", f"{IN_MESH}cp_backend", Choice({"ring": "torch"}), when=(unless("layout.cp", 1),)),
    Line(
        "layout.zero_stage",
        "fsdp_config.fsdp_reshard_after_forward",
        Choice({3: True, 2: False}),
        when=(*BY_FSDP, SHARDED),
    ),
    Line("layout.zero_stage", "", when=(given("derived.shards", 1),)),
    Line("precision.compute", "mixed_precision", Choice({"bf16": "bf16", "fp16": "fp16", "fp32": "no"})),
    Line(
        "precision.reduce",
        "",
        Choice({"fp32": None, "bf16": None}),
        when=(*BY_FSDP, given("precision.compute", "bf16", "fp16")),
        approximate=REDUCED,
    ),
    Line("precision.reduce", "", Choice({"fp32": None}), when=(REPLICATED,)),
    Line("precision.reduce", "", Choice({"fp32": None}), when=(*BY_FSDP, given("precision.compute", "fp32"))),
    Line("derived.grad_accum_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", destination="environment"),
    Line("recompute", "fsdp_config.fsdp_activation_checkpointing", Choice({"none": False, "full": True}), when=BY_FSDP),
    Line("compile", "dynamo_config.dynamo_backend", Choice({True: "INDUCTOR"}), when=(given("compile", True),)),
)

FIXED = (
    Fixed("compute_environment", "LOCAL_MACHINE", "the job does not run on a cloud service"),
    Fixed("distributed_type", "FSDP", "the state is sharded", BY_FSDP),
    Fixed(
        "distributed_type",
        "MULTI_GPU",
        "every rank has the full state",
        (REPLICATED, given("cluster.device", "cuda")),
    ),
    Fixed(
        "distributed_type",
        "MULTI_CPU",
        "every rank has the full state",
        (REPLICATED, given("cluster.device", "cpu")),
    ),
    Fixed(
        "--rdzv_backend",
        "c10d",
        "the launcher does not read the file's rdzv_backend",
        (unless("cluster.num_nodes", 1),),
        "command",
    ),
    Fixed("fsdp_config.fsdp_version", 2, "only FSDP2 supports meshes of several axes", BY_FSDP),
    Fixed("fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "each block is sharded separately", BY_FSDP),
    Fixed("fsdp_config.fsdp_state_dict_type", "SHARDED_STATE_DICT", "each rank writes its shard of the state", BY_FSDP),
    Fixed("fsdp_config.fsdp_offload_params", False, "the sharded state is not offloaded", BY_FSDP),
    Fixed(
        "dynamo_config.dynamo_use_regional_compilation",
        True,
        "trainspec compiles each block",
        (given("compile", True),),
    ),
)

LIMITS = {
    "layout.zero_stage": "FSDP2 always shards gradients: stage 2 keeps parameters after the forward pass, 3 frees them",
    "layout.pp": "Accelerate has no pipeline parallelism",
    "layout.ep": "Accelerate has no expert parallelism",
    "layout.context_method": "Accelerate uses torch's ring attention; for Ulysses use DeepSpeed (see --for deepspeed)",
    "precision.matmul": "Accelerate's fp8 needs settings for a specific backend",
    "offload": "FSDP offloads parameters, gradients and optimizer state together",
    "recompute": "Accelerate can only recompute entire blocks",
    "precision.reduce": "DDP sums gradients in the format of the parameters",
}

OF_SCRIPT = {
    **{key: why for key, why in SCRIPT.items() if key != "compile"},
    "optim": "your script creates the optimizer and the schedule",
    "batching.micro_batch_size": "the batch size of your script's data loader",
    "batching.global_batch_size": "data loader batch size x gradient accumulation steps x data-parallel ranks",
}


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if the recipe recomputes blocks without FSDP."""
    if run["recompute"] != "none" and run["derived.is_ddp"]:
        message = f"`recompute` is {run['recompute']}, but Accelerate recomputes only with FSDP"
        yield Problem("not_said", message, "recompute", "set recompute=none, or layout=fsdp")


def launch_words(run: RunValues, config: str = CONFIG) -> list[str]:
    """Return the words of `accelerate launch` that come before the script."""
    words = ["accelerate launch", f"--config_file {FOLDER}/{config}"]
    if run["cluster.num_nodes"] == 1:
        return words
    return [*words, '--machine_rank "${NODE_RANK:?this node, from 0}"', *MASTER]


MASTER = ('--main_process_ip "${MASTER_ADDR:?the first node}"', '--main_process_port "${MASTER_PORT:-29500}"')


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    about = f"Starts your script with Accelerate, using the configuration of {run.recipe} next to this file."
    command = [*launch_words(run), *options(translation.keys_of("command")), '"$SCRIPT"']
    return {
        CONFIG: yaml_file(translation.keys_of("config")),
        "launch.sh": shell_script(about, command, translation.keys_of("environment"), needs=[USER_SCRIPT]),
    }


TARGET = Target("accelerate", "Accelerate", "1.15.0", LINES, render, FIXED, LIMITS, OF_SCRIPT, (refused_together,))
