"""Parameter groups by name patterns: names, and training against plain torch optimizers with the same groups."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update, set_learning_rate
from trainspec_cli.engine.shares import Share
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.memory.engine.units import frozen_params, outside_unit
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.keys.training import OptimSpec, ParameterGroup
from trainspec_cli.recipe.parameter_names import is_frozen, outside_names, parameter_names
from trainspec_cli.wings.certify.families import FAMILIES

MODELS = {
    name: model
    for name, model in {**models(), **FAMILIES}.items()
    if isinstance(model, DecoderModel | HybridModel) and model.is_built
}
GROUPS = (
    ParameterGroup("blocks.0.*", frozen=True),
    ParameterGroup("*norm*", decay=0.3),
    ParameterGroup("embed.*", lr_scale=0.1, decay=0.0),
    ParameterGroup("*.q.weight", lr_scale=2.0),
)
STEPS = 10


@pytest.mark.parametrize("name", MODELS)
def test_names_and_frozen_counts_are_those_of_the_engine(name: str) -> None:
    model = MODELS[name]
    with torch.device("meta"):
        parameters = dict(build_model(model, 64).named_parameters())
    assert sorted(parameter_names(model)) == sorted(parameters)
    for groups in (GROUPS, (ParameterGroup("*.weight", frozen=True),), (ParameterGroup("*experts*", frozen=True),)):
        expected = sum(one.numel() for each, one in parameters.items() if is_frozen(each, groups))
        assert frozen_params(model, groups) == expected


@pytest.mark.parametrize("name", MODELS)
def test_names_outside_of_the_blocks_are_those_of_each_end_of_a_pipeline(name: str) -> None:
    model = MODELS[name]
    for first, last in ((True, False), (False, False), (False, True)):
        unit = outside_unit(model, Layout(pp=2), first, last)
        assert len(unit.matrices) == len(outside_names(model, first=first, last=last))


def made() -> nn.Module:
    model = build_model(FAMILIES["dense"], 64)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        with torch.no_grad():
            model.init_parameter(name, parameter, torch.Generator().manual_seed(number))
    model.init_buffers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name, GROUPS))
    return model


def plain_groups(model: nn.Module, optim: OptimSpec) -> list[dict[str, Any]]:
    """Return the same groups written out by hand."""
    found = []
    for name, parameter in model.named_parameters():
        matched = [group for group in GROUPS if fnmatchcase(name, group.match)]
        decay, scale = (optim.weight_decay if parameter.dim() > 1 else 0.0), 1.0
        if matched:
            decay = decay if matched[0].decay is None else matched[0].decay
            scale = matched[0].lr_scale
        if parameter.requires_grad:
            found.append({"params": [parameter], "weight_decay": decay, "lr": optim.lr * scale})
    return found


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_losses_are_those_of_a_plain_optimizer(name: str) -> None:
    optim = OptimSpec(lr=1e-2 if name == "adamw" else 0.5, name=name, grad_clip_norm=None, groups=GROUPS)
    found: list[list[float]] = []
    for uses_ours in (True, False):
        model = made()
        trained = [Share(each, one) for each, one in model.named_parameters() if one.requires_grad]
        if uses_ours:
            optimizer = build_optimizer(trained, optim)
            set_learning_rate(optimizer, optim.lr)
            assert len(optimizer.state) == (len(trained) if name == "adamw" else 0)
        elif name == "adamw":
            betas = (optim.beta1, optim.beta2)
            optimizer = torch.optim.AdamW(plain_groups(model, optim), betas=betas, eps=optim.eps)
        else:
            optimizer = torch.optim.SGD(plain_groups(model, optim))
        losses: list[float] = []
        for step in range(STEPS):
            tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(step))
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 64
            loss.backward()
            losses.append(float(loss.detach()))
            assert all(one.grad is None for one in model.parameters() if not one.requires_grad)
            if uses_ours:
                guarded_update(optimizer, trained, torch.tensor(1.0), loss.detach(), None)
            else:
                optimizer.step()
                optimizer.zero_grad()
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert max(found[0]) - min(found[0]) > 1e-2


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
def test_other_optimizers_leave_frozen_parameters_alone(name: str) -> None:
    """Doubling the rate of one matrix doubles its first step; frozen parameters have no state."""
    moved = []
    for scale in (1.0, 2.0):
        groups = (*GROUPS[:3], replace(GROUPS[3], lr_scale=scale, decay=0.0))
        model = made()
        before = {each: one.detach().clone() for each, one in model.named_parameters()}
        trained = [Share(each, one) for each, one in model.named_parameters() if one.requires_grad]
        optimizer = build_optimizer(trained, OptimSpec(lr=1e-3, name=name, groups=groups))
        set_learning_rate(optimizer, 1e-3)
        tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        guarded_update(optimizer, trained, torch.tensor(1.0), torch.tensor(1.0), None)
        assert len(optimizer.state) == len(trained)
        steps = {each: one.detach() - before[each] for each, one in model.named_parameters()}
        assert {each for each, step in steps.items() if not step.any()} == {
            each for each in before if each.startswith("blocks.0.")
        }
        moved.append(steps["blocks.1.attention.q.weight"])
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-8)
