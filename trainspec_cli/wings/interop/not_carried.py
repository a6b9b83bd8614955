"""Keys that an emitted configuration omits. emitted.json lists them with the reasons.

There are three kinds: keys that only trainspec uses (`NOT_CARRIED`), values without effect (`OFF`), and keys that
another value makes irrelevant (`MEANINGLESS`). Every other value that an engine does not support is rejected."""

from __future__ import annotations

from collections.abc import Mapping

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import OneOf, given, unless

NOT_CARRIED: Mapping[str, str] = {
    "description": "a note for human readers",
    "run": "trainspec's run folder",
    "tracking": "trainspec's trackers; the engine has its own",
    "observe": "trainspec's diagnosis, which only covers its own runs",
    "scheduler": "trainspec's scheduler, which only schedules its own runs",
    "resilience": "the engine and its launcher recover in other ways",
    "batching.on_loss": "only applies after the loss of a replica group",
    "batching.shrink_lr": "only applies after the loss of a replica group",
    "sample": "only for text that trainspec generates during training",
    "train.sample_interval_steps": "only for text that trainspec generates during training",
    "kernels": "the engine chooses its own kernels for the same operations",
    "comm.bucket_bytes": "the size of exchanges, which does not change results",
    "framework": "only tells the planner about the engine",
    "cluster": "only tells the planner about the hardware",
    "model.name": "only a name in plans and reports",
    "model.hf_type": "only names the type that exports write",
    "model.family": "implied by the engine's model",
    "optim.state_bytes": "only tells the planner about a user-defined optimizer",
    "train.tokens": "replaced by train.max_steps",
    "train.epochs": "replaced by train.max_steps",
    "train.max_skipped_steps": "the engine handles non-finite steps in its own way",
    "checkpoint.memory_interval_steps": "only for trainspec's restarts from in-memory copies",
    "data.max_bytes": "only limits the text that trainspec prepares",
    "data.tokenizer.vocab_size": "only for a tokenizer that trainspec trains",
}
"""Key or section -> why it is not carried over. A line in an engine's table takes precedence."""

SCRIPT: Mapping[str, str] = {
    "model": "your script builds the model",
    "lora": "your script builds the model",
    "init": "your script loads the weights",
    "data": "your script reads the data",
    "train.seed": "your script sets the seed",
    "train.max_steps": "your script's loop ends the run",
    "train.eval_interval_steps": "your script evaluates",
    "train.log_interval_steps": "your script logs",
    "checkpoint": "your script decides when it writes checkpoints",
    "compile": "only affects the speed; your script compiles the model",
}
"""Keys that are up to the user's script, if the engine is a library that the script uses."""

OFF: Mapping[str, JsonValue] = {
    **dict.fromkeys((f"layout.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")), 1),
    "layout.virtual_stages": 1,
    "layout.stage_layers": None,
    "layout.sequence_parallel": False,
    "batching.schedule.kind": "constant",
    "comm.gradients": "full",
    "comm.parameters": "full",
    "comm.across_nodes": None,
    "compile": False,
    "recompute": "none",
    "offload": "none",
    "fault": "",
    "init.from": None,
    "lora.rank": 0,
    "optim.groups": [],
    "optim.options": {},
    "precision.matmul": "compute",
    "train.callbacks": [],
    "train.loss": "",
    "train.loss_options": {},
    "train.early_stop_evals": None,
    "train.eval_interval_steps": None,
    "checkpoint.keep_best": False,
    "cluster.pools": [],
    "scheduler.changes": [],
    "data.document_masks": False,
    "data.mixture": {},
    "data.validation": {},
    "data.options": {},
    "data.chat_template": None,
    "data.tokenizer.path": None,
    "data.tokenizer.code": "",
    "data.tokenizer.options": {},
    "data.tokenizer.end_of_document": None,
    "model.prediction_layers": 0,
    "model.prediction_loss_weight": 0.3,
    "model.learned_positions": 0,
    "model.sliding_window": None,
    "model.mla": None,
    "model.experts": None,
    "model.gate_limit": None,
    "model.attention_bias": "none",
    "model.qk_norm": False,
    "model.attention_sinks": False,
    "model.rope_scaling": None,
    "model.norm": "rms",
    "model.norm_bias": False,
    "model.norm_offset": False,
    "model.norm_places": "before",
    "model.parallel_residual": "none",
    "model.qk_norm_over": "head",
    "model.mlp_bias": False,
    "model.rotary_fraction": 1.0,
    "model.rotary_pairs": "halves",
    "model.local_rope_theta": None,
    "model.rotated_layers": "all",
    "model.unrotated_every": 0,
    "model.embedding_scale": 1.0,
    "model.residual_scale": 1.0,
    "model.logit_scale": 1.0,
    "model.attention_scale": None,
    "model.attention_softcap": None,
    "model.logit_softcap": None,
    "model.tied_embeddings": False,
}
"""Key -> the value that has no effect. A key with this value needs no line in an engine's table."""

MEANINGLESS: Mapping[str, OneOf] = {
    "layout.zero_stage": given("derived.shards", 1),
    "layout.sequence_parallel": given("layout.tp", 1),
    "layout.pipeline_schedule": given("layout.pp", 1),
    "layout.virtual_stages": given("layout.pp", 1),
    "layout.stage_layers": given("layout.pp", 1),
    "layout.context_method": given("layout.cp", 1),
    "optim.momentum": unless("optim.name", "muon"),
    "optim.beta1": given("optim.name", "sgd"),
    "optim.beta2": given("optim.name", "sgd"),
    "optim.eps": given("optim.name", "sgd"),
    "optim.schedule.decay_fraction": unless("optim.schedule.kind", "wsd"),
    "optim.schedule.final_lr_ratio": given("optim.schedule.kind", "constant"),
    "batching.schedule": given("batching.schedule.kind", "constant"),
    "lora": given("lora.rank", 0),
    "data.phantom": unless("data.source", "phantom"),
    "data.loss_on": unless("data.source", "chat"),
    "data.text_field": unless("data.source", "jsonl", "parquet", "arrow"),
    "model.global_attention_every": given("model.sliding_window", None),
    "model.activation": unless("model.family", "decoder", "hybrid"),
}
"""Key or section -> the condition that makes it irrelevant."""


def nearest(key: str, table: Mapping[str, object]) -> str | None:
    """Return the name in the table that applies to a key: the key itself, or the innermost section around it."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in table), None)


def governed_by(key: str) -> OneOf | None:
    """Return the condition that makes a key irrelevant, or None."""
    section = nearest(key, MEANINGLESS)
    return None if section is None else MEANINGLESS[section]
