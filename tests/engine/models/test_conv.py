"""ResNets and U-Nets against independent references: functional calls on the parameters by name, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.conv import dice, segmentation_loss
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import ConvModel

SMALL = ConvModel("resnet", (32, 32), widths=(4, 8), blocks=(2, 1), in_channels=2, num_classes=5)
NEXT = ConvModel("resnet", (32, 32), widths=(8, 16), blocks=(1, 1), in_channels=2, num_classes=5, groups=4)
FLAT = ConvModel("unet", (16, 24), widths=(4, 6), in_channels=2, num_classes=3)
SOLID = ConvModel("unet", (8, 16, 8), widths=(4, 6, 8), in_channels=1, num_classes=4)
Weights = dict[str, Tensor]


def build(model: ConvModel):
    """With first values, all away from zeros and ones."""
    net = build_model(model, 1)
    for number, (name, parameter) in enumerate(net.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        net.init_parameter(name, parameter.data, generator)
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    net.init_buffers()
    return net.double()


def resnet(model: ConvModel, weights: Weights, x: Tensor) -> Tensor:
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


def unet(model: ConvModel, weights: Weights, images: Tensor) -> Tensor:
    dims = len(model.input_size)
    convolve = {2: F.conv2d, 3: F.conv3d}[dims]
    widen = {2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]

    def layer(x, name, stride=1):
        x = F.instance_norm(convolve(x, weights[f"{name}.conv.weight"], stride=stride, padding=1))
        shape = (1, -1, *[1] * dims)
        return (x * weights[f"{name}.norm.weight"].view(shape) + weights[f"{name}.norm.bias"].view(shape)).clamp_min(0)

    def pair(x, name, stride):
        return layer(layer(x, f"{name}.first", stride), f"{name}.second")

    levels, x = [], images
    for level in range(len(model.widths)):
        x = pair(x, f"down.{level}", 2 if level else 1)
        levels.append(x)
    x = pair(x, "bottom", 2)
    for level in range(len(model.widths)):
        up = widen(x, weights[f"up.{level}.widen.weight"], weights[f"up.{level}.widen.bias"], stride=2)
        x = pair(torch.cat((up, levels.pop()), 1), f"up.{level}.join", 1)
    return convolve(x, weights["head.weight"], weights["head.bias"])


@pytest.mark.parametrize("model", [SMALL, NEXT, FLAT, SOLID], ids=str)
def test_logits_loss_and_gradients_are_the_references(model: ConvModel) -> None:
    net = build(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, model.in_channels, *model.input_size, dtype=torch.float64, generator=generator)
    labels = torch.randint(model.num_classes, (6, *(model.input_size if model.segments else ())), generator=generator)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    logits = (unet if model.segments else resnet)(model, weights, images)
    assert torch.allclose(net(images).double(), logits, rtol=1e-6, atol=1e-6)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    if model.segments:
        expected = segmentation_loss(logits, labels).sum()
    loss = net(images, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for name, parameter in net.named_parameters():
        assert torch.allclose(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("model", "published"), [("resnet50", 25_557_032), ("unet3d", 31_190_243)])
def test_published_sizes_are_the_planners_and_the_engines(model: str, published: int) -> None:
    with torch.device("meta"):
        net = build_model(models()[model], 1)
    assert sum(parameter.numel() for parameter in net.parameters()) == published == count_params(models()[model])


@pytest.mark.parametrize("model", [SMALL, NEXT, FLAT, SOLID], ids=str)
def test_units_are_all_that_is_computed_in_their_order(model: ConvModel) -> None:
    net = build(model)
    assert sum(parameter.numel() for parameter in net.parameters()) == count_params(model)
    blocks = [*net.down, net.bottom, *net.up] if model.segments else list(net.blocks)
    assert net.block_modules() == net.compile_modules() == blocks


def test_samples_are_judged_one_by_one():
    net = build(SMALL)
    logits = torch.eye(5)[:3] * 10
    judged = net.judge(logits, torch.tensor([0, 1, 4]))
    assert judged["accuracy"].tolist() == [1.0, 1.0, 0.0]
    assert judged["loss"][2] == pytest.approx(10, abs=0.01)


def soft_dice(weights, labels, num_classes):
    """Return the soft Dice of one sample, voxel by voxel."""
    shares = []
    for k in range(1, num_classes):
        common = sum(weights[k][at].item() for at in range(len(labels)) if labels[at] == k)
        both = weights[k].sum().item() + sum(1 for label in labels if label == k)
        shares.append((2 * common + 1) / (both + 1))
    return sum(shares) / len(shares)


def test_the_loss_is_cross_entropy_and_dice():
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(3))
    labels = torch.randint(3, (2, 4, 5), generator=torch.Generator().manual_seed(4))
    for sample, loss in enumerate(segmentation_loss(logits, labels)):
        weights, wanted = logits[sample].softmax(0).flatten(1), labels[sample].flatten().tolist()
        entropy = -sum(math.log(weights[label, at]) for at, label in enumerate(wanted)) / len(wanted)
        assert loss.item() == pytest.approx(entropy + 1 - soft_dice(weights, wanted, 3), rel=1e-5)


def test_dice_of_an_empty_class_is_one_where_none_was_foreseen():
    labels = torch.zeros(2, 4, dtype=torch.int64)
    labels[1, 0] = 1
    chosen = F.one_hot(torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0]]), 3).movedim(-1, 1).float()
    assert dice(chosen, labels, smooth=0.0).tolist() == pytest.approx([1.0, (2 / 4 + 1) / 2])


def test_the_loss_is_summed_over_samples_and_each_is_judged_by_its_hard_dice():
    net = build(FLAT).float()
    images = torch.randn(2, 2, 16, 24, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(3, (2, 16, 24), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits = net(images)
        judged = net.judge(logits, labels)
        assert net(images, labels).item() == pytest.approx(judged["loss"].sum().item(), rel=1e-5)
    torch.testing.assert_close(judged["loss"], segmentation_loss(logits, labels))
    for sample in range(2):
        chosen = logits[sample].argmax(0)
        shares = [
            2 * ((chosen == k) & (labels[sample] == k)).sum() / ((chosen == k).sum() + (labels[sample] == k).sum())
            for k in (1, 2)
        ]
        assert judged["dice"][sample].item() == pytest.approx(float(sum(shares)) / 2, rel=1e-5)
