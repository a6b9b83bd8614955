import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models import cross_entropy
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.recipe.keys.model import loss_chunk_tokens, loss_group_tokens

TOKENS, HIDDEN, VOCAB = 300, 24, 97


def problem(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::7] = IGNORED_TARGET
    return x, weight, targets


@pytest.fixture
def small_chunks(monkeypatch):
    assert loss_chunk_tokens(VOCAB, 4 * VOCAB * 64) == loss_chunk_tokens(VOCAB, 1) == 64
    monkeypatch.setattr(cross_entropy, "loss_chunk_tokens", lambda _rows, _bytes: 64)
    monkeypatch.setattr(cross_entropy, "loss_group_tokens", lambda _hidden, _width, chunk: chunk)


def reference(x, weight, targets):
    """Loss and gradients in fp64, from the full logits."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(x @ weight.T, targets, reduction="sum", ignore_index=IGNORED_TARGET)
    return loss, *torch.autograd.grad(loss / 10, (x, weight))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fp32_equals_the_full_logits_in_fp64(small_chunks, compiled):
    x, weight, targets = problem(torch.float32)
    module = LinearCrossEntropy()
    if compiled:
        module.chunk.compile()
    loss = module(x, weight, targets)
    dx, dweight = torch.autograd.grad(loss / 10, (x, weight))
    expected_loss, expected_dx, expected_dweight = reference(x, weight, targets)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dweight.double(), expected_dweight, rtol=1e-5, atol=1e-6)


def test_bf16_is_no_worse_than_torch_on_full_bf16_logits(small_chunks):
    x, weight, targets = problem(torch.bfloat16)
    _, expected_dx, expected_dweight = reference(x, weight, targets)
    ours = torch.autograd.grad(LinearCrossEntropy()(x, weight, targets) / 10, (x, weight))
    full = F.cross_entropy((x @ weight.T).float(), targets, reduction="sum", ignore_index=IGNORED_TARGET)
    torchs = torch.autograd.grad(full / 10, (x, weight))
    for our, torch_own, expected in zip(ours, torchs, (expected_dx, expected_dweight), strict=True):
        our_error, torch_error = ((g.double() - expected).norm() for g in (our, torch_own))
        assert our_error <= 1.1 * torch_error


@pytest.mark.parametrize(("dtype", "added"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_a_group_of_chunks_is_added_to_the_weights_gradient_at_once(
    monkeypatch, dtype: torch.dtype, added: int
) -> None:
    """300 tokens in chunks of 64 are two groups: of 256 and of 44. Products in fp32 add by themselves."""
    monkeypatch.setattr(cross_entropy, "loss_chunk_tokens", lambda _rows, _bytes: 64)
    monkeypatch.setattr(cross_entropy, "loss_group_tokens", lambda _hidden, _width, chunk: 4 * chunk)
    x, weight, targets = problem(dtype)
    with Operations() as seen:
        loss = LinearCrossEntropy()(x, weight, targets)
    gradient = (VOCAB, HIDDEN)
    assert seen.shapes.count(("add_", gradient)) == added
    assert seen.shapes.count(("mm", gradient)) + seen.shapes.count(("addmm_", gradient)) == 2
    assert seen.shapes.count(("mm", (256, HIDDEN))) == seen.shapes.count(("mm", (44, HIDDEN))) == 1
    expected_loss, *expected = reference(x, weight, targets)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=0)
    if dtype is torch.float32:
        for found, truth in zip(torch.autograd.grad(loss / 10, (x, weight)), expected, strict=True):
            torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("hidden", "width", "chunk", "tokens"),
    [(4096, 2, 256, 4096), (1024, 2, 192, 1920), (1024, 4, 192, 960), (16384, 2, 2048, 16384), (64, 2, 65536, 65536)],
)
def test_groups_are_whole_chunks_of_half_the_gradients_memory(hidden: int, width: int, chunk: int, tokens: int) -> None:
    assert loss_group_tokens(hidden, width, chunk) == tokens


class Operations(TorchDispatchMode):
    """The names of operations, with the shape of the tensor that each writes or returns."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.shapes.append((func.__name__.partition(".")[0], tuple(out.shape)))
        return out


class Sizes(TorchDispatchMode):
    """The elements of each tensor that an operation has written, but for those in place."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.__name__.partition(".")[0].endswith("_"):
            tensors = out if isinstance(out, (tuple, list)) else [out]
            self.seen += [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return out


def test_no_tensor_of_the_full_logits_is_ever_made(small_chunks):
    x, weight, targets = problem(torch.float32)
    with Sizes() as sizes:
        LinearCrossEntropy()(x, weight, targets).backward()
    assert 0 < max(sizes.seen) <= max(64 * VOCAB, TOKENS * HIDDEN) < TOKENS * VOCAB


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2), (torch.bfloat16, 4)])
def test_without_a_compiler_a_chunk_is_written_few_times(dtype: torch.dtype, most: int) -> None:
    """Each tensor of the logits' size is a pass over memory: fp32 logits, softmax, and both ends of a narrow format."""
    x, weight, targets = problem(dtype)
    with Sizes() as sizes, torch.no_grad():
        cross_entropy.ChunkCrossEntropy()(x @ weight.T, targets)
    assert sizes.seen.count(TOKENS * VOCAB) <= most


def test_all_ignored_costs_nothing():
    x, weight, _ = problem(torch.float32)
    loss = LinearCrossEntropy()(x, weight, torch.full((TOKENS,), IGNORED_TARGET))
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not weight.grad.any()
