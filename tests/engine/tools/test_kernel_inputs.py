"""Random inputs like those of a run: shapes, which arguments get gradients, and numbers of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.kernels.shapes import CALLS

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.tools.kernels import describe_call, make_inputs, reduce_call, reference

CPU = torch.device("cpu")
LEAVES = {
    "attention": (0, 1, 2),
    "rms_norm": (0, 1),
    "swiglu": (0, 1),
    "rope": (0,),
    "linear_cross_entropy": (0, 1),
    "grouped_matmul": (0, 1),
    "ssd_scan": (0, 1, 2, 3, 4),
}


@pytest.mark.parametrize("op", CALLS)
def test_arguments_have_the_calls_shapes_and_the_asked_format(op: str) -> None:
    for call in CALLS[op]:
        made = make_inputs(op, call, torch.bfloat16, CPU, chunk="the chunk").with_gradients()  # type: ignore[arg-type]
        assert made.leaves == LEAVES[op]
        for index, (argument, wanted) in enumerate(zip(made.arguments, call, strict=True)):  # type: ignore[arg-type]
            if isinstance(argument, torch.Tensor):
                assert tuple(argument.shape) == wanted
                assert argument.requires_grad == (index in LEAVES[op])
            else:
                assert argument == ("the chunk" if op == "linear_cross_entropy" else wanted)
        assert made.arguments[0].dtype == torch.bfloat16
        again = make_inputs(op, call, torch.bfloat16, CPU).with_gradients()  # type: ignore[arg-type]
        wide = again.to(torch.float64)
        for narrow, same, argument in zip(made.arguments, again.arguments, wide.arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                assert torch.equal(narrow, same), "the same each time"
                assert argument.dtype == (torch.float64 if narrow.is_floating_point() else narrow.dtype)
                assert torch.equal(argument, narrow.detach().to(argument.dtype))
                assert not argument.requires_grad
        assert reference(op, *wide.arguments).isfinite().all()


def arguments(op: str, call: Any) -> Any:
    return make_inputs(op, call, torch.float32, CPU).arguments


def test_numbers_are_of_the_size_that_a_run_has() -> None:
    x, weight, targets, _ = arguments("linear_cross_entropy", ((320, 64), (500, 64), (320,), None))
    assert float(x.std()) == pytest.approx(1.0, rel=0.05)
    assert float(weight.std()) == pytest.approx(1 / 8, rel=0.05)
    assert (targets == IGNORED_TARGET).nonzero()[:, 0].tolist() == list(range(0, 320, 16))
    kept = targets[targets != IGNORED_TARGET]
    assert 0 <= int(kept.min()) < 30 and 470 < int(kept.max()) < 500
    _, cos, sin = arguments("rope", ((2, 100, 4, 32), (100, 32), (100, 32)))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(100, 32))
    assert torch.equal(cos[:, :16], cos[:, 16:])
    assert float(cos.min()) < -0.99 and float(sin.min()) < -0.99
    _, experts, counts = arguments("grouped_matmul", ((50, 64), (8, 64, 32), (8,)))
    assert counts.tolist() == [7, 7, 6, 6, 6, 6, 6, 6]
    assert float(experts.std()) == pytest.approx(1 / 8, rel=0.05)
    _, dt, a, _, _ = arguments("ssd_scan", ((2, 500, 4, 16), (2, 500, 4), (400,), (2, 500, 2, 8), (2, 500, 2, 8)))
    assert 0.001 <= float(dt.min()) < 0.002 and 0.099 < float(dt.max()) <= 0.1
    assert -16 <= float(a.min()) < -15.5 and -1.5 < float(a.max()) <= -1


def test_masks_are_causal_up_to_the_last_query() -> None:
    """A window's queries stand at the end of its keys."""
    *_, mask, _ = arguments("attention", ((4, 4, 3, 16), (4, 2, 5, 16), (4, 2, 5, 16), (3, 5), 0.25))
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_heads_are_adjacent_in_memory() -> None:
    q, *_ = arguments("attention", CALLS["attention"][0])  # type: ignore[index]
    assert q.transpose(1, 2).is_contiguous()


def test_a_call_is_described_by_its_shapes() -> None:
    assert describe_call(((8, 6), (6,), 1e-5, None)) == "(8, 6) (6,)"


@pytest.mark.parametrize(
    ("op", "call", "reduced"),
    [
        ("attention", ((3, 4, 2000, 8),) * 3 + ((2000, 2000), 0.5), ((2, 4, 1024, 8),) * 3 + ((1024, 1024), 0.5)),
        ("attention", ((1, 4, 10, 8),) * 3 + (None, None), ((1, 4, 10, 8),) * 3 + (None, None)),
        (
            "attention",
            ((8, 4, 2000, 8),) * 3 + ((8, 1, 2000, 2000), 0.1),
            ((2, 4, 1024, 8),) * 3 + ((2, 1, 1024, 1024), 0.1),
        ),
        ("rms_norm", ((8, 4096, 64), (64,), 1e-5), ((2, 1024, 64), (64,), 1e-5)),
        (
            "linear_cross_entropy",
            ((32768, 64), (512, 64), (32768,), None),
            ((1024, 64), (512, 64), (1024,), None),
        ),
        ("swiglu", ((9, 3000, 2000), (9, 3000, 2000)), ((2, 1024, 2000), (2, 1024, 2000))),
        ("swiglu", ((3000, 2000), (3000, 2000)), ((3000, 2000), (3000, 2000))),
        ("rope", ((9, 3000, 4, 64), (3000, 64), (3000, 64)), ((2, 1024, 4, 64), (3000, 64), (3000, 64))),
        ("grouped_matmul", ((3000, 32), (4, 32, 48), (4,)), ((1024, 32), (4, 32, 48), (4,))),
        (
            "ssd_scan",
            ((9, 3000, 4, 16), (9, 3000, 4), (4,), (9, 3000, 2, 8), (9, 3000, 2, 8)),
            ((2, 1024, 4, 16), (2, 1024, 4), (4,), (2, 1024, 2, 8), (2, 1024, 2, 8)),
        ),
    ],
)
def test_what_is_checked_is_a_part_of_the_call(op: str, call: Any, reduced: Any) -> None:
    assert reduce_call(op, call) == reduced
