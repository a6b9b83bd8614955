"""How backends are tried and timed, on a clock that the test moves; and which of a run's operations are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.engine.tools import kernels
from trainspec_cli.engine.tools.kernels import SUM_ERROR, Calls, Workload, relative_error, time_in_turns, try_kernels
from trainspec_cli.recipe.keys.kernels import TORCH, KernelTrial, KernelTrials
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.wings.certify.cases import Case, build_plan

CPU = torch.device("cpu")


class Time:
    """A clock, and calls that take their time on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s, self.calls = 0.0, []
        monkeypatch.setattr(kernels, "clock", lambda: self.now_s)

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.calls.append(name)
            self.now_s += seconds

        return work


def test_short_calls_are_repeated_and_backends_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default's half a millisecond is repeated four times a turn, and so is its rival's whole one."""
    time = Time(monkeypatch)
    works = {TORCH: [(time.work("a", 5e-4), 1)], "other": [(time.work("b", 1e-3), 1)]}
    ratios = time_in_turns(works, CPU)
    assert ratios["other"] == pytest.approx([2.0] * 25)
    assert ratios[TORCH] == pytest.approx([1.0] * 25)
    assert "".join(time.calls[2:]).startswith("aaaabbbb" + "bbbbaaaa" + "aaaabbbb"), "the first two set the repeats"


def test_long_calls_end_with_the_budget_after_seven_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    works = {TORCH: [(time.work("a", 0.4), 1)], "other": [(time.work("b", 0.2), 1)]}
    assert len(time_in_turns(works, CPU)["other"]) == 7
    time = Time(monkeypatch)
    works = {TORCH: [(time.work("a", 0.05), 1)], "other": [(time.work("b", 0.15), 1)]}
    assert len(time_in_turns(works, CPU)["other"]) == 11, "a second for each of the two"


def test_a_steps_time_counts_each_call_as_often_as_the_step_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    works = {
        TORCH: [(time.work("a", 0.01), 3), (time.work("b", 0.02), 1)],
        "other": [(time.work("c", 0.02), 3), (time.work("d", 0.01), 1)],
    }
    assert time_in_turns(works, CPU)["other"] == pytest.approx([7 / 5] * 25)


def test_wrong_and_failing_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the default's error is allowed, and at least the format's."""
    timed: dict[str, Any] = {}
    warmed: list[str] = []

    def time_in_turns(works: dict[str, Any], device: torch.device) -> dict[str, tuple[float, ...]]:
        timed.update(works)
        return dict.fromkeys(works, (1.0, 2.0))

    monkeypatch.setattr(kernels, "time_in_turns", time_in_turns)
    errors = {TORCH: 0.01, "as wrong as allowed": 0.02, "too wrong": 0.0201, "nan": math.inf}

    def error_of(kernel: Any) -> float:
        if kernel == "raises":
            raise ValueError("  no\nreally")
        return errors.get(kernel, 0.0)

    def works_of(kernel: Any) -> list[Any]:
        if kernel == "cannot be built":
            raise ImportError
        return [(lambda: warmed.append(kernel), 5)]

    names = [*errors, "raises", "cannot be built"]
    trials = try_kernels({name: name for name in names}, Workload(torch.float32, CPU, error_of, works_of))  # type: ignore[misc]
    assert list(timed) == [TORCH, "as wrong as allowed"]
    assert warmed == [TORCH] * 2 + ["as wrong as allowed"] * 2
    assert trials == {
        TORCH: KernelTrial(error=0.01, allowed_error=0.02, ratios=(1.0, 2.0)),
        "as wrong as allowed": KernelTrial(error=0.02, allowed_error=0.02, ratios=(1.0, 2.0)),
        "too wrong": KernelTrial(error=0.0201, allowed_error=0.02),
        "nan": KernelTrial(error=math.inf, allowed_error=0.02),
        "raises": KernelTrial(failure="ValueError: no"),
        "cannot be built": KernelTrial(failure="ImportError: "),
    }
    errors[TORCH] = 0.0
    exact = try_kernels({TORCH: TORCH}, Workload(torch.bfloat16, CPU, error_of, works_of))[TORCH]  # type: ignore[dict-item]
    assert exact.allowed_error == 2**-7 + SUM_ERROR


def test_an_error_is_the_distance_over_the_length() -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), expected) == math.inf
    assert relative_error(torch.tensor([3.0, math.inf]), expected) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize(
    ("elements", "chosen"),
    [
        (1, [(2, 3)]),
        (7, [(2, 3), (4,)]),
        (11, [(2, 3), (4,), (2, 3)]),
        (10**6, [(2, 3), (4,), (2, 3), (2, 3)]),
    ],
)
def test_shapes_come_in_turn_until_there_are_enough(elements: int, chosen: list[tuple[int, ...]]) -> None:
    assert kernels._as_many({(2, 3): 3, (4,): 1}, elements) == chosen


def test_weights_and_gradients_are_the_same_in_every_format() -> None:
    single, double = (kernels.make_shares([(50, 40), (7,)], dtype, CPU) for dtype in (torch.float32, torch.float64))
    for one, other in zip(single, double, strict=True):
        assert torch.equal(one.local.double(), other.local)
        assert one.local.grad is not None and other.local.grad is not None
        assert torch.equal(one.local.grad.double(), other.local.grad)
        assert not torch.equal(one.local, one.local.grad)
    assert float(single[0].local.std()) == pytest.approx(0.02, rel=0.1)
    assert [share.name for share in single] == ["0", "1"]


# Which operations of a run


SWIGLU = ((2, 3), (2, 3))
CALLS = Calls({"swiglu": Counter({SWIGLU: 2, ((1, 3), (1, 3)): 5}), "rope": Counter()}, Counter({(3, 4): 2, (3,): 9}))


def plan_with(optimizer: str = "adamw", **changes: Any) -> Any:
    plan = build_plan(Case("dense", optimizer=optimizer), "cpu")  # type: ignore[arg-type]
    return replace(plan, **changes)


def test_operations_that_a_run_has_are_tried_at_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def try_kernels(kernels: dict[str, Any], workload: Workload) -> dict[str, KernelTrial]:
        tried.append([str(workload.dtype), workload.device.type])
        return {TORCH: KernelTrial(error=0.5)}

    monkeypatch.setattr(kernels, "try_kernels", try_kernels)
    monkeypatch.setattr(kernels, "why_untried", lambda _plan, _op, name: "no")
    found = kernels.try_all(plan_with(compute="bf16"), CALLS, CPU)
    assert tried == [["torch.bfloat16", "cpu"], ["torch.float32", "cpu"]]
    for op in ("swiglu", "adamw"):
        others = dict.fromkeys(kernels.KERNELS[op], KernelTrial(untried="no"))
        assert found.trials[op] == others | {TORCH: KernelTrial(error=0.5)}
    assert found.calls == {
        "swiglu": ("5 x (1, 3) (1, 3)", "2 x (2, 3) (2, 3)"),
        "adamw": ("9 x (3,)", "2 x (3, 4)"),
    }


def test_descent_has_no_adamw_and_offloaded_updates_run_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(kernels.workloads_of(plan_with("sgd"), CALLS, CPU)) == {"swiglu"}
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "optimizer_update", lambda *given: asked.append(given))
    meta, none = torch.device("meta"), Calls({}, CALLS.parameters)
    kernels.workloads_of(plan_with(), none, meta)
    kernels.workloads_of(plan_with(offload="optimizer"), none, meta)
    assert [(given[0], type(given[1]), given[2]) for given in asked] == [
        (CALLS.parameters, OptimSpec, meta),
        (CALLS.parameters, OptimSpec, CPU),
    ]


def test_what_cannot_run_here_is_said_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_untried", lambda _plan, _op, name: "no" if name in (TORCH, "frugal") else "")
    monkeypatch.setattr(kernels, "load_kernel", lambda op, name: f"{op} {name}")
    monkeypatch.setattr(
        kernels, "try_kernels", lambda tried, workload: {name: KernelTrial(failure=tried[name]) for name in tried}
    )
    norms = Calls({"rms_norm": Counter({((2, 3), (3,), 1e-5): 1})})
    found = kernels.try_all(plan_with("sgd"), norms, CPU).trials["rms_norm"]
    assert found.pop("frugal") == KernelTrial(untried="no")
    assert found == {name: KernelTrial(failure=f"rms_norm {name}") for name in (TORCH, "compiled", "liger")}


def test_arguments_are_noted_by_shape_or_number() -> None:
    seen: Counter[Any] = Counter()
    noted = kernels._noting(lambda *given: len(given), seen)
    assert noted(torch.ones(2, 3), 0.5, None, "text", 7) == 5
    noted(torch.ones(2, 3), 0.5, None, "other", 7)
    assert dict(seen) == {((2, 3), 0.5, None, None, 7): 2}


@pytest.mark.parametrize("compiles", [False, True])
def test_kernels_are_tried_as_the_run_compiles_them(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those within blocks; others are never part of a compiled block. The loss's chunk is compiled by itself."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda kernel, dynamic: compiled.append((kernel, dynamic)) or "compiled")
    monkeypatch.setattr(kernels.ChunkCrossEntropy, "compile", lambda chunk: compiled.append("chunk"))
    monkeypatch.setattr(kernels, "load_kernel", lambda op, name: f"{op} {name}")
    monkeypatch.setattr(kernels, "try_kernels", lambda found, workload: tried.update(found) or {})
    monkeypatch.setattr(kernels, "why_untried", lambda _plan, _op, name: "no")
    plan = plan_with("sgd")
    plan = replace(plan, spec=replace(plan.spec, compile=compiles))
    tried: dict[str, Any] = {}
    kernels.try_all(plan, CALLS, CPU)
    assert "swiglu" in kernels.IN_BLOCKS
    assert tried == {TORCH: "compiled" if compiles else f"swiglu {TORCH}"}
    assert compiled == (["chunk", (f"swiglu {TORCH}", False)] if compiles else [])
    outside = "linear_cross_entropy"
    assert outside not in kernels.IN_BLOCKS
    loss = Calls({outside: Counter({((64, 64), (512, 64), (64,), None): 1})})
    kernels.try_all(plan, loss, CPU)
    assert tried == {TORCH: f"{outside} {TORCH}"}


@pytest.mark.parametrize(
    ("device", "process", "processes", "world_size", "stands_in_for"),
    [("cpu", 1, 3, 8, 3), ("cpu", 2, 3, 8, 7), ("cuda", 3, 4, 4, 3), ("xpu", 0, 8, 64, 0), ("cpu", 0, 1, 1, 0)],
)
def test_each_process_tries_on_its_own_device_at_the_shapes_of_a_rank(
    device: str, process: int, processes: int, world_size: int, stands_in_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in for ranks from the first to the last."""
    order: list[Any] = []
    own = device if device == "cpu" else f"{device}:{process}"
    for name, value in {"RANK": process, "WORLD_SIZE": processes, "LOCAL_RANK": process}.items():
        monkeypatch.setenv(name, str(value))
    plan = SimpleNamespace(device=device, world_size=world_size)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda chosen: order.append(f"set {chosen}"))
    monkeypatch.setattr(kernels, "calls_of", lambda given, rank: order.append(f"calls of {rank}") or "calls")
    trials = KernelTrials({"rope": ()}, {"rope": {TORCH: KernelTrial(error=math.inf)}})
    monkeypatch.setattr(kernels, "try_all", lambda given, calls, where: order.append((calls, str(where))) or trials)
    monkeypatch.setattr(kernels, "join_processes", lambda kind: order.append(f"joins {kind}"))
    monkeypatch.setattr(kernels, "gather_json", lambda value, read: [read(value), read(value)])
    found = kernels.run(SimpleNamespace(plan=plan))  # type: ignore[arg-type]
    made = [f"calls of {stands_in_for}", ("calls", own), f"joins {device}"]
    assert order == [*([f"set {own}"] if device != "cpu" else []), *made]
    assert len(found.ranks) == 2 and list(found.ranks[0].trials) == ["rope"]
