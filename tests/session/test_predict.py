"""What a launch says, and refuses, before anything starts: on GPUs that are not there, and on a CPU never probed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.errors import MachineError
from trainspec_cli.launch.job.machine import Gpu
from trainspec_cli.planner.plan import plan
from trainspec_cli.session.predict import Predictor, _largest_micro_batch, _predictor, _probe
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec, Machine
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection
from trainspec_cli.spec.recipe.scheduler import SchedulerSpec
from trainspec_cli.spec.results.probe import MachineProbe

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
SPEC = RunSpec(
    model=DecoderModel(1, 64, 2, 2, 32, 128, 512),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
ON_GPU = ("launch", "recipe=tiny", "cluster=auto", "--dry-run", "--json")


def plug_in(monkeypatch: pytest.MonkeyPatch, name: str, memory_bytes: int) -> None:
    gpus = (Gpu(name, memory_bytes, (9, 0), memory_bytes),) * 2
    monkeypatch.setattr("trainspec_cli.launch.job.machine.visible_gpus", lambda: gpus)


def test_a_gpus_plan_has_its_prediction(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA H100 80GB HBM3", 80 * 2**30)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)["plan"]
    assert (plan["device"], plan["devices_per_node"]) == ("cuda", 2)
    assert plan["prediction"]["time_s"]["forward"] > 0
    assert plan["prediction"]["beside"]["context"] > 2**28
    assert "predicted: " in err


def test_what_does_not_fit_a_gpu_is_refused_unless_forced(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA H100 80GB HBM3", 2**30)
    assert run([*ON_GPU]) == 3
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "does_not_fit"
    assert "a GPU can give" in error["message"]
    assert "--force launches all the same" in error["hint"]
    assert run([*ON_GPU, "--force"]) == 0
    assert "forced" in capsys.readouterr().err


def test_a_gpu_that_the_catalogue_lacks_is_not_predicted(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "Abacus-9000", 2**30)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["plan"]["prediction"] is None
    assert "no prediction: the catalogue has no accelerator like Abacus-9000" in err


def test_a_dry_run_does_not_probe(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    assert run(["launch", "recipe=tiny", "--dry-run"]) == 0
    assert "no prediction: this machine was not probed yet" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "fits", "largest"),
    [
        ({}, 100, 8),  # up to twice the plan's
        ({}, 6, 6),
        ({}, 4, 4),
        ({}, 1, 4),  # it was forced
        ({"max_micro_batch_size": 32}, 100, 32),
        ({"max_micro_batch_size": 32}, 21, 21),
        ({"max_micro_batch_size": 5}, 100, 5),
        ({"max_micro_batch_size": 2}, 100, 4),
        ({"mode": "off"}, 100, None),
    ],
)
def test_the_largest_micro_batch_that_fits(changes: dict[str, Any], fits: int, largest: int | None) -> None:
    tried = []

    def predict(plan: Any) -> Any:
        tried.append(plan.micro_batch_size)
        return SimpleNamespace(needed_bytes=plan.micro_batch_size)

    own = replace(plan(SPEC, MACHINE), micro_batch_size=4)
    own = replace(own, spec=replace(own.spec, scheduler=SchedulerSpec(**changes)))
    assert _largest_micro_batch(own, Predictor(predict, fits, "")) == largest
    assert len(tried) <= 5, "as many as a search by halves needs"


def test_one_data_parallel_rank_needs_no_larger_micro_batch() -> None:
    alone = plan(replace(SPEC, cluster=replace(SPEC.cluster, devices_per_node=1)), MACHINE)
    assert _largest_micro_batch(alone, Predictor(None, 0, "")) is None  # type: ignore[arg-type]


class Shown:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def report(self, note: str) -> None:
        self.notes.append(note)


def test_a_probe_that_fails_leaves_the_launch_without_a_prediction(
    monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe
) -> None:
    def fail(plan: Any, machine: Machine, on_start: Callable[[], None]) -> None:
        on_start()
        raise MachineError("the probe ended with 1")

    shown: Any = Shown()
    monkeypatch.setattr("trainspec_cli.session.predict.probe_machine", fail)
    assert _probe(plan(SPEC, MACHINE), MACHINE, shown) is None
    assert shown.notes == [
        "probing this machine, once", "the probe ended with 1\n\nso this run starts without a prediction",
    ]  # fmt: skip
    monkeypatch.setattr("trainspec_cli.session.predict.probe_machine", lambda *_: made_up_probe)
    assert _probe(plan(SPEC, MACHINE), MACHINE, shown) is made_up_probe
    assert len(shown.notes) == 2 + made_up_probe.is_disturbed


def test_each_process_may_take_its_part_of_this_machines_memory(
    monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe
) -> None:
    shown: Any = Shown()
    monkeypatch.setattr("trainspec_cli.session.predict._probe", lambda *_: made_up_probe)
    monkeypatch.setattr("trainspec_cli.session.predict._known_probe", lambda *_: None)
    found = _predictor(plan(SPEC, MACHINE), MACHINE, shown, may_probe=True)
    assert found is not None and found.limit_bytes == MACHINE.memory_bytes / 2
    assert found.limit_text == "this machine has 16.00 GiB"
    assert _predictor(plan(SPEC, MACHINE), MACHINE, shown, may_probe=False) is None
