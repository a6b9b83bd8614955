"""The engine's peak from arithmetic against a trace of the real step: 70 layouts, families and sizes.

pytest -m slow -s tests/planner/memory/test_engine_memory.py     # all of them, with a table
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lab.drawing import drawn_in_ci, slow_after
from lab.tracing import Trace
from torch._subclasses.fake_tensor import FakeTensorMode

from trainspec_cli.core.printable import GIB
from trainspec_cli.engine.models.rope import apply_rope
from trainspec_cli.engine.tools.trace import Ledger
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.memory.engine.blocks import linear, profile_block, rotate
from trainspec_cli.planner.memory.engine.step import (
    Account,
    engine_peak,
    is_counted,
    rank_peaks,
    run_of,
    shape_of,
    tensors_by_cause,
)
from trainspec_cli.planner.memory.engine.tape import Tape
from trainspec_cli.planner.memory.engine.units import block_unit, outside_unit
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, HybridModel, TextModel
from trainspec_cli.recipe.keys.training import LoraSpec, ParameterGroup
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.tools import traced_ranks
from trainspec_cli.wings.certify.cases import Case, build_plan

MODELS = Path(__file__).parents[3] / "conf" / "model"
KINDS: dict[str, type[Any]] = {"decoder": DecoderModel, "hybrid": HybridModel, "conv": ConvModel}
MOST_UNDER, MOST_OVER = -0.03, 0.05


@dataclass(frozen=True)
class Run:
    model: str
    axes: dict[str, Any] = field(default_factory=dict)
    samples: int = 1
    """Of a micro-batch."""
    micro_batches: int = 1
    seq_len: int = 4096
    recompute: Any = "none"
    compute: Any = "bf16"
    reduce: Any = "fp32"
    matmul: Any = "compute"
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the model, mostly fewer layers."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    optimizer: Any = "adamw"
    frozen: tuple[str, ...] = ()
    """Patterns of the parameters that are frozen."""

    @property
    def name(self) -> str:
        axes = ".".join(f"{axis}={size}" for axis, size in self.axes.items()) or "one"
        adapters = f" lora {self.lora.rank}" * bool(self.lora.rank) + " nf4" * self.lora.is_quantised
        batch = f"{self.micro_batches}x{self.samples}x{self.seq_len}"
        optimizer = f" {self.optimizer}" * (self.optimizer != "adamw")
        frozen = f" without {' '.join(self.frozen)}" * bool(self.frozen)
        return f"{self.model} {axes} {batch} {self.recompute} {self.compute}{adapters}{optimizer}{frozen}"


def fsdp(size: int, **axes: Any) -> dict[str, Any]:
    return {"dp_shard": size, **axes}


DENSE_RUNS = (
    Run("llama_tiny", {}, samples=8, seq_len=256),
    Run("llama_tiny", {"dp_replicate": 2}, samples=8, seq_len=256, compute="fp32"),
    Run("llama_6m", fsdp(2), samples=4, seq_len=2048, compute="fp32", micro_batches=3),
    Run("llama_6m", {"pp": 2, "pipeline_schedule": "zbv"}, micro_batches=6, samples=2, seq_len=1024),
    Run("qwen3_0_6b", {}, samples=4, seq_len=2048, recompute="selective"),
    Run("qwen3_0_6b", fsdp(8, zero_stage=2), samples=2, micro_batches=4),
    Run("qwen3_0_6b", fsdp(2, tp=2, cp=2), samples=2, recompute="full", seq_len=8192),
    Run("qwen3_0_6b", fsdp(2, tp=8), seq_len=2048, changes={"num_layers": 2}),  # the loss's second group is smaller
    Run("qwen3_0_6b", {"pp": 2, "dp_shard": 2}, samples=2, micro_batches=8),
    Run("qwen3_0_6b", {"pp": 4, "pipeline_schedule": "zero_bubble"}, samples=1, micro_batches=8),
    Run("qwen3_1_7b", fsdp(4, cp=4), seq_len=32768),
    Run("qwen3_1_7b", {"pp": 2, "pipeline_schedule": "zero_bubble"}, micro_batches=8, samples=4, recompute="full"),
    Run(
        "qwen3_1_7b",
        {"pp": 4, "cp": 2, "dp_replicate": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2},
        micro_batches=8,
        recompute="full",
    ),
    Run("qwen3_8b", fsdp(2, tp=8, sequence_parallel=False), samples=2),
    Run("llama3_8b", fsdp(8), samples=2, seq_len=8192, reduce="bf16"),
    Run("llama3_8b", fsdp(8, zero_stage=1), micro_batches=4),
    Run("llama3_8b", fsdp(8), compute="fp32"),
    Run("llama3_8b", fsdp(2, tp=4), samples=4),
    Run("llama3_8b", fsdp(8), seq_len=8192, recompute="full", samples=2, matmul="fp8"),
    Run("llama3_8b", fsdp(2, cp=4, context_method="ulysses"), seq_len=65536),
    Run("llama3_8b", {"pp": 4, "dp_replicate": 2}, micro_batches=16, recompute="full"),
    Run("llama3_8b", {"pp": 4, "pipeline_schedule": "interleaved", "virtual_stages": 2}, micro_batches=12),
    Run("llama3_8b", {"pp": 4, "tp": 2, "pipeline_schedule": "zbv"}, micro_batches=8),
    Run("llama3_70b", fsdp(8, tp=8), samples=2, seq_len=8192, recompute="selective"),
    Run("llama3_405b", {"tp": 8, "pp": 16, "dp_shard": 128}, seq_len=8192, micro_batches=16),
)
DEEPSEEK = {"num_layers": 6, "prediction_layers": 0}
FURTHER = {"num_layers": 6, "prediction_layers": 1}
EXPERT_RUNS = (
    Run("moe_tiny", {}, samples=8, seq_len=256, compute="fp32"),
    Run("mixtral_8x7b", fsdp(8), recompute="selective", changes={"num_layers": 4}),
    Run("mixtral_8x7b", fsdp(8, ep=8), samples=2, changes={"num_layers": 8}),
    Run("mixtral_8x7b", fsdp(64, ep=4), recompute="full", changes={"num_layers": 8}),
    Run("mixtral_8x7b", fsdp(4, tp=2), micro_batches=3, changes={"num_layers": 4}),
    Run("mixtral_8x7b", {"dp_replicate": 2, "dp_shard": 4, "ep": 4}, micro_batches=2, changes={"num_layers": 4}),
    Run("mixtral_8x7b", {"pp": 4, "dp_shard": 8, "ep": 8}, micro_batches=8),
    Run("qwen3_30b_a3b", fsdp(16, ep=8), samples=4, recompute="selective", changes={"num_layers": 8}),
    Run("qwen3_30b_a3b", fsdp(8, tp=2, ep=16), samples=2, recompute="full", changes={"num_layers": 8}),
    Run("qwen3_30b_a3b", fsdp(2, cp=4), seq_len=32768, recompute="full", changes={"num_layers": 4}),
    Run(
        "qwen3_30b_a3b",
        {"pp": 4, "dp_shard": 4, "ep": 4, "pipeline_schedule": "zbv"},
        micro_batches=8,
        changes={"num_layers": 16},
    ),
    Run("deepseek_v3", fsdp(64, ep=64), recompute="full", samples=2, changes=DEEPSEEK),
    Run("deepseek_v3", fsdp(32, ep=32), changes=DEEPSEEK),
    Run("deepseek_v3", fsdp(32, ep=32), changes=FURTHER),
    Run("deepseek_v3", fsdp(64, ep=64), recompute="full", samples=2, changes=FURTHER),
    Run("qwen3_0_6b", fsdp(4), samples=2, seq_len=2048, changes={"prediction_layers": 2}),
    Run("llama3_8b", {"pp": 2, "tp": 2, "dp_shard": 2}, samples=1, micro_batches=4, changes={"prediction_layers": 1}),
    Run("deepseek_v3", fsdp(16, tp=4, ep=64), recompute="selective", samples=2, changes=DEEPSEEK),
)
WINDOW_RUNS = (
    Run("mistral_7b", fsdp(8), seq_len=16384, changes={"num_layers": 8}),
    Run("gpt_oss_20b", fsdp(8, ep=8), samples=2, changes={"num_layers": 8}),
    Run("gpt_oss_20b", fsdp(32), recompute="full", samples=4, changes={"num_layers": 8}),
    Run(
        "gpt_oss_20b",
        fsdp(8, cp=2, ep=8, context_method="ulysses"),
        seq_len=16384,
        recompute="selective",
        changes={"num_layers": 8},
    ),
    Run(
        "gpt3_175b",
        fsdp(16, tp=8, sequence_parallel=False),
        seq_len=2048,
        recompute="selective",
        changes={"num_layers": 12},
    ),
)
BAMBA: dict[str, Any] = {
    "expert_layers": 0, "mlp_layers": 3, "attention_layers": 1, "mamba_layers": 2, "layer_pattern": "M-*-M-",
    "ffn_size": 8192, "gated_mlp": True, "activation": "silu", "rotary_fraction": 0.5, "mamba_step_min": 0.001,
}  # fmt: skip
"""A part of each head is rotated, and the step of the scan is limited."""
STATE_RUNS = (
    Run("mamba2_130m", fsdp(4), samples=4, seq_len=2048),
    Run("mamba2_370m", fsdp(2), samples=4, compute="fp32", seq_len=2048),
    Run("mamba2_1b", fsdp(8), samples=2, recompute="selective"),
    Run("mamba2_3b", {"dp_replicate": 2, "dp_shard": 4}, recompute="full", seq_len=16384, micro_batches=2),
    Run("nemotron_h_8b", fsdp(8, tp=4), seq_len=8192, recompute="full"),
    Run("nemotron_h_8b", {"pp": 2, "dp_shard": 2}, micro_batches=4),
    Run("nemotron_h_8b", fsdp(8), seq_len=4096, changes=BAMBA),
    Run("nemotron_h_8b", fsdp(4, tp=2), samples=2, seq_len=4096, changes=BAMBA),
)
CONV_RUNS = (
    Run("resnet50", fsdp(8), samples=64),
    Run("resnet50", {"dp_replicate": 4}, samples=32, compute="fp32", micro_batches=2, recompute="selective"),
    Run("unet3d", fsdp(2), samples=2, recompute="full"),
    Run("unet3d", {"dp_replicate": 4}, samples=2, micro_batches=2, compute="fp32"),
)
LORA, FEW = LoraSpec(rank=16), LoraSpec(rank=8, targets=("q", "v"))
NF4, FEW_NF4 = replace(LORA, base="nf4"), replace(FEW, base="nf4")
DORA = replace(LORA, magnitude=True)
IN_EXPERTS = LoraSpec(rank=16, targets=("q", "v", "experts.up", "experts.down"))
ADAPTER_RUNS = (
    Run("llama_tiny", {}, samples=8, seq_len=256, lora=FEW, micro_batches=2),
    Run("qwen3_0_6b", fsdp(2), samples=4, seq_len=2048, lora=FEW, micro_batches=2),
    Run("qwen3_1_7b", fsdp(2), samples=2, seq_len=2048, lora=LORA),
    Run("llama3_8b", {}, samples=2, seq_len=2048, lora=LORA),
    Run("llama3_8b", fsdp(8), samples=2, recompute="full", lora=LORA, micro_batches=2),
    Run("llama3_8b", fsdp(4, tp=2), recompute="selective", lora=LORA),
    Run("llama3_8b", {"pp": 2, "dp_shard": 2}, micro_batches=4, lora=LORA),
    Run("llama3_70b", fsdp(8), lora=LORA),
    Run("mixtral_8x7b", fsdp(8, ep=8), samples=2, changes={"num_layers": 8}, lora=LORA),
    Run("mixtral_8x7b", fsdp(8, ep=8), samples=2, changes={"num_layers": 2}, lora=IN_EXPERTS),
    Run("mixtral_8x7b", fsdp(8), changes={"num_layers": 2}, lora=replace(IN_EXPERTS, base="nf4")),
    Run("moe_tiny", fsdp(4, ep=2), samples=8, seq_len=512, recompute="selective", lora=replace(IN_EXPERTS, base="nf4")),
    Run("mixtral_8x7b", fsdp(8, ep=4), changes={"num_layers": 2}, recompute="full", lora=NF4),
    Run("moe_tiny", fsdp(2, tp=2), samples=8, seq_len=512, lora=IN_EXPERTS),
    Run("qwen3_0_6b", fsdp(2, tp=2), samples=4, seq_len=2048, recompute="selective", lora=FEW_NF4),
    Run("llama3_70b", {"pp": 2, "dp_shard": 2}, micro_batches=4, recompute="full", lora=NF4),
    Run("qwen3_0_6b", fsdp(2), samples=4, seq_len=2048, changes={"num_layers": 4}, lora=DORA),
    Run("llama_tiny", {}, samples=8, seq_len=256, lora=DORA, micro_batches=2),
    Run("qwen3_0_6b", fsdp(2, tp=2), samples=2, recompute="full", changes={"num_layers": 4}, lora=DORA),
)
FROZEN_RUNS = (
    Run("qwen3_0_6b", fsdp(2), seq_len=2048, changes={"num_layers": 4}, frozen=("embed.*", "*norm*")),
    Run("qwen3_0_6b", fsdp(2, zero_stage=1), seq_len=2048, changes={"num_layers": 4}, frozen=("*.ffn.*",)),
    Run("qwen3_0_6b", fsdp(2, tp=2), recompute="full", changes={"num_layers": 4}, frozen=("blocks.[23].*",)),
    Run("moe_tiny", fsdp(4, ep=2), samples=8, seq_len=512, frozen=("*.experts.*",)),
    Run("hybrid_tiny", {"pp": 2}, samples=4, seq_len=256, micro_batches=4, frozen=("embed.*",)),
)
GEMMA2 = {
    "norm_offset": True, "norm_places": "both", "attention_softcap": 50.0, "logit_softcap": 30.0, "sliding_window": 512,
    "global_attention_every": 2, "embedding_scale": 32.0, "activation": "gelu_tanh", "num_layers": 6,
}  # fmt: skip
GPT_NEOX = {
    "norm": "layer", "norm_bias": True, "parallel_residual": "two_norms", "attention_bias": "all", "mlp_bias": True,
    "gated_mlp": False, "rotary_fraction": 0.25, "activation": "gelu", "num_layers": 6, "qk_norm": False,
}  # fmt: skip
COHERE2 = {
    "norm": "layer", "parallel_residual": "one_norm", "rotary_pairs": "neighbours", "sliding_window": 512,
    "global_attention_every": 4, "rotated_layers": "windowed", "logit_scale": 0.25, "num_layers": 6, "qk_norm": False,
}  # fmt: skip
OLMO2 = {"norm_places": "after", "qk_norm_over": "all", "num_layers": 6}
GRANITE = {"residual_scale": 0.5, "embedding_scale": 12.0, "logit_scale": 0.1, "mlp_bias": True, "num_layers": 6}
FEATURE_RUNS = (
    Run("qwen3_0_6b", {}, samples=2, seq_len=1024, changes=GEMMA2),
    Run("qwen3_0_6b", fsdp(4), samples=2, seq_len=1024, recompute="full", changes=GEMMA2),
    Run("qwen3_0_6b", fsdp(2, tp=2), samples=2, seq_len=2048, changes=GPT_NEOX),
    Run("qwen3_0_6b", {}, samples=2, seq_len=2048, recompute="selective", changes=GPT_NEOX),
    Run("qwen3_0_6b", fsdp(2, tp=2), samples=1, seq_len=2048, changes=COHERE2),
    Run("qwen3_0_6b", fsdp(4), samples=2, seq_len=2048, compute="fp32", changes=OLMO2),
    Run("qwen3_0_6b", fsdp(2, tp=2), samples=1, seq_len=2048, changes=OLMO2),
    Run("qwen3_0_6b", {"pp": 2, "dp_shard": 2}, samples=2, micro_batches=4, seq_len=2048, changes=GRANITE),
)
FAMILIES = {
    "dense": DENSE_RUNS,
    "features": FEATURE_RUNS,
    "experts": EXPERT_RUNS,
    "windows": WINDOW_RUNS,
    "state space": STATE_RUNS,
    "convolutions": CONV_RUNS,
    "adapters": ADAPTER_RUNS,
    "frozen": FROZEN_RUNS,
}
DEFAULT_RUNS = (
    Run("llama_6m", {"pp": 2, "pipeline_schedule": "gpipe"}, samples=2, seq_len=2048, micro_batches=6),
    Run("moe_tiny", fsdp(4, ep=2), samples=8, seq_len=512, recompute="selective"),
    Run("llama3_8b", fsdp(8), seq_len=8192, recompute="selective"),
    Run("hybrid_tiny", {}, samples=8, seq_len=256),
    # One stage: the schedule splits nothing, and gradients are exchanged after each micro-batch.
    Run("resnet_tiny", fsdp(4, zero_stage=2, pipeline_schedule="zero_bubble"), samples=2, micro_batches=4),
    Run("llama_6m", {}, samples=4, seq_len=512, lora=LORA),
    Run("moe_tiny", fsdp(4, ep=2), samples=8, seq_len=512, lora=FEW),
    Run("llama_6m", fsdp(2), samples=4, seq_len=512, optimizer="adamw8bit"),
    Run("llama_6m", fsdp(2), samples=4, seq_len=512, optimizer="muon"),
    Run("llama_6m", fsdp(2), samples=4, seq_len=512, lora=NF4),
)
IN_CI = 15


def plan_of(run: Run) -> Plan:
    layout = Layout(**run.axes)
    layout = replace(layout, sequence_parallel=layout.sequence_parallel and layout.tp > 1)
    base = build_plan(Case("dense", optimizer="adamw"), "cuda")
    described = yaml.safe_load((MODELS / f"{run.model}.yaml").read_text())
    model = replace(from_plain(KINDS[described["family"]], described), **run.changes)
    batch = run.samples * run.micro_batches * layout.data_parallel_size
    spec = replace(
        base.spec,
        model=model,
        data=replace(base.spec.data, seq_len=run.seq_len),
        batching=replace(base.spec.batching, global_batch_size=batch),
        precision=replace(base.spec.precision, reduce=run.reduce, matmul=run.matmul),
        lora=run.lora,
        optim=replace(
            base.spec.optim,
            name=run.optimizer,
            groups=tuple(ParameterGroup(match, frozen=True) for match in run.frozen),
        ),
    )
    return replace(
        base,
        spec=spec,
        layout=layout,
        devices_per_node=layout.world_size,
        compute=run.compute,
        recompute=run.recompute,
        micro_batch_size=run.samples,
        grad_accum_steps=run.micro_batches,
    )


def error_of(run: Run, trace: Trace) -> float:
    """Return the relative error for the fullest rank of a pipeline's ends."""
    plan = plan_of(run)
    assert is_counted(plan.spec.model, plan.offload)
    traced = trace(plan).peak_memory_bytes
    ranks = {rank * plan.layout.pp // plan.world_size for rank in traced_ranks(plan)}
    counted = max(sum(engine_peak(run_of(plan), rank).values()) for rank in ranks)
    print(f"{run.name:78s} traced {traced / GIB:8.3f} GiB, counted {counted / GIB:8.3f} {counted / traced - 1:+.2%}")
    return counted / traced - 1


@pytest.mark.parametrize("run", slow_after(1, DEFAULT_RUNS), ids=lambda run: run.name)
def test_arithmetic_comes_to_what_the_step_takes(run: Run, trace: Trace) -> None:
    assert MOST_UNDER <= error_of(run, trace) <= MOST_OVER


CLASSES = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries"),
    "logits": ("logits",),
    "collectives": ("collectives",),
}
"""The classes that people see -> the causes of counts and traces."""
MOST_APART = 0.02
"""Of the peak: a class in the trace and in the count."""
CLASS_RUNS = (
    Run("qwen3_0_6b", fsdp(4, zero_stage=1), micro_batches=2, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", fsdp(4, zero_stage=2), micro_batches=2, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", fsdp(4, zero_stage=3), micro_batches=2, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", {"dp_replicate": 4}, micro_batches=2, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", fsdp(2, tp=2, zero_stage=1), micro_batches=2, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", fsdp(2, pp=2, zero_stage=1), micro_batches=4, seq_len=2048, changes={"num_layers": 4}),
    Run("qwen3_0_6b", fsdp(2, pp=2), micro_batches=4, recompute="full", seq_len=2048, changes={"num_layers": 4}),
    Run("llama_6m", fsdp(2), samples=4, seq_len=512),
    Run("moe_tiny", fsdp(4, ep=2), samples=8, seq_len=512),
)


@pytest.mark.parametrize(
    "run",
    [CLASS_RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in CLASS_RUNS[1:])],
    ids=lambda run: run.name,
)
def test_each_class_takes_what_it_takes_in_the_step(run: Run, trace: Trace) -> None:
    """Whole gradients of ZeRO-1, ZeRO-2 and plain replicas are gradients, and no activations."""
    plan = plan_of(run)
    traced = trace(plan)
    found = traced.peak_by_cause
    counts = [engine_peak(run_of(plan), rank) for rank in range(plan.layout.pp)]
    counted = counts[traced.rank * plan.layout.pp // plan.world_size]
    for name, causes in CLASSES.items():
        sizes = [sum(peak.get(cause, 0.0) for cause in causes) for peak in (found, counted)]
        assert sizes[1] == pytest.approx(sizes[0], abs=MOST_APART * traced.peak_memory_bytes), name
    params = count_params(plan.spec.model) / (plan.layout.tp * plan.layout.pp)
    if run.micro_batches > 1 and plan.layout.zero_stage == 1:
        assert counted["gradients"] > 2 * params, "whole ones, while the second micro-batch makes its own"


def test_rotary_embeddings_take_for_a_moment_what_the_engines_do() -> None:
    """Within a block other operations take more, so that a block's peaks show little of it."""
    size = (2, 16, 4, 32)
    with FakeTensorMode(), Ledger() as ledger:
        x, angles = torch.empty(size, requires_grad=True), torch.empty(size[1], size[3])
        held = ledger.live_bytes
        ledger.begin()
        y = apply_rope(x, angles, angles)
        forward = ledger.peak_bytes - held
        ledger.begin()
        y.backward(torch.empty_like(y))
        backward = ledger.peak_bytes - held
    tape = Tape(4.0)
    rotated = rotate(tape, tape.leaf(x.numel()))
    assert (tape.meter.peak, tape.meter.live) == (forward, y.nbytes)
    tape.meter.peak = tape.meter.live
    assert rotated.node is not None
    tape.backward(rotated.node, tape.new(rotated.elements))
    assert tape.meter.peak == backward


def test_a_forward_that_is_recomputed_keeps_no_inputs_for_deferred_weight_gradients() -> None:
    run = run_of(plan_of(Run("llama_6m", {}, recompute="full")))
    assert isinstance(run.model, TextModel)
    shape = shape_of(run, run.model, run.model.layer_list[0])
    assert profile_block(shape, "full", True).kept == profile_block(shape, "full", False).kept


@pytest.mark.parametrize("name", [name for name, model in models().items() if isinstance(model, TextModel)])
def test_a_forward_that_is_recomputed_keeps_only_its_output(name: str) -> None:
    run = run_of(plan_of(Run(name, {}, recompute="full", seq_len=512)))
    assert isinstance(run.model, TextModel)
    for layer in set(run.model.layer_list):
        shape = shape_of(run, run.model, layer)
        assert profile_block(shape, "full", False).kept == shape.tokens * shape.hidden * shape.width


def test_pools_are_idle_by_what_they_hold_at_other_moments() -> None:
    account = Account()
    account.add("collectives", 5.0, "gather")
    account.add("collectives", -5.0, "gather")
    account.touch(2.0, "gradients", "reduce")
    account.add("activations", 7.0)
    account.touch(1.0)
    assert sum(account.at_peak.values()) == 8.0
    assert account.at_peak.idle_bytes == 5.0 + 2.0


def test_a_forward_of_convolutions_frees_parameters_where_they_are_sharded_and_else_keeps_them() -> None:
    """A U-Net is at its fullest in its last convolutions, where a single unit is gathered or all are."""
    plans = [plan_of(Run("unet3d", fsdp(4, zero_stage=stage), samples=2)) for stage in (2, 3)]
    kept, freed = (engine_peak(run_of(plan), 0)["gathered"] for plan in plans)
    assert kept == pytest.approx(2 * count_params(plans[0].spec.model), rel=1e-3)
    assert freed < 0.01 * kept


def test_an_adapters_two_matrices_have_gradients_and_the_frozen_one_has_none() -> None:
    plan = plan_of(Run("llama_tiny", lora=FEW))
    model, inputs, outputs, tokens = plan.spec.model, 64, 48, 32
    assert isinstance(model, DecoderModel)
    shape = shape_of(run_of(plan), model, model.layer_list[0])
    tape = Tape(shape.width, frozen=True)
    y = linear(tape, tape.leaf(tokens * inputs), shape, "q", outputs, inputs)
    node = y.node
    del y
    assert node is not None
    assert tape.meter.live == shape.width * tokens * FEW.rank, "what the second matrix was multiplied by"
    tape.backward(node, tape.new(tokens * outputs))
    assert tape.meter.live == shape.width * FEW.rank * (inputs + outputs)


@pytest.mark.parametrize("name", [name for name, model in models().items() if isinstance(model, TextModel)])
def test_units_hold_the_parameters_that_a_model_has(name: str) -> None:
    model = models()[name]
    assert isinstance(model, DecoderModel | HybridModel)
    layers = sum(block_unit(model, layer, Layout(), LoraSpec()).full for layer in model.layer_list)
    further = block_unit(model, model.layer_list[-1], Layout(), LoraSpec(), predicts=True)
    layers += model.prediction_layers * further.full
    assert layers + outside_unit(model, Layout(), first=True, last=True).full == count_params(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", drawn_in_ci([run for runs in FAMILIES.values() for run in runs], IN_CI), ids=lambda run: run.name
)
def test_it_does_for_layouts_and_sizes_of_every_family(run: Run, trace: Trace) -> None:
    assert MOST_UNDER <= error_of(run, trace) <= MOST_OVER


def test_sixty_runs_are_held_against_traces() -> None:
    assert 60 <= len(DEFAULT_RUNS) + sum(map(len, FAMILIES.values())) <= 110


def test_what_cannot_be_counted_is_said() -> None:
    model = plan_of(DENSE_RUNS[0]).spec.model
    assert is_counted(model, "none")
    assert is_counted(model, "optimizer")
    assert not is_counted(models()["resnet50"], "optimizer")
    staged = plan_of(Run("llama_6m", {"pp": 2}, micro_batches=4, seq_len=256))
    assert tensors_by_cause(replace(staged, offload="optimizer")) is None
    fullest = max((engine_peak(run_of(staged), rank) for rank in (0, 1)), key=lambda peak: sum(peak.values()))
    assert tensors_by_cause(staged) == fullest


def test_a_rank_with_more_layers_than_the_first_is_counted() -> None:
    """Every rank's count is its own, or that of an earlier one that holds as much; the fullest is the run's."""
    plan = plan_of(Run("llama_6m", {"pp": 4, "stage_layers": (1, 3, 1, 1)}, micro_batches=8, seq_len=256))
    own, found = [engine_peak(run_of(plan), rank) for rank in range(4)], list(rank_peaks(run_of(plan)))
    assert found == [own[0], own[1], own[0], own[3]]
    assert sum(own[2].values()) <= sum(own[0].values()) < sum(own[1].values())
    assert tensors_by_cause(plan) == own[1]
