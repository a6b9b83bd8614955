"""A loss of one's own: the mean of its tokens' losses, whatever it is cut into, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models import own_loss
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.engine.models.own_loss import OwnLinearLoss, load_loss
from trainspec_cli.recipe.own_code import LOSS, Extension

CPU = torch.device("cpu")
HEAD = "import torch\nimport torch.nn.functional as F\n\ndef loss(logits, targets, **options):\n    "
CROSS_ENTROPY = "return F.cross_entropy(logits, targets, reduction='none')"
SMOOTHED = "return F.cross_entropy(logits, targets, reduction='none', **options)"


def loaded(folder: Path, body: str, **options: float) -> OwnLinearLoss:
    (folder / "mine.py").write_text(HEAD + body + "\n")
    extension = Extension(LOSS, LOSS.key, f"{folder}/mine.py:loss", tuple(options))
    return OwnLinearLoss(load_loss(extension, dict(options), 7, CPU))


def computed(module: LinearCrossEntropy, seed: int = 0) -> list[Tensor]:
    """Return the loss of some tokens, one without a target, and the gradients of inputs and weights."""
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn((2, 5, 3), generator=generator).requires_grad_()
    weight_VD = torch.randn((7, 3), generator=generator).requires_grad_()
    targets_BS = torch.randint(7, (2, 5), generator=generator)
    targets_BS[0, 3] = IGNORED_TARGET
    loss = module(x_BSD, weight_VD, targets_BS)
    return [loss.detach(), *torch.autograd.grad(loss / 9, [x_BSD, weight_VD])]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_cross_entropy_of_ones_own_is_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(own_loss, "loss_chunk_tokens", lambda _rows: chunk)
    for found, expected in zip(computed(loaded(tmp_path, CROSS_ENTROPY)), computed(LinearCrossEntropy()), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_options_reach_the_loss_and_evaluations_keep_cross_entropy(tmp_path: Path) -> None:
    module = loaded(tmp_path, SMOOTHED, label_smoothing=0.5)
    x, weight, targets = torch.eye(3)[None], torch.randn((7, 3)), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(module(x, weight, targets), LinearCrossEntropy()(x, weight, targets))
    assert not torch.allclose(module(x, weight, targets), LinearCrossEntropy()(x, weight, targets))
    assert module(x, weight, None).shape == (1, 3, 7)


def test_a_micro_batch_without_samples_has_a_loss_and_gradients_of_zero(tmp_path: Path) -> None:
    x_BSD, weight_VD = torch.zeros((0, 5, 3), requires_grad=True), torch.randn((7, 3), requires_grad=True)
    loss = loaded(tmp_path, CROSS_ENTROPY)(x_BSD, weight_VD, torch.zeros((0, 5), dtype=torch.int64))
    dx_BSD, dweight_VD = torch.autograd.grad(loss, [x_BSD, weight_VD])
    assert (float(loss.detach()), dx_BSD.shape) == (0.0, (0, 5, 3))
    assert torch.equal(dweight_VD, torch.zeros((7, 3)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return F.cross_entropy(logits, targets)", "returned a tensor of shape () for 6 tokens"),
        ("return 3.0", "returned float for 6 tokens"),
        ("return targets.float()", "returned a tensor without a gradient for 6 tokens"),
        (f"{CROSS_ENTROPY} / len(targets)", "gives a token another loss beside other tokens than alone"),
        ("return (logits - logits.mean(0)).square().sum(1)", "another loss beside other tokens"),
        ("return (0 * logits).sqrt().sum(1)", "has a gradient that is not finite"),
        ("raise ValueError('no')", "raised ValueError: no on random logits before the run"),
    ],
)
def test_losses_that_are_not_of_each_token_are_refused(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        loaded(tmp_path, body)
    assert words in raised.value.problems[0].message


def test_an_error_in_a_step_names_its_line(tmp_path: Path) -> None:
    module = loaded(tmp_path, f"if len(targets) == 10: raise ValueError('ten')\n    {CROSS_ENTROPY}")
    with pytest.raises(WorkerError, match=r"raised ValueError: ten in a step \(.*mine.py:5, in loss"):
        computed(module)
