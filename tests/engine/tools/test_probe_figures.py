"""The probe's arithmetic, on steps and calls that the test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.engine.models.rope import apply_rope
from trainspec_cli.engine.observe.counters import Peak
from trainspec_cli.engine.tools import probe, speed
from trainspec_cli.engine.tools.probe import SmallRun
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import Curve, MachineProbe, Passes, SpeedRequest
from trainspec_cli.run.folder.event_types.events import PARTS

FP32 = torch.float32


def test_a_figure_is_the_mean_over_the_processes(monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe) -> None:
    """The other two of three hold twice as much together."""
    monkeypatch.setattr(probe.dist, "all_reduce", lambda total: total.mul_(6))
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 3)
    found = probe.average(made_up_probe)
    assert found.add == Curve((2.0, 4.0), (2.0, 4.0))
    assert found.attention == Passes(found.add, found.add)
    assert found.empty_step_s == dict.fromkeys(PARTS, 2.0)
    assert found.small == replace(made_up_probe.small, parts_s=dict.fromkeys(PARTS, 2.0))
    assert (found.processes, found.compute, found.bare_bytes, found.displaced) == (2, "bf16", 2.0, 0.0)


def run_with(steps: Sequence[float]) -> SmallRun:
    run = object.__new__(SmallRun)
    run.steps = [dict.fromkeys(PARTS, 0.0) | {"forward": seconds, "backward": 2 * seconds} for seconds in steps]
    return run


@pytest.mark.parametrize(
    ("steps", "mean"),
    [([3.0], 3.0), ([5.0, 1.0], 1.0), ([9.0, 1.0, 2.0] * 3 + [100.0, 4.0], (1 * 3 + 2 * 3 + 4 + 9 * 2) / 9)],
)
def test_the_slowest_tenth_of_the_steps_is_left_out(steps: list[float], mean: float) -> None:
    found = run_with(steps).parts_s()
    assert found["forward"] == pytest.approx(mean)
    assert found["backward"] == pytest.approx(2 * mean)
    assert found["optimizer"] == 0.0
    assert list(found) == list(PARTS)


def made_up_plan() -> Plan:
    return probe.plan_of(DecoderModel(3, 256, 4, 2, 64, 704, 4096, tied_embeddings=True), 256, 4, "fp32")


class TimedSteps:
    """Steps of a run that take these seconds, by a separate clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float):
        self.now_s, self._left, self.made = 0.0, list(seconds), 0
        clock = SimpleNamespace(restart=lambda: None, cut=lambda: SimpleNamespace(parts_s=lambda: {"forward": 1.0}))
        monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(probe, "build_train_state", lambda *_: SimpleNamespace(clock=clock))
        monkeypatch.setattr(SmallRun, "_step", lambda _: self._step())
        monkeypatch.setattr(probe.dist, "get_world_size", lambda: 1)
        monkeypatch.setattr(probe.dist, "barrier", lambda: None)
        monkeypatch.setattr(probe, "longest_s", lambda own_s: own_s)

    def _step(self) -> None:
        self.made += 1
        self.now_s += self._left.pop(0)


def test_a_reference_warms_up_and_leaves_out_the_step_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the first one takes, which allocates."""
    steps = TimedSteps(monkeypatch, 9.0, *[0.1] * 5, *[0.1] * 4)
    run = SmallRun(made_up_plan())
    assert (steps.made, run.is_long) == (6, False)
    run.run(3)
    assert (steps.made, len(run.steps)) == (6 + 4, 3)


def test_a_reference_of_long_steps_makes_few(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = TimedSteps(monkeypatch, 9.0, 8.0, 8.0)
    run = SmallRun(made_up_plan())
    assert (steps.made, run.is_long) == (2, True)
    run.run(3)
    assert (steps.made, len(run.steps)) == (3, 1)


class Trained:
    """A run whose step takes 10 s and 3 s more a layer, of the forward; nothing of the rest."""

    def __init__(self, plan: Any):
        self.plan, self.ran = plan, []
        Trained.made.append(self)

    made: list[Any] = []  # noqa: RUF012 - emptied by the test

    def run(self, steps: int) -> None:
        self.ran.append(steps)

    def parts_s(self) -> dict[str, float]:
        layers = self.plan.spec.model.num_layers
        return dict.fromkeys(PARTS, 0.0) | {"forward": 10.0 + 3 * layers, "backward": 9.0 - layers}

    def reference(self) -> Any:
        return self


def test_an_empty_step_and_block_follow_from_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    Trained.made.clear()
    times = iter([(1.0, 2.0), (7.0, 4.0)])
    names = [f"curve {number}" for number in range(9)]
    taken: dict[str, Any] = {}
    monkeypatch.setattr(probe, "SmallRun", Trained)
    monkeypatch.setattr(probe, "ProcessorClock", lambda: SimpleNamespace(read=lambda: next(times)))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=12345))
    monkeypatch.setattr(probe, "psutil", SimpleNamespace(Process=lambda: process))
    monkeypatch.setattr(
        probe, "operations", lambda dtype: {name: lambda name=name: f"{dtype} {name}" for name in names}
    )
    monkeypatch.setattr(probe, "average", lambda value: value)
    monkeypatch.setattr(probe, "MachineProbe", lambda **given: taken.update(given))
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(probe, "measure_peak", lambda device, dtype: Peak(7e9, f"{dtype} on {device}"))
    probe.measure("bf16")
    few, many, large, small = Trained.made
    assert [run.plan.spec.model.num_layers for run in (few, many, large, small)] == [2, 6, 3, 2]
    assert [run.plan.spec.data.seq_len for run in (few, many, large, small)] == [8, 8, 256, 128]
    assert (few.ran, many.ran) == ([12], [12])
    assert large.ran == small.ran == [3, 3, 3], "before the first, the fifth and the ninth curve"
    assert taken["empty_block_s"] == dict.fromkeys(PARTS, 0.0) | {"forward": 3.0}
    assert taken["empty_step_s"] == dict.fromkeys(PARTS, 0.0) | {"forward": 10.0, "backward": 7.0}
    assert (taken["small"], taken["large"], taken["bare_bytes"]) == (small, large, 12345.0)
    assert (taken["displaced"], taken["peak_flops"]) == (2 / 8, 7e9)
    assert (taken["processes"], taken["compute"], taken["curve 3"]) == (2, "bf16", "torch.bfloat16 curve 3")


def test_a_probes_plan_is_replicated_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 3)
    plan = made_up_plan()
    assert (plan.layout.dp_replicate, plan.world_size, plan.compute) == (3, 3, "fp32")
    assert (plan.micro_batch_size, plan.grad_accum_steps, plan.tokens_per_step) == (4, 1, 3 * 4 * 256)
    assert (plan.recompute, plan.offload) == ("none", "none")
    embedding, block = 4096 * 256, 256 * (4 + 2 + 2 + 4) * 64 + 3 * 256 * 704 + 2 * 256
    assert plan.params == embedding + 3 * block + 256


# Single operations


def test_operands_rotate_through_as_many_copies_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "call_s", lambda runs: float(len(runs)))
    monkeypatch.setattr(probe, "longest_s", lambda own_s: 0.0)
    found = probe.measure_curve((64, 2**18, 2**20, 2**22), lambda size: lambda: size)
    assert found == Curve((64.0, 2.0**18, 2.0**20, 2.0**22), (16.0, 8.0, 2.0, 1.0))
    assert probe.measure_curve((64,), lambda size: lambda: size, bytes_each=2**17).seconds == (2.0,)
    both = probe.measure_passes(lambda size: ("f", "b"), (1, 2))  # type: ignore[arg-type,return-value]
    assert both.forward.sizes == both.backward.sizes == (1.0, 2.0)


def test_a_curve_ends_where_a_call_is_long_on_the_slowest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its last size it is proportional, which `Curve.at` holds to."""
    monkeypatch.setattr(probe, "call_s", lambda runs: runs[0]())
    monkeypatch.setattr(probe.dist, "all_reduce", lambda longest, op: longest.mul_(2.0))
    found = probe.measure_curve((1, 10, 100, 1000), lambda size: lambda: size / 100)
    assert found == Curve((1.0, 10.0, 100.0), (0.01, 0.1, 1.0)) and found.at(1000.0) == 10.0
    assert probe.measure_curve((1, 10), lambda size: lambda: size / 100).sizes == (1.0, 10.0)
    assert probe.measure_curve((13, 20), lambda size: lambda: size / 100).sizes == (13.0,)


@pytest.mark.parametrize(("elements", "shape"), [(64, (1, 64)), (256, (1, 256)), (2**14, (64, 256))])
def test_rows_are_at_most_256_wide(elements: int, shape: tuple[int, int]) -> None:
    assert probe.rows(elements) == shape
    forward, backward = probe.runs_of("norm", elements, FP32)
    assert forward().shape == shape
    assert [gradient.shape for gradient in backward()] == [shape, shape[1:]]
    assert [gradient.shape for gradient in backward()] == [shape, shape[1:]], "as often as it is called"


@pytest.mark.parametrize(("elements", "shape"), [(16, (1, 1, 1, 16)), (64, (1, 1, 1, 64)), (2**14, (1, 64, 4, 64))])
def test_rotated_heads_have_64_numbers(elements: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(probe, "apply_rope", lambda x, cos, sin: given.append((cos, sin)) or apply_rope(x, cos, sin))
    forward, backward = probe.runs_of("rope", elements, torch.bfloat16)
    out = forward()
    assert (out.shape, out.dtype) == (shape, torch.bfloat16)
    assert given[0][0].shape == given[0][1].shape == (shape[1], shape[3])
    assert backward()[0].shape == shape


def test_other_operations_work_on_as_many_elements() -> None:
    def results(operation: str, elements: int, dtype: torch.dtype) -> list[Any]:
        return [run() for run in probe.runs_of(operation, elements, dtype)]

    forward, gradients = results("swiglu", 32, torch.bfloat16)
    assert (forward.shape, forward.dtype, [g.shape for g in gradients]) == ((32,), torch.bfloat16, [(32,), (32,)])
    ((loss, dlogits),) = results("loss", 2**14, torch.bfloat16)
    assert (loss.shape, dlogits.shape, dlogits.dtype) == ((), (4, 4096), torch.bfloat16)
    assert results("loss", 64, FP32)[0][1].shape == (1, 64)
    for operation in ("add", "cast"):
        (found,) = results(operation, 9, torch.bfloat16)
        assert (found.shape, found.dtype) == ((9,), torch.bfloat16)
    results("optimizer", 16, FP32)


def test_the_three_products_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """x W^T, dy W and dy^T x; with few rows where the matrix is the smallest."""

    def results(sizes: Sequence[int], make: Callable[[int], Callable[[], Any]]) -> Any:
        assert list(sizes) == [side**2 for side in (16, 64, 256, 512, 1024)]
        torch.manual_seed(0)
        large = make(64**2)()
        return large, make(16**2)().shape

    monkeypatch.setattr(probe, "measure_curve", results)
    found = probe.measure_matmul(FP32)
    torch.manual_seed(0)
    x, weight = torch.randn(1024, 64), torch.randn(64, 64)
    expected = {"forward": x @ weight.T, "input_gradient": x @ weight, "weight_gradient": x.T @ x}
    shapes = {"forward": (8, 16), "input_gradient": (8, 16), "weight_gradient": (16, 16)}
    for name, product in expected.items():
        large, small = getattr(found, name)
        torch.testing.assert_close(large, product)
        assert small == shapes[name]


def test_attention_is_measured_on_as_many_tokens_whatever_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(make: Callable[[int], Any], sizes: Sequence[int], bytes_each: int) -> Any:
        return {size: make(size)[0]().shape for size in sizes}, bytes_each

    monkeypatch.setattr(probe, "measure_passes", results)
    shapes, bytes_each = probe.measure_attention(FP32, 16)  # type: ignore[misc]
    assert shapes == {64: (16, 4, 64, 16), 256: (4, 4, 256, 16), 1024: (1, 4, 1024, 16)}
    assert bytes_each == 2**17


def test_a_collectives_time_is_the_median_of_five_calls_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers, sizes = [0.0], iter([100.0, 5.0, 1.0, 4.0, 2.0, 3.0] * 4), []
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 3)

    def collective(message: torch.Tensor) -> None:
        sizes.append(message.numel())
        now[0] += next(numbers)

    found = probe.measure_collective(collective)
    assert found == Curve((64.0, 65536.0, 1048576.0, 4194304.0), (3.0,) * 4)
    assert sizes[::6] == [18, 16386, 262146, 1048578], "fp32, up to a multiple of the processes"
    assert len(sizes) == 24


def test_a_nodes_speed_is_that_of_its_slowest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def flops(device: torch.device, *given: Any) -> float:
        asked.append(given)
        return [9e12, 4e12, 7e12][device.index or 0]

    monkeypatch.setattr(speed, "matmul_flops", flops)
    monkeypatch.setattr(speed, "measure_copy", lambda device: [3e9, 5e9, 2e9][device.index or 0])
    alone = speed.run(SpeedRequest("cpu", "bf16"))
    assert (alone.devices, alone.matmul_flops, alone.memory_bytes_per_s, alone.slowest_device) == (1, 9e12, 3e9, 0)
    assert (alone.torch, alone.nccl) == (torch.__version__, None)
    assert asked == [(torch.bfloat16, 1024, 5, 0.1)]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    three = speed.run(SpeedRequest("cuda", "fp32"))
    assert (three.devices, three.matmul_flops, three.memory_bytes_per_s, three.slowest_device) == (3, 4e12, 2e9, 1)
    assert three.nccl == "2.27.3"
