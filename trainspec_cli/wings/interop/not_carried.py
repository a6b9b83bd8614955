"""What an emitted configuration does not say, and why that loses nothing: in one place, and listed in every emission.

Three kinds: values that no engine but trainspec has a use for (`NOT_CARRIED`), values that ask for nothing (`OFF`), and
values without a meaning because of another (`MEANINGLESS`). Whatever else an engine cannot say is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import OneOf, given, unless

NOT_CARRIED: Mapping[str, str] = {
    "description": "a note for people",
    "run": "the run folder of trainspec",
    "tracking": "trackers of trainspec; the engine has its own",
    "observe": "trainspec's diagnosis of its own runs",
    "scheduler": "trainspec's scheduler of its own runs",
    "resilience": "the engine and its launcher recover in their own way",
    "batching.on_loss": "speaks of replica groups that are lost",
    "batching.shrink_lr": "speaks of replica groups that are lost",
    "sample": "text that trainspec writes from its own model",
    "train.sample_interval_steps": "text that trainspec writes from its own model",
    "kernels": "the engine chooses its own kernels for the same operations",
    "comm.bucket_bytes": "the size of an exchange, which changes no result",
    "framework": "describes the engine to the planner",
    "cluster": "describes the hardware to the planner",
    "model.name": "a name for plans and reports",
    "model.family": "the family is said by the engine's own model",
    "optim.state_bytes": "tells the planner what an optimizer of one's own keeps",
    "train.tokens": "said by train.max_steps",
    "train.epochs": "said by train.max_steps",
    "train.max_skipped_steps": "the engine has its own rule for steps that are not finite",
    "checkpoint.memory_interval_steps": "copies in memory, by which trainspec restarts",
    "data.max_bytes": "limits what trainspec prepares of a text",
    "data.tokenizer.vocab_size": "of a tokenizer that trainspec trains",
}
"""Key, or the section that it belongs to -> why it is not carried. A key that the engine has a line for is said."""

SCRIPT: Mapping[str, str] = {
    "model": "your script builds the model",
    "lora": "your script builds the model",
    "init": "your script loads the weights",
    "data": "your script reads the data",
    "train.seed": "your script sets the seed",
    "train.max_steps": "your script's loop ends the run",
    "train.eval_interval_steps": "your script evaluates",
    "train.log_interval_steps": "your script logs",
    "checkpoint": "your script writes checkpoints, and knows when",
    "compile": "changes speed alone; your script compiles the model",
}
"""What belongs to the user's own script, where an engine is a library that the script calls."""

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
    "model.learned_positions": 0,
    "model.sliding_window": None,
    "model.mla": None,
    "model.experts": None,
    "model.gate_limit": None,
    "model.attention_bias": "none",
    "model.qk_norm": False,
    "model.attention_sinks": False,
    "model.rope_scaling": None,
    "model.tied_embeddings": False,
}
"""Key -> the value at which it asks for nothing, so that no line is needed."""

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
"""Key, or section -> when its values say nothing."""


def not_carried_as(key: str, of_engine: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the key or section by which an engine does not carry a key, and why; None where it must carry it."""
    table = {**NOT_CARRIED, **of_engine}
    name = _nearest(key, table)
    return None if name is None else (name if name in NOT_CARRIED and name not in of_engine else key, table[name])


def governed_by(key: str) -> OneOf | None:
    """Return the condition under which this key says nothing, on the key that decides that."""
    section = _nearest(key, MEANINGLESS)
    return None if section is None else MEANINGLESS[section]


def _nearest(key: str, table: Mapping[str, object]) -> str | None:
    """Return the entry that speaks of a key: its own, or that of the innermost section around it."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in table), None)
