"""ResNet against an independent reference: functional calls on the parameters by name, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import ConvModel

SMALL = ConvModel("resnet", (32, 32), widths=(4, 8), blocks=(2, 1), in_channels=2, num_classes=5)
NEXT = ConvModel("resnet", (32, 32), widths=(8, 16), blocks=(1, 1), in_channels=2, num_classes=5, groups=4)


def build(model: ConvModel):
    net = build_model(model, 1)
    for name, parameter in net.named_parameters():
        net.init_parameter(name, parameter.data, torch.Generator().manual_seed(len(name)))
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    net.init_buffers()
    return net.double()


def reference(model: ConvModel, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    def layer(x, name, stride=1, groups=1):
        kernel = weights[f"{name}.conv.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=groups)
        return F.batch_norm(x, None, None, weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], training=True)

    x = F.max_pool2d(layer(x, "stem", 2).clamp_min(0), 3, 2, 1)
    number = 0
    for stage, count in enumerate(model.blocks):
        for block in range(count):
            name, stride = f"blocks.{number}", 2 if stage > 0 and block == 0 else 1
            inside = layer(x, f"{name}.narrow").clamp_min(0)
            inside = layer(inside, f"{name}.mix", stride, model.groups).clamp_min(0)
            beside = layer(x, f"{name}.shortcut", stride) if f"{name}.shortcut.conv.weight" in weights else x
            x = (layer(inside, f"{name}.widen") + beside).clamp_min(0)
            number += 1
    return x.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize("model", [SMALL, NEXT])
def test_logits_loss_and_gradients_are_the_references(model):
    net = build(model)
    images = torch.randn(6, 2, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, 1, 2, 3, 4, 0])
    assert torch.allclose(net(images), reference(model, dict(net.named_parameters()), images), atol=1e-9)
    net(images, classes).backward()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    expected = F.cross_entropy(reference(model, weights, images), classes, reduction="sum")
    assert net(images, classes).item() == pytest.approx(expected.item(), rel=1e-9)
    expected.backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(parameter.grad, weights[name].grad, rtol=1e-6, atol=1e-9), name


def test_resnet50_has_the_published_parameters():
    with torch.device("meta"):
        net = build_model(models()["resnet50"], 1)
    assert sum(parameter.numel() for parameter in net.parameters()) == 25_557_032
    assert count_params(models()["resnet50"]) == 25_557_032


@pytest.mark.parametrize("model", [SMALL, NEXT])
def test_parameters_are_those_the_planner_counts(model):
    assert sum(parameter.numel() for parameter in build(model).parameters()) == count_params(model)


def test_samples_are_judged_one_by_one():
    net = build(SMALL)
    logits = torch.eye(5)[:3] * 10
    judged = net.judge(logits, torch.tensor([0, 1, 4]))
    assert judged["accuracy"].tolist() == [1.0, 1.0, 0.0]
    assert judged["loss"][2] == pytest.approx(10, abs=0.01)
