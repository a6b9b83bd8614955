"""What users mean by keys, values, options and commands that trainspec does not have. All hints come from here. Many
keys have other names in torch, Hugging Face's configurations and TrainingArguments (with TRL and PEFT), DeepSpeed,
Megatron-LM, torchtitan, Lightning, nanoGPT, axolotl, torchrun and vLLM. `tests/core/mistypings.txt` has examples with
the intended word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainspec_cli.core.json_value import JsonValue

NAMES_BY_KEY: Mapping[str, str] = {
    "optim": "optimizer optimizer_config optimizer_cls",
    "optim.lr": "learning_rate learningrate base_lr peak_lr max_lr initial_lr lr_max",
    "optim.name": "optimizer_name optimizer_type optim_type",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.weight_decay": "wd decay l2 weight_decay_rate",
    "optim.grad_clip_norm": "max_grad_norm clip_grad grad_clip gradient_clipping gradient_clip_val max_norm",
    "optim.schedule": "lr_schedule lr_scheduler_kwargs",
    "optim.schedule.kind": "lr_scheduler lr_scheduler_type lr_decay_style decay_type",
    "optim.schedule.warmup_steps": """warmup_ratio lr_warmup_iters lr_warmup_fraction warmup_iters warmup_num_steps
        warmup warmup_fraction num_warmup_steps""",
    "optim.schedule.decay_fraction": "decay_ratio lr_wsd_decay_iters",
    "optim.schedule.final_lr_ratio": "min_lr min_lr_factor min_lr_rate min_lr_ratio eta_min",
    "batching.global_batch_size": "train_batch_size total_batch_size",
    "batching.micro_batch_size": """per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size
        train_micro_batch_size_per_gpu local_batch_size device_batch_size""",
    "batching.schedule.stages": "rampup_batch_size",
    "train": "training_arguments training_args trainer",
    "train.max_steps": """max_train_steps train_iters train_steps training_steps num_steps num_train_steps max_iters
        total_steps total_num_steps num_iterations""",
    "train.tokens": "train_tokens max_train_tokens total_tokens",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.seed": "random_seed manual_seed seed_everything data_seed",
    "train.eval_interval_steps": "eval_steps eval_interval eval_every val_check_interval validation_freq eval_freq",
    "train.early_stop_evals": "early_stopping early_stopping_patience patience",
    "train.log_interval_steps": "logging_steps log_interval log_freq log_every_n_steps steps_per_print",
    "checkpoint.interval_steps": "save_steps save_interval checkpoint_interval save_every every_n_train_steps",
    "checkpoint.keep_last": "save_total_limit keep_latest_k save_top_k",
    "checkpoint.keep_best": "load_best_model_at_end",
    "checkpoint.mode": "async_save async_mode",
    "data.seq_len": """max_seq_length max_seq_len seq_length sequence_length sequence_len block_size context_length
        cutoff_len max_position_embeddings model_max_length""",
    "data.path": "data_path dataset_path train_file train_files train_data data_prefix",
    "data.source": "dataset dataset_name",
    "data.text_field": "dataset_text_field text_column text_column_name",
    "data.tokenizer.path": "tokenizer_name_or_path tokenizer_model",
    "data.document_masks": "reset_attention_mask sample_packing packing",
    "data.loss_on": "assistant_only_loss completion_only_loss train_on_inputs",
    "model.num_layers": "num_hidden_layers n_layer n_layers",
    "model.hidden_size": "d_model n_embd hidden_dim",
    "model.num_heads": "num_attention_heads n_head n_heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.ffn_size": "intermediate_size ffn_hidden_size",
    "model.norm_eps": "rms_norm_eps layernorm_epsilon layer_norm_eps norm_epsilon",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings",
    "model.experts.top_k": "num_experts_per_tok moe_router_topk",
    "model.experts.num_experts": "num_local_experts n_routed_experts",
    "model.experts.expert_ffn_size": "moe_intermediate_size moe_ffn_hidden_size",
    "init.from": "model_name_or_path pretrained_model_name_or_path base_model initial_load_path pretrained_checkpoint",
    "lora.rank": "lora_r lora_rank lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules",
    "lora.base=nf4": "load_in_4bit bnb_4bit_quant_type use_4bit",
    "layout": "parallelism",
    "layout.tp": """tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tensor_parallel tp_size
        tp_degree""",
    "layout.pp": "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pp_size pp_degree",
    "layout.cp": "context_parallel_size context_parallel_degree sequence_parallel_size cp_size",
    "layout.ep": "expert_model_parallel_size expert_parallel_degree expert_parallel_size ep_size",
    "layout.dp_shard": "data_parallel_shard_degree fsdp fsdp_size sharding_strategy",
    "layout.dp_replicate": "data_parallel_replicate_degree ddp",
    "layout.zero_stage": "zero_optimization zero_stage_level",
    "layout.pipeline_schedule": "pipeline_parallel_schedule",
    "layout.virtual_stages": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
    "recompute": """gradient_checkpointing activation_checkpointing activation_checkpoint recompute_granularity
        recompute_activations checkpoint_activations""",
    "offload": "cpu_offload offload_optimizer offload_param enable_cpu_offload",
    "compile": "torch_compile use_compile compile_model",
    "precision.compute": "dtype torch_dtype mixed_precision mixed_precision_param amp fp16 half",
    "precision.compute=bf16": "bf16 bfloat16",
    "precision.compute=fp32": "fp32 float32",
    "precision.matmul=fp8": "fp8 float8",
    "precision.reduce": "mixed_precision_reduce reduce_dtype grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32",
    "kernels.attention": "attn_implementation use_flash_attn use_flash_attention flash_attention attention_backend",
    "cluster.num_nodes": "nnodes n_nodes nodes number_of_nodes",
    "cluster.devices_per_node": """nproc_per_node num_gpus n_gpus num_processes gpus ngpus devices num_devices
        n_gpu gpus_per_host ntasks_per_node""",
    "resilience.exchange_timeout_s": "ddp_timeout distributed_timeout_minutes train_timeout_seconds",
    "run.dir": "output_dir save_dir dump_folder out_dir default_root_dir logging_dir run_dir",
    "run.name": "run_name exp_name experiment_name",
    "tracking": "report_to loggers",
    "tracking.project": "wandb_project project_name",
    "tracking.wandb": "use_wandb enable_wandb wandb_log",
    "tracking.tensorboard": "enable_tensorboard tensorboard_dir",
}
"""A recipe key, or `KEY=VALUE`, and its names in other programs."""
_MICRO_BATCHES = (
    "the number of micro-batches per step follows from `batching.global_batch_size` and `batching.micro_batch_size`"
)
WITHOUT_KEY: Mapping[str, str] = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps", "accumulate_grad_batches"),
        _MICRO_BATCHES,
    ),
    "resume_from_checkpoint": "trainspec resume RUN continues a run; `init.from` starts one from another's weights",
    "data_parallel_size": "data parallelism is `layout.dp_shard` times `layout.dp_replicate`",
    "world_size": "the number of ranks follows from `cluster.num_nodes` and `cluster.devices_per_node`",
    "eval_strategy": "the model is evaluated every `train.eval_interval_steps`",
    "save_strategy": "a checkpoint is written every `checkpoint.interval_steps`",
}
"""Maps a name without a corresponding key to an explanation of how a recipe sets the same thing."""

OTHER_WORDS: Mapping[str, str] = {
    # other names of key values and of group options
    **dict.fromkeys(("bfloat16", "brain_float", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("half", "float16", "torch.float16"), "fp16"),
    **dict.fromkeys(("full", "float", "float32", "single", "torch.float32"), "fp32"),
    **dict.fromkeys(("float8", "e4m3"), "fp8"),
    **dict.fromkeys(
        ("gpu", "gpus", "nvidia", "chip", "chips", "card", "cards", "device", "devices"), "cuda accelerator"
    ),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adam"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adam8bit"), "adamw8bit"),
    "linear": "wsd",  # this schedule falls linearly, over the entire run if decay_fraction is 1
    **dict.fromkeys(("zero", "zero3", "deepspeed"), "fsdp deepspeed"),
    "llama3": "llama3_8b",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "a100": "a100_sxm_80gb a100_80gb",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    # groups
    **dict.fromkeys(("optimizer", "optimizers"), "optim"),
    **dict.fromkeys(("machine", "machines", "nodes"), "cluster"),
    **dict.fromkeys(("dataset", "datasets"), "data"),
    **dict.fromkeys(("parallelism", "sharding"), "layout"),
    # commands
    **dict.fromkeys(("train", "start", "begin", "fit", "finetune"), "launch"),
    **dict.fromkeys(("torchrun", "exec", "accelerate"), "run"),
    **dict.fromkeys(("submit", "slurm", "queue"), "sbatch"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("ls", "status", "ps", "jobs"), "runs"),
    **dict.fromkeys(("monitor", "top", "follow", "attach"), "watch"),
    **dict.fromkeys(("tail", "log", "cat"), "logs"),
    **dict.fromkeys(("kill", "cancel", "abort", "quit", "end"), "stop"),
    **dict.fromkeys(("summary", "results", "result"), "report"),
    **dict.fromkeys(("why", "debug", "profile"), "diagnose"),
    **dict.fromkeys(("check", "lint", "test", "verify"), "validate"),
    **dict.fromkeys(("estimate", "simulate", "predict", "forecast"), "plan"),
    **dict.fromkeys(("config", "print"), "show"),
    **dict.fromkeys(("describe", "info", "man", "docs"), "explain"),
    **dict.fromkeys(("env", "collect_env", "health"), "doctor"),
    **dict.fromkeys(("options", "presets"), "list"),
}
"""Maps a word from other programs to the words that it may mean here. The first word that is allowed is used."""


@dataclass(frozen=True)
class Former:
    """A key, word or option from earlier versions."""

    why: str
    """The reason, which completes "is no longer a setting: "."""
    hint: str
    always: JsonValue = None
    """For a key: the value that trainspec always uses now. Recipes and plans composed by earlier versions state every
    key, so a former key with this value is ignored; any other value is rejected."""


_LOW_RANK = Former(
    "it changed the loss and was never chosen by `auto`", "set comm=int8, or comm=bf16 for smaller rounding errors"
)
_RANK = Former("low-rank gradient compression was removed", "leave it out", always=4)
FORMER_KEYS: Mapping[tuple[str, str], Former] = {
    ("CommSpec", "rank"): _RANK,
    ("WireFormats", "rank"): _RANK,
    ("SitesSpec", "max_interval_steps"): Former(
        "the interval stays at the recipe's value",
        "remove it, and set resilience.sites.interval_steps to the value that `trainspec plan` shows",
    ),
    ("PhantomSpec", "seed"): Former("every run has the same phantoms, ordered by `train.seed`", "leave it out", 0),
    ("PlanesSpec", "detect_s"): Former("a lost path is always detected after 1 ms", "leave it out", 0.001),
    ("PlanesSpec", "probe_s"): Former("a lost path is always probed every second", "leave it out", 1.0),
}
"""Former keys, by the class of their section and by key. The same class may occur at several paths, for example once
per pool."""
FORMER_WORDS: Mapping[tuple[str, str, str], Former] = {
    (section, key, "low_rank"): _LOW_RANK
    for section in ("CommSpec", "WireFormats")
    for key in ("gradients", "across_nodes")
}
"""Values that are no longer accepted, keyed by section class, then key, then the former value."""
FORMER_OPTIONS: Mapping[tuple[str, str], Former] = {("comm", "low_rank"): _LOW_RANK}
"""Former options, by group and by option."""

FORMER_FLAGS: Mapping[str, str] = {
    "webhook": "--notify URL",
    "site": "resilience.sites.site=I",
    "sites-endpoint": "resilience.sites.endpoint=HOST:PORT",
    "sites-secret": "resilience.sites.secret=FILE",
    "site-listen": "resilience.sites.listen=HOST:PORT",
}
"""Maps a former command option to what to type instead."""

CONTAINED_CHARS = 3
"""Minimum length of a word that is searched for inside other words, such as 4090 in rtx_4090."""

_KEYS = {name: key for key, names in NAMES_BY_KEY.items() for name in names.split()}


def closest(got: str, allowed: Iterable[str]) -> str | None:
    """Return the member of `allowed` that is closest to an unknown word; None if no member is close. A close member has
    a similar spelling or the same meaning, or is the only one that has the same letters (tyni for tiny) or contains the
    word."""
    from difflib import get_close_matches

    by_shape = {_shape(word): word for word in allowed}
    shape = _shape(got)
    same = [word for word in OTHER_WORDS.get(shape, "").split() if word in by_shape]
    near = same or get_close_matches(shape, by_shape, n=1, cutoff=0.7)
    if not near and len(shape) >= CONTAINED_CHARS:
        swapped = [word for word in by_shape if sorted(word) == sorted(shape)]
        holding = [word for word in by_shape if shape in word.split("_")]
        near = next((found for found in (swapped, holding) if len(found) == 1), [])
    return by_shape[near[0]] if near else None


def closest_path(got: str, paths: Iterable[str]) -> str | None:
    """Return the closest dotted path that differs from `got` only in the spelling of its words, each of which must be
    as close as `closest` requires. Comparing complete paths would let a long last word hide a wrong section."""
    words = got.split(".")
    left = [path.split(".") for path in paths if path.count(".") == len(words) - 1]
    for place, word in enumerate(words):
        here = dict.fromkeys(path[place] for path in left)
        near = word if word in here else closest(word, here)
        left = [path for path in left if path[place] == near]
    return ".".join(left[0]) if left else None


def _shape(word: str) -> str:
    return word.lower().replace("-", "_")


def key_of(name: str) -> str:
    """Return the recipe key, or `KEY=VALUE`, that has this name in another program, or ""."""
    return _KEYS.get(_shape(name), "")


def hint_for(name: str) -> str:
    """Return what to type instead of another program's name for a key; "" if the name is not known."""
    key = key_of(name)
    return f"did you mean `{key}`?" if key else WITHOUT_KEY.get(_shape(name), "")
