"""The numbers each value may take by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import Any

from trainspec_cli.errors import Problem
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.unknown import UNKNOWN, UnknownTouched


@dataclass(frozen=True)
class Range:
    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return above and below

    def describe(self) -> str:
        """`at least 1`, `more than 0 and less than 1`."""
        low = f"{'at least' if self.includes_low else 'more than'} {self.low:g}"
        high = f"{'at most' if self.includes_high else 'less than'} {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and {high}"


AT_LEAST_ONE = Range(1)
AT_LEAST_ZERO = Range(0)
POSITIVE = Range(0, includes_low=False)
BETWEEN = Range(0, 1, includes_low=False, includes_high=False)
FRACTION = Range(0, 1)
PART = Range(0, 1, includes_low=False)
MOMENT = Range(0, 1, includes_high=False)

BYTE_LEVEL = Range(257)
"""Every byte, and the end of a document."""

RANGES = {
    "model.num_layers": AT_LEAST_ONE,
    "model.hidden_size": AT_LEAST_ONE,
    "model.num_heads": AT_LEAST_ONE,
    "model.num_kv_heads": AT_LEAST_ONE,
    "model.head_dim": AT_LEAST_ONE,
    "model.ffn_size": AT_LEAST_ONE,
    "model.vocab_size": AT_LEAST_ONE,
    "model.rope_theta": POSITIVE,
    "model.norm_eps": POSITIVE,
    "cluster.accelerator.bf16_tflops": POSITIVE,
    "cluster.accelerator.fp16_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.fp32_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.tf32_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.fp8_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.fp4_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.matmul_bf16_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.matmul_fp8_tflops": AT_LEAST_ZERO,
    "cluster.accelerator.memory_gb": POSITIVE,
    "cluster.accelerator.memory_tb_per_s": POSITIVE,
    "cluster.accelerator.link_gb_per_s": AT_LEAST_ZERO,
    "cluster.accelerator.tdp_w": POSITIVE,
    "cluster.accelerator.tera_exponentials_per_s": AT_LEAST_ZERO,
    "cluster.accelerator.load_store_tb_per_s": AT_LEAST_ZERO,
    "cluster.host_link_gb_per_s": POSITIVE,
    "cluster.host_memory_gb": AT_LEAST_ZERO,
    "cluster.link_gb_per_s": AT_LEAST_ZERO,
    "cluster.nic_gbit_per_s": AT_LEAST_ZERO,
    "cluster.accelerator.cache_mb": AT_LEAST_ZERO,
    "cluster.accelerator.price_usd_per_hour": AT_LEAST_ZERO,
    "model.attention_layers": AT_LEAST_ZERO,
    "model.expert_layers": AT_LEAST_ZERO,
    "model.mlp_layers": AT_LEAST_ZERO,
    "model.learned_positions": AT_LEAST_ZERO,
    "model.prediction_layers": AT_LEAST_ZERO,
    "model.global_attention_every": AT_LEAST_ZERO,
    "model.experts.shared_experts": AT_LEAST_ZERO,
    "model.experts.first_dense_layers": AT_LEAST_ZERO,
    "model.mla.q_lora_rank": AT_LEAST_ZERO,
    "model.mamba_layers": AT_LEAST_ZERO,
    "cluster.scaleup_devices": AT_LEAST_ONE,
    "layout.etp": AT_LEAST_ONE,
    "layout.virtual_stages": AT_LEAST_ONE,
    "layout.stage_layers": AT_LEAST_ONE,
    "model.experts.every": AT_LEAST_ONE,
    "model.experts.expert_ffn_size": AT_LEAST_ONE,
    "model.experts.num_experts": AT_LEAST_ONE,
    "model.experts.shared_expert_ffn_size": AT_LEAST_ONE,
    "model.experts.top_k": AT_LEAST_ONE,
    "model.experts.weight_scale": POSITIVE,
    "model.experts.num_groups": AT_LEAST_ONE,
    "model.experts.top_groups": AT_LEAST_ONE,
    "model.experts.balance_rate": AT_LEAST_ZERO,
    "model.experts.balance_loss": AT_LEAST_ZERO,
    "model.experts.capacity_factor": POSITIVE,
    "model.gate_limit": POSITIVE,
    "model.rope_scaling.factor": AT_LEAST_ONE,
    "model.rope_scaling.original_seq_len": AT_LEAST_ONE,
    "model.rope_scaling.low_freq_factor": POSITIVE,
    "model.rope_scaling.high_freq_factor": POSITIVE,
    "model.rope_scaling.beta_fast": POSITIVE,
    "model.rope_scaling.beta_slow": POSITIVE,
    "model.sliding_window": AT_LEAST_ONE,
    "model.mla.kv_lora_rank": AT_LEAST_ONE,
    "model.mla.qk_nope_head_dim": AT_LEAST_ONE,
    "model.mla.qk_rope_head_dim": AT_LEAST_ONE,
    "model.mla.v_head_dim": AT_LEAST_ONE,
    "model.mamba_expand": AT_LEAST_ONE,
    "model.mamba_groups": AT_LEAST_ONE,
    "model.mamba_head_dim": AT_LEAST_ONE,
    "model.mamba_num_heads": AT_LEAST_ONE,
    "model.mamba_state_size": AT_LEAST_ONE,
    "model.groups": AT_LEAST_ONE,
    "model.input_size": AT_LEAST_ONE,
    "model.widths": AT_LEAST_ONE,
    "model.blocks": AT_LEAST_ONE,
    "model.in_channels": AT_LEAST_ONE,
    "model.num_classes": AT_LEAST_ONE,
    "data.seq_len": AT_LEAST_ONE,
    "data.heldout_fraction": BETWEEN,
    "data.phantom.samples": AT_LEAST_ONE,
    "data.phantom.seed": AT_LEAST_ZERO,
    "data.max_bytes": AT_LEAST_ONE,
    "data.tokenizer.vocab_size": BYTE_LEVEL,
    "lora.rank": AT_LEAST_ZERO,
    "lora.alpha": POSITIVE,
    "optim.lr": POSITIVE,
    "optim.beta1": MOMENT,
    "optim.beta2": MOMENT,
    "optim.eps": POSITIVE,
    "optim.weight_decay": AT_LEAST_ZERO,
    "optim.grad_clip_norm": POSITIVE,
    "optim.schedule.warmup_steps": AT_LEAST_ZERO,
    "optim.schedule.decay_fraction": FRACTION,
    "optim.schedule.final_lr_ratio": FRACTION,
    "batching.global_batch_size": AT_LEAST_ONE,
    "batching.micro_batch_size": AT_LEAST_ONE,
    "train.max_steps": AT_LEAST_ONE,
    "train.seed": AT_LEAST_ZERO,
    "train.max_skipped_steps": AT_LEAST_ONE,
    "train.eval_interval_steps": AT_LEAST_ONE,
    "train.sample_interval_steps": AT_LEAST_ONE,
    "train.log_interval_steps": AT_LEAST_ONE,
    "checkpoint.interval_steps": AT_LEAST_ONE,
    "checkpoint.memory_interval_steps": AT_LEAST_ONE,
    "checkpoint.keep_last": AT_LEAST_ONE,
    "cluster.num_nodes": AT_LEAST_ONE,
    "cluster.devices_per_node": AT_LEAST_ONE,
    "cluster.storage_gb_per_s": POSITIVE,
    "cluster.reliability.mtbf_device_hours": POSITIVE,
    "cluster.reliability.job_wide_fraction": FRACTION,
    "cluster.reliability.detect_s": AT_LEAST_ZERO,
    "cluster.reliability.swap_s": AT_LEAST_ZERO,
    "cluster.reliability.start_s": AT_LEAST_ZERO,
    "cluster.reliability.repair_s": AT_LEAST_ZERO,
    "cluster.reliability.spare_nodes": AT_LEAST_ZERO,
    "cluster.reliability.shrink_stall_s": AT_LEAST_ZERO,
    "cluster.reliability.rejoin_stall_s": AT_LEAST_ZERO,
    "cluster.reliability.heal_gb_per_s": POSITIVE,
    "cluster.site.pue": AT_LEAST_ONE,
    "cluster.site.carbon_g_per_kwh": AT_LEAST_ZERO,
    "cluster.site.electricity_usd_per_kwh": AT_LEAST_ZERO,
    "cluster.power.busy": AT_LEAST_ZERO,
    "cluster.power.waiting": AT_LEAST_ZERO,
    "cluster.power.idle": AT_LEAST_ZERO,
    "cluster.power.host": AT_LEAST_ZERO,
    "cluster.slurm.cpus_per_task": AT_LEAST_ONE,
    "cluster.slurm.array_parallel": AT_LEAST_ONE,
    "cluster.slurm.warn_s": AT_LEAST_ZERO,
    "cluster.slurm.max_requeues": AT_LEAST_ZERO,
    "cluster.cost.price_usd_per_device_hour": AT_LEAST_ZERO,
    "cluster.cost.device_price_usd": AT_LEAST_ZERO,
    "cluster.cost.useful_years": POSITIVE,
    "cluster.cost.utilisation": PART,
    "cluster.cost.operation_ratio": AT_LEAST_ZERO,
    "resilience.replica_groups": AT_LEAST_ONE,
    "resilience.min_groups": AT_LEAST_ONE,
    "resilience.max_restarts_per_hour": AT_LEAST_ZERO,
    "resilience.heartbeat_timeout_s": POSITIVE,
    "resilience.exchange_timeout_s": POSITIVE,
    "resilience.sdc_check": AT_LEAST_ONE,
    "resilience.hang_floor_s": POSITIVE,
    "layout.dp_replicate": AT_LEAST_ONE,
    "layout.dp_shard": AT_LEAST_ONE,
    "layout.cp": AT_LEAST_ONE,
    "layout.tp": AT_LEAST_ONE,
    "layout.pp": AT_LEAST_ONE,
    "layout.ep": AT_LEAST_ONE,
    "sample.max_new_tokens": AT_LEAST_ZERO,
    "sample.temperature": AT_LEAST_ZERO,
    "run.stop_grace_s": POSITIVE,
    "run.node_timeout_s": POSITIVE,
}
"""Dotted path -> what is allowed, of each value of a list; null and auto are always. A family may allow some of its
sizes to be 0 (`FamilyRecord.may_be_zero`)."""


def check_ranges(spec: Any) -> list[Problem]:
    """Every value that is out of its range."""
    return [_out_of_range(spec, path) for path in RANGES if not holds(spec, path)]


def forget_out_of_range(spec: Any) -> Any:
    """`spec` with UNKNOWN in the place of each value that is out of its range."""
    for path in RANGES:
        if not holds(spec, path):
            spec = replace_at(spec, path.split("."), UNKNOWN)
    return spec


def range_at(spec: Any, path: str) -> Range:
    section, _, name = path.rpartition(".")
    return AT_LEAST_ZERO if section == "model" and name in spec.model.record.may_be_zero else RANGES[path]


def value_at(spec: Any, path: str) -> Any:
    """`optim.lr` -> spec.optim.lr; None where a section on the way is left out, or of a kind without it."""
    return reduce(_field, path.split("."), spec)


def _field(section: Any, name: str) -> Any:
    if section is UNKNOWN:
        raise UnknownTouched
    known = is_dataclass(section) and name in {field.name for field in fields(section)}
    return getattr(section, name) if known else None


def holds(spec: Any, path: str) -> bool:
    """Return True if the value is in its range; a value that is not known counts as in range."""
    try:
        value = value_at(spec, path)
        if value is None or value == AUTO:
            return True
        allowed = range_at(spec, path)
        return all(allowed.holds(number) for number in (value if isinstance(value, tuple) else (value,)))
    except UnknownTouched:
        return True


def replace_at(section: Any, names: list[str], value: Any) -> Any:
    first, *others = names
    return replace(section, **{first: replace_at(getattr(section, first), others, value) if others else value})


def _out_of_range(spec: Any, path: str) -> Problem:
    value, allowed = value_at(spec, path), range_at(spec, path)
    if isinstance(value, tuple):
        message = f"`{path}` is {list(value)}; numbers of {allowed.describe()} are needed"
        return Problem(code="out_of_range", path=path, message=message)
    message = f"`{path}` is {value:g}; a number of {allowed.describe()} is needed"
    if isinstance(value, int):
        message = f"`{path}` is {value}; a whole number of {allowed.describe()} is needed"
    fits = value <= allowed.low and allowed.includes_low
    return Problem("out_of_range", message, path, f"type {path}={allowed.low:g} or more" if fits else "")
