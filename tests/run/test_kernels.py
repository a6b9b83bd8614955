"""The choice of a backend, on made-up figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.kernels import TORCH, KernelTrial, KernelTrials
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.run.tools import MARGIN, judge, judge_operation


def trial(*ratios: float, error: float = 1e-3) -> KernelTrial:
    return KernelTrial(ratios=ratios, error=error, allowed_error=8e-3)


DEFAULT = trial(1.0, 1.0, 1.0)


def test_the_fastest_that_is_right() -> None:
    fast, faster = trial(0.8, 0.81, 0.82), trial(0.5, 0.51, 0.52)
    figures = judge_operation([{TORCH: DEFAULT, "fast": fast, "faster": faster, "none": trial(1.2, 1.3, 1.1)}])
    assert {name: figure.verdict for name, figure in figures.items()} == {
        TORCH: "default",
        "fast": "not faster",
        "faster": "chosen",
        "none": "not faster",
    }
    assert figures["fast"].reason == "faster"
    assert figures["faster"].ratio == 0.51


def test_what_is_wrong_is_out_on_every_process_if_on_one() -> None:
    right, wrong = trial(0.5, 0.5, 0.5), trial(error=0.5)
    figures = judge_operation([{TORCH: DEFAULT, "x": right}, {TORCH: DEFAULT, "x": wrong}])
    assert figures["x"].verdict == "wrong"
    assert "fp64 is 0.5" in figures["x"].reason


def test_no_number_is_wrong() -> None:
    assert judge_operation([{TORCH: DEFAULT, "x": trial(error=float("nan"))}])["x"].verdict == "wrong"
    figure = judge_operation([{TORCH: DEFAULT, "x": trial(error=float("inf"))}])["x"]
    assert (figure.verdict, figure.error) == ("wrong", None)  # which JSON can hold


def test_less_than_the_margin_is_not_faster() -> None:
    near = 1 - MARGIN / 2
    assert judge_operation([{TORCH: DEFAULT, "x": trial(near, near, near)}])["x"].verdict == "not faster"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [((0.5, 0.6, 0.99), "chosen"), ((0.5, 0.6, 1.0), "not faster"), ((1 - MARGIN,) * 3, "chosen"), ((0.5,), "chosen")],
    ids=["mostly faster", "as slow at times", "just the margin", "one round"],
)
def test_a_quarter_of_the_rounds_may_not_be_slower(ratios: tuple[float, ...], verdict: str) -> None:
    figure = judge_operation([{TORCH: DEFAULT, "x": trial(*ratios)}])["x"]
    assert (figure.verdict, figure.error, figure.allowed_error) == (verdict, 1e-3, 8e-3)
    assert figure.quartiles == (min(ratios), max(ratios))


def test_the_strictest_process_and_the_largest_error_count() -> None:
    """An error as large as what is allowed is right."""
    first, second = KernelTrial((0.5, 0.6), 2e-3, 9e-3), KernelTrial((0.7, 0.8), 5e-3, 5e-3)
    default = KernelTrial((1.0, 1.0), 0.0, 1.0)
    figure = judge_operation([{TORCH: default, "x": first}, {TORCH: default, "x": second}])["x"]
    assert (figure.verdict, figure.error, figure.allowed_error, figure.ratio) == (
        "chosen",
        5e-3,
        5e-3,
        pytest.approx(0.65),
    )
    assert judge_operation([{TORCH: default, "x": replace(second, error=None)}])["x"].verdict == "wrong"
    assert judge_operation([{TORCH: default, "x": replace(second, allowed_error=None)}])["x"].verdict == "wrong"


def test_a_gain_that_comes_and_goes_is_none() -> None:
    unsteady = trial(0.6, 0.7, 0.8, 1.5, 1.6)
    assert judge_operation([{TORCH: DEFAULT, "x": unsteady}])["x"].verdict == "not faster"


def test_what_failed_or_was_not_tried_says_why() -> None:
    broken, untried = KernelTrial(failure="RuntimeError: no"), KernelTrial(untried="only on CUDA")
    figures = judge_operation([{TORCH: DEFAULT, "broken": broken, "untried": untried}])
    assert (figures["broken"].verdict, figures["broken"].reason) == ("failed", "RuntimeError: no")
    assert (figures["untried"].verdict, figures["untried"].reason) == ("not tried", "only on CUDA")


def test_processes_without_the_operation_have_no_say() -> None:
    """The loss is the last stage's."""
    first = KernelTrials({}, {"rope": {TORCH: DEFAULT}})
    last = KernelTrials({}, {"rope": {TORCH: DEFAULT}, "linear_cross_entropy": {TORCH: DEFAULT, "x": trial(0.5, 0.5)}})
    assert judge([first, last])["linear_cross_entropy"]["x"].verdict == "chosen"


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_it_is_wrong_too_when_a_process_has_written_it_down(error: float) -> None:
    told = KernelTrials({}, {"rope": {TORCH: DEFAULT, "x": trial(error=error)}})
    read = from_plain(KernelTrials, json.loads(json_text(to_plain(told))))
    assert judge([read])["rope"]["x"].verdict == "wrong"
