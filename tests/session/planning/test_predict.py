"""What a launch says, and refuses, before anything starts: on GPUs that are not there, and on a CPU never probed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.gpus.machines import play
from lab.problems import in_order, raises

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import Interrupted, MachineError, PlanError, TrainspecError
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import least_memory, moving_bytes, predict_local
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, SchedulerSpec
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan, PlannedLayout
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.folder.event_types.events import MemoryEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.memory_limits import Learned, LimitsWatch, MemoryLimits
from trainspec_cli.run.tools import probe_path
from trainspec_cli.session.planning.predict import (
    PROBING,
    UNMEASURED,
    Predictor,
    _check_changes,
    _largest_micro_batch,
    _predictor,
    describe_load,
    predict,
    probe_after_run,
    with_known_limits,
)

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


def test_a_gpus_plan_has_its_prediction(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    play("2xh100_sxm", monkeypatch)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)["plan"]
    assert (plan["device"], plan["devices_per_node"]) == ("cuda", 2)
    assert plan["prediction"]["time_s"]["forward"] > 0
    assert plan["prediction"]["beside"]["context"] > 2**28
    assert "predicted: " in err


@pytest.mark.parametrize("card", ["h100_sxm", "unheard_of"], ids=["in the catalogue", "derived"])
def test_what_does_not_fit_a_gpu_is_refused_unless_forced(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, card: str
) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"gpus": [{"card": f"2x{card}", "memory_mib": 1024}]}))
    play(str(machine), monkeypatch)
    assert run([*ON_GPU]) == 3
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["code"] == "does_not_fit"
    assert "a GPU has" in error["message"]
    assert "--force launches anyway" in error["hint"]
    assert run([*ON_GPU, "--force"]) == 0
    assert "forced" in capsys.readouterr().err


def test_a_gpu_that_the_catalogue_lacks_is_predicted_with_a_note(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    play("2xrtx_3080", monkeypatch)
    assert run([*ON_GPU]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)["plan"]
    assert plan["prediction"]["time_s"]["forward"] > 0
    assert plan["peak_flops"] is None, "a low rate would make every run look efficient"
    assert "conf/accelerator/geforce_rtx_3080.yaml" in err


def test_a_launch_on_an_unmeasured_machine_starts_nothing_and_refuses_what_cannot_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainspec_cli.session.planning.predict.probe_machine", None)
    shown: Any = Shown()
    own, machine = plan(SPEC, MACHINE), replace(MACHINE, memory_bytes=2**20)
    with raises(PlanError, "does_not_fit", " 2 x ", "1.00 MiB"):
        predict(own, machine, shown, force=False)
    forced = predict(own, machine, shown, force=True)
    assert (forced.prediction, forced.largest_micro_batch_size, forced.largest_stage_layers) == (None, None, None)
    kept = predict(own, MACHINE, shown, force=False)
    assert kept.prediction is None and shown.notes[-1].startswith(UNMEASURED)
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_does_not_probe(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    assert run(["launch", "recipe=tiny", "--dry-run"]) == 0
    assert UNMEASURED in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_memory_that_is_known_without_a_probe_is_the_least(made_up_probe: MachineProbe) -> None:
    own = plan(SPEC, MACHINE)
    least, probed = least_memory(own), predict_local(own, made_up_probe)
    assert least.time_s == {} and 0 < least.needed_bytes < probed.needed_bytes
    assert least.memory.items() <= probed.memory.items()


@pytest.mark.parametrize(("compute", "has_bf16", "says"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)])
def test_a_format_that_the_processor_does_not_have_is_named(
    compute: str, has_bf16: bool, says: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    shown: Any = Shown()
    wanted = replace(plan(SPEC, MACHINE), compute=compute)  # type: ignore[arg-type]
    predict(wanted, replace(MACHINE, bf16=has_bf16), shown, force=True)
    assert sum("no bf16 instructions" in note and "precision=fp32" in note for note in shown.notes) == says


@pytest.mark.parametrize(
    ("changed", "peak_flops", "source"),
    [
        ({}, 7e9, "best bf16 matmul in the probe"),
        ({"layout": Layout(tp=2)}, 7e9, "best bf16 matmul in the probe"),  # which has no prediction
        ({"num_nodes": 2}, None, ""),
        ({"peak_flops": 3e9, "peak_source": "a data sheet"}, 3e9, "a data sheet"),
    ],
    ids=["one node", "not predictable", "two nodes", "known"],
)
def test_mfu_is_of_what_the_probe_of_this_machine_measured(
    changed: dict[str, Any],
    peak_flops: float | None,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made_up_probe: MachineProbe,
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    shown: Any = Shown()
    wanted = replace(plan(SPEC, MACHINE), **changed)
    unprobed = predict(wanted, MACHINE, shown, force=True)
    assert (unprobed.peak_flops, unprobed.peak_source) == (wanted.peak_flops, wanted.peak_source)
    write_json(probe_path(wanted.as_one_group, MACHINE), to_plain(replace(made_up_probe, peak_flops=7e9)))
    probed = predict(wanted, MACHINE, shown, force=True)
    assert (probed.peak_flops, probed.peak_source) == (peak_flops, source)


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


def test_a_launch_begins_with_what_fitted_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said in a line, seen and forgotten by `trainspec runs`; not under scheduler=off."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    arguments = ("launch", "recipe=tiny", "cluster.devices_per_node=1", "batching.micro_batch_size=8", "--dry-run")
    assert run([*arguments, "--json"]) == 0
    before = from_plain(Plan, json.loads(capsys.readouterr().out)["plan"])
    assert before.memory_ladder[:2] == (before.memory_setting, replace(before.memory_setting, micro_batch_size=4))
    learning = LimitsWatch(RunDir(tmp_path / "run"), before, detect(look_for_gpus=False))
    taken = replace(before.memory_setting, micro_batch_size=2)
    shortage = MemoryEvent(
        step=3, layout="one process", failed=before.memory_setting, taken=taken, restarts=False, reason="x"
    )
    writer = EventWriter(RunDir(tmp_path / "run").directives, 0)
    writer.write(shortage)
    writer.close()
    learning.look()
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    after = from_plain(Plan, json.loads(out)["plan"])
    assert (after.memory_setting, after.grad_accum_steps) == (taken, 4)
    assert after.memory_ladder[0] == taken
    assert in_order(err, "micro-batches of 8 ", "micro-batches of 2 ")
    assert "trainspec runs --clear-limits" in err
    assert run([*arguments, "scheduler=off", "--json"]) == 0
    off = from_plain(Plan, json.loads(capsys.readouterr().out)["plan"])
    assert (off.micro_batch_size, off.memory_ladder) == (8, ())
    assert run(["runs", "--limits"]) == 0
    assert "micro-batches of 2 " in capsys.readouterr().out
    assert run(["runs", "--clear-limits", "--json"]) == 0
    assert [row["cleared"] for row in json.loads(capsys.readouterr().out)] == [True]
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["micro_batch_size"] == 8


GIB = 2**30
CHANGES = (PlannedLayout(4, Layout(dp_replicate=2), 8, 1), PlannedLayout(6, Layout(dp_shard=2), 4, 2))


def predicted(state_gib: float, needed_gib: float) -> LocalPrediction:
    rest = needed_gib - state_gib
    return LocalPrediction(
        {}, {"parameters": 0.4 * state_gib * GIB, "optimizer": 0.6 * state_gib * GIB} | {"loss": rest * GIB}
    )


def check_changes(limit_gib: float, *, force: bool = False) -> tuple[list[PlannedLayout], list[str]]:
    """The plan's own layout holds 2 GiB of state and needs 3; the first change 4 and 5, the second 2 and 4.5."""
    sizes = {2: (4.0, 5.0), 1: (2.0, 4.5)}
    said: list[str] = []
    console: Any = SimpleNamespace(report=said.append)
    own = replace(plan(SPEC, MACHINE), changes=CHANGES)
    predictor = Predictor(lambda other: predicted(*sizes[other.layout.dp_replicate]), limit_gib * GIB, "there is less")
    return list(_check_changes(own, predictor, predicted(2.0, 3.0), console, force=force)), said


def test_a_planned_layout_must_fit_and_so_must_the_way_to_it() -> None:
    moving_gib = 2.0 + 4.0 + 2 * 64 / 1024
    assert moving_bytes(predicted(2.0, 3.0), predicted(4.0, 5.0)) == pytest.approx(moving_gib * GIB)
    kept, said = check_changes(moving_gib + 0.01)
    assert ([change.layout for change in kept], said) == ([change.layout for change in CHANGES], [])
    with raises(PlanError, "does_not_fit", "the change", "step 4", "dp_replicate=2", "6.12 GiB"):
        check_changes(moving_gib - 0.01)
    _, said = check_changes(moving_gib - 0.01, force=True)
    assert len(said) == 2
    assert said[0].endswith("; forced")


def test_a_layout_that_does_not_fit_is_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.session.planning.predict.moving_bytes", lambda before, after: 0.0)
    with raises(PlanError, "does_not_fit", "step 4", "dp_replicate=2", "5.00 GiB"):
        check_changes(4.9)


def test_a_change_has_its_own_largest_micro_batch() -> None:
    own = replace(plan(SPEC, MACHINE), changes=CHANGES)
    predictor = Predictor(lambda other: predicted(0.0, other.micro_batch_size), 10 * GIB, "")
    replicas, shards = _check_changes(own, predictor, predicted(0.0, 1.0), None, force=False)  # type: ignore[arg-type]
    assert (replicas.largest_micro_batch_size, shards.largest_micro_batch_size) == (10, 8)


def learned(monkeypatch: pytest.MonkeyPatch, failed: int, taken: int) -> None:
    """Earlier runs of every plan have run out of memory with micro-batches of this many samples."""
    relief = Relief(*(MemorySetting(size, "none", "none") for size in (failed, taken)))
    limits = MemoryLimits("m", "d", "l", (Learned(relief, "run", 0.0),))
    monkeypatch.setattr("trainspec_cli.session.planning.predict.read_limits", lambda *_: limits)


@pytest.mark.parametrize("fits", [100, None], ids=["predicted to fit", "no prediction"])
def test_what_was_learned_holds_whatever_is_predicted(monkeypatch: pytest.MonkeyPatch, fits: int | None) -> None:
    learned(monkeypatch, 4, 2)
    predictor = fits and Predictor(lambda other: predicted(0.0, other.micro_batch_size), fits * GIB, "")
    monkeypatch.setattr("trainspec_cli.session.planning.predict._predictor", lambda *_, **__: predictor)
    monkeypatch.setattr("trainspec_cli.session.planning.predict.describe_prediction", lambda *_: "")
    shown: Any = Shown()
    own = replace(plan(SPEC, MACHINE), micro_batch_size=4, changes=CHANGES)
    found = predict(with_known_limits(own, MACHINE, shown), MACHINE, shown, force=False)
    assert (found.micro_batch_size, found.largest_micro_batch_size) == (2, 2)
    assert [change.largest_micro_batch_size for change in found.changes] == [2, 2]
    assert [change.micro_batch_size for change in found.changes] == [2, 2]
    assert [change.grad_accum_steps for change in found.changes] == [4, 4]


class Shown:
    is_terminal = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def report(self, *notes: str) -> None:
        self.notes.extend(notes)


@pytest.mark.parametrize("error", [MachineError("the probe ended with 1"), Interrupted("the probe was interrupted")])
def test_a_probe_that_fails_after_a_run_is_reported(monkeypatch: pytest.MonkeyPatch, error: TrainspecError) -> None:
    def fail(plan: Any, machine: Machine, on_start: Callable[[], None]) -> None:
        on_start()
        raise error

    shown: Any = Shown()
    monkeypatch.setattr("trainspec_cli.session.planning.predict.probe_machine", fail)
    probe_after_run(plan(SPEC, MACHINE), MACHINE, shown)
    assert PROBING in shown.notes and str(error) in shown.notes[-1]


@pytest.mark.parametrize(
    ("changed", "choice", "probes"),
    [({}, "", 1), ({}, "off", 0), ({"layout": Layout(tp=2)}, "", 0), ({"num_nodes": 2}, "", 0)],
    ids=["measured", "left out", "not predictable", "two nodes"],
)
def test_a_machine_is_measured_after_a_run_that_a_probe_predicts(
    changed: dict[str, Any],
    choice: str,
    probes: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made_up_probe: MachineProbe,
) -> None:
    """Once: later runs are predicted by that probe. A disturbance by other programs is reported only then."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("TRAINSPEC_PROBE", choice)
    began: list[int] = []
    disturbed = replace(made_up_probe, displaced=0.4)

    def probe(*_: Any) -> MachineProbe:
        began.append(1)
        return disturbed

    monkeypatch.setattr("trainspec_cli.run.tools.torchrun", lambda *_: None)
    monkeypatch.setattr("trainspec_cli.run.tools.run_tool", probe)
    shown: Any = Shown()
    own = replace(plan(SPEC, MACHINE), **changed)
    for _ in range(2):
        probe_after_run(own, MACHINE, shown)
    assert (len(began), shown.notes.count(PROBING)) == (probes, probes)
    assert (predict(own, MACHINE, shown, force=True).prediction is not None) == bool(probes)
    assert [shown.notes.count(line) for line in describe_load(disturbed)] == [probes]


def test_each_process_may_take_its_part_of_this_machines_memory(
    monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe
) -> None:
    shown: Any = Shown()
    for probe in (made_up_probe, None):
        monkeypatch.setattr("trainspec_cli.session.planning.predict.known_probe", lambda *_, probe=probe: probe)
        found = _predictor(plan(SPEC, MACHINE), MACHINE, shown)
        assert found is not None and found.limit_bytes == MACHINE.memory_bytes / 2
        assert found.limit_text.endswith(" 16.00 GiB") and found.is_measured is (probe is not None)


def test_a_terminal_shows_the_time_while_the_machine_is_probed(
    monkeypatch: pytest.MonkeyPatch, made_up_probe: MachineProbe
) -> None:
    def probe(plan: Plan, machine: Machine, on_start: Callable[[], None]) -> MachineProbe:
        on_start()
        return made_up_probe

    monkeypatch.setattr("trainspec_cli.session.planning.predict.probe_machine", probe)
    drawn = {}
    for is_terminal in (False, True):
        console = PrintableConsole(file=io.StringIO(), force_terminal=is_terminal, width=200)
        probe_after_run(plan(SPEC, MACHINE), MACHINE, console)
        drawn[is_terminal] = console.file.getvalue()  # type: ignore[attr-defined]
    assert PROBING in drawn[True] and "0:00:00" in drawn[True]
    assert PROBING in drawn[False] and "0:00:00" not in drawn[False]
