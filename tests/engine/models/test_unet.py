"""U-Net: shapes, parameters, its loss by loops, and what its norm is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.conv import dice, segmentation_loss
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import ConvModel

FLAT = ConvModel("unet", (16, 24), widths=(4, 6), in_channels=2, num_classes=3)
SOLID = ConvModel("unet", (8, 16, 8), widths=(4, 6, 8), in_channels=1, num_classes=4)


@pytest.mark.parametrize("model", [FLAT, SOLID])
def test_every_voxel_gets_logits(model):
    net = build_model(model, 1)
    images = torch.randn(2, model.in_channels, *model.input_size)
    assert net(images).shape == (2, model.num_classes, *model.input_size)
    assert sum(parameter.numel() for parameter in net.parameters()) == count_params(model)
    assert len(net.block_modules()) == 2 * len(model.widths) + 1


def test_the_public_size_is_the_planners():
    with torch.device("meta"):
        net = build_model(models()["unet3d"], 1)
    assert sum(parameter.numel() for parameter in net.parameters()) == count_params(models()["unet3d"]) == 31_190_243


def test_a_layer_normalises_each_sample_and_channel_alone():
    net = build_model(FLAT, 1)
    layer, x = net.down[0].first, torch.randn(3, 2, 16, 24) + 2
    assert torch.allclose(layer(x), F.relu(F.instance_norm(layer.conv(x))), atol=1e-5)


def soft_dice(weights, labels, num_classes):
    """Of one sample, voxel by voxel."""
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
    net = build_model(FLAT, 1)
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


@pytest.mark.parametrize("model", [FLAT, SOLID])
def test_every_level_meets_what_came_down_at_its_own_height(model):
    """Against the same layers, called one by one."""
    net, dims = build_model(model, 1).double(), len(model.input_size)
    for number, parameter in enumerate(net.parameters()):
        torch.nn.init.normal_(parameter, 0.3, 0.3, generator=torch.Generator().manual_seed(number))
    weights = dict(net.named_parameters())
    convolve = {2: F.conv2d, 3: F.conv3d}[dims]
    widen = {2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]

    def layer(x, name, stride=1):
        x = F.instance_norm(convolve(x, weights[f"{name}.conv.weight"], stride=stride, padding=1))
        shape = (1, -1, *[1] * dims)
        return (x * weights[f"{name}.norm.weight"].view(shape) + weights[f"{name}.norm.bias"].view(shape)).clamp_min(0)

    def pair(x, name, stride):
        return layer(layer(x, f"{name}.first", stride), f"{name}.second")

    images = torch.randn(2, model.in_channels, *model.input_size, dtype=torch.float64)
    levels, x = [], images
    for level in range(len(model.widths)):
        x = pair(x, f"down.{level}", 2 if level else 1)
        levels.append(x)
    x = pair(x, "bottom", 2)
    for level in range(len(model.widths)):
        up = widen(x, weights[f"up.{level}.widen.weight"], weights[f"up.{level}.widen.bias"], stride=2)
        x = pair(torch.cat((up, levels.pop()), 1), f"up.{level}.join", 1)
    logits = convolve(x, weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(net(images), logits)
    assert net.block_modules() == [*net.down, net.bottom, *net.up], "in the order in which they are computed"
