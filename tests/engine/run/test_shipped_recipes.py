"""Every shipped recipe can be started: the engine refuses nothing of it, and trains it at a reduced size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lab.drawing import slow_after

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, HybridModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.check import check_engine, close_axes
from trainspec_cli.session.recipe.load import load, load_for_planning, plan_on, this_machine

RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))
VALUES = {"finetune_chat": ("model=llama_tiny", f"data.path={RECIPES}/tiny_chat.jsonl", "init.from=null")}
"""The values that a recipe asks for."""
SAMPLES = 2
ONE_PER_FAMILY = ("chaos", "deepseek_v3", "finetune_chat", "gpt_oss_20b", "nemotron_h_8b", "resnet50", "tiny")

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_engine_refuses_nothing_of_a_shipped_recipe(name: str) -> None:
    """At full size. The planner chooses the layout from those that `check_built` lets through."""
    assert check_engine(close_axes(load_for_planning([f"recipe={name}", *VALUES.get(name, ())]).spec)) == []


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, *slow_after(0, sorted({*SHIPPED} - {*ONE_PER_FAMILY}))])
def test_a_shipped_recipe_trains_at_a_reduced_size(name: str) -> None:
    train_reduced(name, "compile=false")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_that_is_compiled_trains_compiled(name: str, compile_anew: None) -> None:
    if load_for_planning([f"recipe={name}", *VALUES.get(name, ())]).spec.compile:
        train_reduced(name)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def train_reduced(name: str, *changes: str) -> None:
    """Train two steps of random samples; the loss begins where chance has it, and falls."""
    given = (f"recipe={name}", *VALUES.get(name, ()))
    spec = load_for_planning(given).spec
    loaded = load([*given, *reduced(spec), *changes])
    plan = plan_on(loaded, this_machine(loaded.spec))
    state = build_train_state(plan, torch.device("cpu"))
    batch = drawn_batch(plan.spec, state, OwnSamples((0,), (SAMPLES,)))
    steps = [train_step(state, batch, global_tokens=plan.tokens_per_step, clip_norm=1.0) for _ in range(2)]
    losses = [float(step.on_host().loss) for step in steps if step is not None]
    assert len(losses) == 2 and losses[1] < losses[0]
    if spec.model.unit == "tokens":
        assert losses[0] == pytest.approx(math.log(plan.spec.model.vocab_size), rel=0.1)


def reduced(spec: RunSpec) -> Iterator[str]:
    """Yield what makes a run small enough for a test and leaves every part of it in place."""
    yield from ("cluster=cpu", "cluster.num_nodes=1", "cluster.devices_per_node=1", "layout.dp_replicate=auto")
    yield from ("resilience=restart", "resilience.replica_groups=auto", "fault=''", "optim.schedule.warmup_steps=1")
    yield from (f"batching.global_batch_size={SAMPLES}", "train.max_steps=3")
    if spec.data.source in ("tokens", "images", "volumes"):
        yield from ("data=phantom" if spec.model.unit == "samples" else "data=python_stdlib", "data.path=null")
    yield from reduced_model(spec.model)


def reduced_model(model: object) -> Iterator[str]:
    if isinstance(model, ConvModel):
        yield f"model.input_size=[{','.join('32' for _ in model.input_size)}]"
        yield f"model.widths=[{','.join(str(8 * (1 + at)) for at in range(len(model.widths)))}]"
        yield f"model.num_classes={min(model.num_classes, 8)}"
        return
    assert isinstance(model, DecoderModel | HybridModel)
    yield from ("data.seq_len=32", "model.hidden_size=64", "model.ffn_size=96", "model.vocab_size=512")
    if isinstance(model, HybridModel):
        kinds = {"mamba_layers": 2, "attention_layers": 1, "mlp_layers": 1}
        yield from (f"model.{kind}={min(most, getattr(model, kind))}" for kind, most in kinds.items())
        yield from ("model.layer_pattern=''", "model.mamba_head_dim=16", "model.mamba_state_size=16")
        yield "model.mamba_groups=2"
    else:
        yield "model.num_layers=3"
    if model.num_heads:
        yield from ("model.num_heads=4", "model.head_dim=16")
        yield f"model.num_kv_heads={4 if model.num_kv_heads == model.num_heads else 2}"
    if getattr(model, "sliding_window", None):
        yield "model.sliding_window=8"
    if getattr(model, "mla", None):
        yield from ("model.mla.kv_lora_rank=32", "model.mla.q_lora_rank=32", "model.mla.qk_nope_head_dim=16")
        yield from ("model.mla.qk_rope_head_dim=8", "model.mla.v_head_dim=16")
    if model.experts is not None:
        yield from ("model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.expert_ffn_size=32")
        yield f"model.experts.first_dense_layers={min(1, model.experts.first_dense_layers)}"
        yield f"model.experts.num_groups={min(4, model.experts.num_groups)}"
        yield f"model.experts.top_groups={min(2, model.experts.top_groups)}"
