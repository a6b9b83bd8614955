"""Megatron-Bridge: a Python module that builds a `ConfigContainer` and trains with it, started by torchrun.

Megatron-Bridge runs the same Megatron as the target `megatron`. Most of Megatron's arguments are fields here, so most
of the table is a renamed copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import Choice, Fixed, Line, RunValues, given, unless
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
from trainspec_cli.wings.interop.targets import megatron

MODULE = "trainspec_bridge"

NAMES: Mapping[str, str] = {
    "--num-layers": "model.num_layers",
    "--hidden-size": "model.hidden_size",
    "--ffn-hidden-size": "model.ffn_hidden_size",
    "--num-attention-heads": "model.num_attention_heads",
    "--num-query-groups": "model.num_query_groups",
    "--kv-channels": "model.kv_channels",
    "--vocab-size": "model.vocab_size",
    "--norm-epsilon": "model.layernorm_epsilon",
    "--rotary-base": "model.rotary_base",
    "--swiglu": "model.gated_linear_unit",
    "--add-qkv-bias": "model.add_qkv_bias",
    "--qk-layernorm": "model.qk_layernorm",
    "--position-embedding-type": "model.position_embedding_type",
    "--seq-length": "model.seq_length",
    "--max-position-embeddings": "dataset.seq_length",
    "--data-path": "dataset.data_path",
    "--split": "dataset.split",
    "--tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "--sequence-parallel": "model.sequence_parallel",
    "--context-parallel-size": "model.context_parallel_size",
    "--cp-comm-type": "model.cp_comm_type",
    "--pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--train-iters": "train.train_iters",
    "--lr-decay-iters": "scheduler.lr_decay_iters",
    "--seed": "rng.seed",
    "--log-interval": "logger.log_interval",
    "--eval-interval": "validation.eval_interval",
    "--eval-iters": "validation.eval_iters",
    "--bf16": "mixed_precision.bf16",
    "--fp16": "mixed_precision.fp16",
    "--fp8-recipe": "mixed_precision.fp8_recipe",
    "--fp8-format": "mixed_precision.fp8",
    "--optimizer": "optimizer.optimizer",
    "--lr": "optimizer.lr",
    "--min-lr": "optimizer.min_lr",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--weight-decay": "optimizer.weight_decay",
    "--clip-grad": "optimizer.clip_grad",
    "--lr-decay-style": "scheduler.lr_decay_style",
    "--lr-warmup-iters": "scheduler.lr_warmup_iters",
    "--lr-wsd-decay-iters": "scheduler.lr_wsd_decay_iters",
    "--lr-wsd-decay-style": "scheduler.lr_wsd_decay_style",
    "--recompute-granularity": "model.recompute_granularity",
    "--recompute-method": "model.recompute_method",
    "--recompute-num-layers": "model.recompute_num_layers",
    "--save": "checkpoint.save",
    "--save-interval": "checkpoint.save_interval",
    "--async-save": "checkpoint.async_save",
    "--ckpt-format": "checkpoint.ckpt_format",
    "--normalization": "model.normalization",
    "--attention-dropout": "model.attention_dropout",
    "--hidden-dropout": "model.hidden_dropout",
    "--tokenizer-type": "tokenizer.tokenizer_type",
}
"""Arguments of Megatron-LM -> fields with the same meaning."""
NOT_RENAMED = (
    "--untie-embeddings-and-output-weights",
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
    "--group-query-attention",
    "--disable-bias-linear",
)
"""Arguments that have no field, or whose field has the opposite meaning."""
BF16 = given("precision.compute", "bf16")
FP16 = given("precision.compute", "fp16")
FP32 = unless("precision.compute", "bf16", "fp16")


LINES = (
    # Lines whose field takes the same values as the argument
    *(
        replace(line, theirs=NAMES.get(line.theirs, line.theirs))
        for line in megatron.LINES
        if line.theirs not in NOT_RENAMED and not (line.ours == "precision.compute" and not line.theirs)
    ),
    Line("model.vocab_size", "tokenizer.vocab_size"),
    Line("model.tied_embeddings", "model.share_embeddings_and_output_weights"),
    Line("precision.compute", "mixed_precision.fp32", Choice({"fp32": True}), when=(FP32,)),
    Line("precision.reduce", "mixed_precision.grad_reduce_in_fp32", Choice({"fp32": True, "bf16": False})),
    Line("optim.weight_decay", "scheduler.start_weight_decay"),
    Line("optim.weight_decay", "scheduler.end_weight_decay"),
    Line("train.seed", "dataset.random_seed", approximate="Megatron-Bridge orders the samples differently"),
    Line("checkpoint.keep_last", "checkpoint.most_recent_k"),
)
FIXED = (
    *(
        replace(fixed, theirs=NAMES.get(fixed.theirs, fixed.theirs))
        for fixed in megatron.FIXED
        if fixed.theirs not in NOT_RENAMED
    ),
    Fixed("model.activation_func", "silu", "a gated SiLU"),
    Fixed("model.add_bias_linear", False, "trainspec's linear layers have no bias"),
    Fixed("model.should_pad_vocab", True, "tp shards a padded vocabulary"),
    Fixed("mixed_precision.params_dtype", "torch.bfloat16", "the compute format", (BF16,)),
    Fixed("mixed_precision.pipeline_dtype", "torch.bfloat16", "the format for messages between stages", (BF16,)),
    Fixed("mixed_precision.params_dtype", "torch.float16", "the compute format", (FP16,)),
    Fixed("mixed_precision.pipeline_dtype", "torch.float16", "the format for messages between stages", (FP16,)),
    Fixed("dist.use_megatron_fsdp", True, "Megatron-FSDP implements ZeRO 2 and 3", (megatron.BY_FSDP,)),
    Fixed("dataset.reset_position_ids", False, "positions count from the start of a sample"),
    Fixed("dataset.reset_attention_mask", False, "documents in a sample attend to each other"),
    Fixed("dataset.eod_mask_loss", False, "the loss covers every token"),
    Fixed("dataset.dataloader_type", "single", "samples are read in one pass"),
    Fixed("scheduler.weight_decay_incr_style", "constant", "the weight decay is constant"),
    Fixed("checkpoint.load", "checkpoints", "a restarted run resumes from here"),
)
NOT_CARRIED = {key: why for key, why in megatron.NOT_CARRIED.items() if key != "checkpoint.keep_last"}
CALLS = {
    "model": "GPTModelProvider",
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dataset": "GPTDatasetConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
    "dist": "DistributedInitConfig",
    "mixed_precision": "MixedPrecisionConfig",
}
"""Section of the configuration -> the section's class."""
REQUIRED = ("ddp",)
"""Sections that the configuration must contain even if they are empty."""
DTYPES = ("params_dtype", "pipeline_dtype")
"""Fields whose values are torch types."""
ELSEWHERE = {
    "GPTModelProvider": "megatron.bridge.models.gpt_provider",
    "MixedPrecisionConfig": "megatron.bridge.training.mixed_precision",
    "TokenizerConfig": "megatron.bridge.training.tokenizers.config",
}
"""Class -> the module that contains it, if that is not `CONFIG`."""
CONFIG = "megatron.bridge.training.config"
MAIN = """

if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(trainspec_run(), forward_step)
"""


def module_text(keys: Keys, run: RunValues) -> str:
    """Return the Python module, which only contains literal values."""
    sections = {**{name: {} for name in REQUIRED}, **nest(keys)}
    arguments = []
    for name, call in CALLS.items():
        if isinstance(values := sections.get(name), dict):
            literals = {key: str(value) if key in DTYPES else repr(value) for key, value in values.items()}
            arguments += call_lines(name, call, literals)
    body = "\n".join(f"        {line}" for line in arguments)
    called = [call for name, call in CALLS.items() if name in sections]
    others = [f"from {ELSEWHERE[call]} import {call}\n" for call in called if call in ELSEWHERE]
    config = sorted(["ConfigContainer", *(call for call in called if call not in ELSEWHERE)])
    names = "".join(f"    {name},\n" for name in config)
    precision = sections.get("mixed_precision")
    has_types = isinstance(precision, dict) and any(key in DTYPES for key in precision)
    torch = "import torch\n" if has_types else ""
    imports = f"{torch}{''.join(others)}from {CONFIG} import (\n{names})\n"
    return (
        f'"""The run {run.recipe} as trainspec planned it, for Megatron-Bridge {TARGET.version}."""\n\n'
        f"{imports}\n\n"
        "def trainspec_run() -> ConfigContainer:\n"
        f"    return ConfigContainer(\n{body}\n    )\n{MAIN}"
    )


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    command = torchrun(run.whole("cluster.num_nodes"), run.whole("cluster.devices_per_node"))
    command += [f"{FOLDER}/{MODULE}.py"]
    about = f"Trains {run.recipe} with Megatron-Bridge, using the configuration next to this file."
    environment = translation.keys_of("environment")
    needs = [megatron.WITHOUT_ORDER] if megatron.BY_FSDP.holds(run) else []
    script = shell_script(about, command, environment, needs=needs)
    return {f"{MODULE}.py": module_text(translation.keys_of("config"), run), "launch.sh": script}


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read. Missing fields mean Megatron's defaults; two fields together stand for a
    gated SiLU."""
    values = {**megatron.WITHOUT_FLAGS, **values}
    if keys.get("model.activation_func") == "silu" and keys.get("model.gated_linear_unit") is True:
        values |= {"model.activation": "silu", "model.gated_mlp": True}
    if "dataset.data_path" in keys:
        values["data.source"] = "megatron"
    return megatron.sharded(values)


TARGET = Target(
    "megatron-bridge",
    "Megatron-Bridge",
    "0.6.2",
    LINES,
    render,
    FIXED,
    megatron.LIMITS,
    NOT_CARRIED,
    (megatron.refused_together,),
    complete,
)
