"""Events whose figures were not finite are null, and told as such."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

from lab.recorded import Recorded
from rich.console import Console, RenderableType

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import BatchScheduleSpec
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.certificate import Certificate, ClauseSummary, Finding, Signer
from trainspec_cli.recipe.results.doctor import Check, Diagnosis, NodeReport
from trainspec_cli.recipe.results.forecast import RunForecast
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import BacktestReport, BacktestSummary, ErrorSummary, PredictedRow, Ranking
from trainspec_cli.reporter.backtest import render_backtest
from trainspec_cli.reporter.progress import Progress
from trainspec_cli.reporter.text import (
    describe_event,
    describe_plan,
    describe_progress,
    first_text_parts,
)
from trainspec_cli.run.folder.event_types.events import (
    CadenceEvent,
    CheckpointEvent,
    EvalEvent,
    Event,
    FirstTextEvent,
    RecoveryEvent,
    SetFigures,
    StartEvent,
    StepEvent,
    TextPart,
)
from trainspec_cli.wings.certify.commands.certify import render_certificate
from trainspec_cli.wings.doctor.commands.doctor import render_diagnosis


def text_of(rendered: RenderableType, width: int = 120) -> list[str]:
    """The lines as a terminal shows them."""
    console = Console(file=io.StringIO(), width=width)
    console.print(rendered)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_first_text_marks_what_is_trained_on() -> None:
    parts = (TextPart(text="a question\nof two lines", trained=False), TextPart(text="x" * 500, trained=True))
    masked = FirstTextEvent(step=0, tokens=9, trained=4, parts=parts)
    how_many, text = describe_event(masked).splitlines()
    assert "4 of 9 tokens" in how_many
    assert text.startswith(r"a question\nof two lines[xxx") and text.endswith("xxx]")
    assert len(text) < 250
    assert [style for _, style in first_text_parts(masked) if style] == ["dim", "bold"]
    whole = FirstTextEvent(step=0, tokens=9, trained=9, parts=parts[1:])
    (line,) = describe_event(whole).splitlines()
    assert "all 9 tokens" in line and len(line) < 150 and "[" not in line


def test_an_evaluation(recorded: Recorded) -> None:
    figures: list[dict[str, Any]] = [
        {"heldout_bits_per_byte": 2.0, "xz_bits_per_byte": 3.0},
        {"heldout_bits_per_byte": None},
        {"heldout_accuracy": None},
    ]
    recorded(*(describe_event(EvalEvent(step=3, heldout_loss=None, **given)) for given in figures))


def test_a_step() -> None:
    progress = Progress(9)
    figures: dict[str, Any] = {"grad_norm": None, "tokens": 1, "step_time_s": 1.0, "time_s": {}}
    progress.add(StepEvent(step=1, loss=None, skipped=True, **figures))
    assert describe_progress(progress) == "loss not finite"


def test_a_cadence_where_no_failure_is_expected(recorded: Recorded) -> None:
    event = CadenceEvent(step=1, interval_steps=7, blocked_s=1.0, drag_s=0.0, written_s=1.0, step_time_s=1.0)
    recorded(describe_event(event))


START = StartEvent(
    step=0,
    world_size=1,
    device_name="a chip",
    params=2_500_000,
    peak_flops=2e12,
    peak_source="maker",
    flops_per_token=1,
)
EVAL = EvalEvent(step=4, heldout_loss=1.5, heldout_bits_per_byte=2.0)


CADENCE = CadenceEvent(
    step=4, interval_steps=1200, blocked_s=1.0, drag_s=2.0, written_s=9.0, step_time_s=1.0, mtbf_s=7200.0
)
CHECKPOINT = CheckpointEvent(step=4, path="p", bytes=2048, seconds=0.5)
EVENTS: tuple[Event, ...] = (
    START,
    replace(START, adapter_params=500_000),
    EVAL,
    replace(EVAL, sets={"web": SetFigures(loss=1.0, bits_per_byte=0.5)}),
    EvalEvent(step=4, heldout_loss=0.25, heldout_accuracy=0.9),
    EvalEvent(step=4, heldout_loss=0.25, heldout_dice=0.5),
    replace(CHECKPOINT, written_s=2.0),
    replace(CHECKPOINT, seconds=2.0, written_s=2.0),
    CHECKPOINT,
    CADENCE,
    replace(CADENCE, interval_steps=60, mtbf_s=1500.0, failures=1, observed_s=120.0),
    RecoveryEvent(step=4, change="left", group=1, stall_s=1.257, lost_steps=1),
    RecoveryEvent(step=4, change="joined", group=0, stall_s=None, lost_steps=2),
    RecoveryEvent(step=4, change="retried", group=None, stall_s=None, lost_steps=0),
)


def test_an_event_in_words(recorded: Recorded) -> None:
    recorded(*map(describe_event, EVENTS))


def test_a_plan_tells_its_batch_and_steps(forecast: tuple[RunSpec, RunForecast], recorded: Recorded) -> None:
    spec, _ = forecast
    constant = Plan(spec, Layout(), "cuda", 2, 8, "bf16", 2, 4, "none", "none", 8_030_261_248, 5.1e10)
    seesaw = replace(spec, batching=replace(spec.batching, schedule=BatchScheduleSpec(kind="seesaw")))
    recorded(describe_plan(constant), describe_plan(replace(constant, spec=seesaw, steps=640)))


def row(*assumed: str) -> PredictedRow:
    return PredictedRow(None, 1.0, None, None, None, None, None, assumed, None)


def backtest(*rows: PredictedRow, **changes: Any) -> BacktestReport:
    group = ErrorSummary(rows=3, mape=0.125, median_ape=0.1, bias=-0.05)
    sweep = Ranking("a paper", "llama", "H100", 7, loss=0.05)
    summary = BacktestSummary(
        rows=1200, predicted=1000, refused=2,
        step_time_mape=0.125, step_time_median_ape=0.1, bias=0.05, judged=900,
        memory_mape=0.0625, memory_worst_under=-0.2, fitted=group, unseen=replace(group, rows=2, known_within=1.5),
        by_source={"a paper": group, "x" * 50: group}, by_model={}, by_gpu={"H100": group},
        sweeps=(sweep, replace(sweep, loss=0.5, gpu="A100"), replace(sweep, loss=0.051)),
        refused_by_reason={"no such model": 2},
    )  # fmt: skip
    return BacktestReport(replace(summary, **changes), rows)


def test_a_backtest(recorded: Recorded) -> None:
    recorded(render_backtest(backtest(row("bf16"), row("zero 1", "bf16"))))


def test_a_backtest_without_measurements() -> None:
    none = {"step_time_mape": None, "memory_mape": None, "fitted": None, "unseen": None}
    told = backtest(row(), refused=0, sweeps=(), by_source={}, by_gpu={}, **none)
    assert render_backtest(told) == "1200 rows, 1000 predicted, 0 rejected"


def clause(name: str, cases: int, failed: int, worst: float | None, bound: float | None) -> ClauseSummary:
    return ClauseSummary(name, "MUST", "losses agree", cases, failed, worst, bound)


def certificate(*gpus: str, **changes: Any) -> Certificate:
    passed = Finding("NUM-1", "dense", passed=True)
    finding = Finding("NUM-2", "moe", passed=False, figures={"error": 0.5, "parameter": "norm"})
    found = Certificate(
        schema="", spec_version="0.2", verdict="broken", digest="0123456789abcdef0", whole=True,
        machine=Machine("box", cpu_cores=8, memory_bytes=1, gpu_names=gpus),
        clauses=(
            clause("NUM-1", 3, 0, 2.5e-7, 1e-5), clause("NUM-2", 2, 1, 0.5, 0.25), clause("CKPT-1", 1, 1, None, None),
            clause("CKPT-2", 1, 0, None, None), clause("LEFT-OUT", 0, 0, None, None),
        ),
        findings=(passed, finding),
    )  # fmt: skip
    return replace(found, **changes)


def test_a_certificate(recorded: Recorded) -> None:
    recorded(*text_of(render_certificate(certificate())))


def test_a_certificate_of_a_few_clauses_that_were_kept(recorded: Recorded) -> None:
    kept = certificate("H200", "H200", whole=False, verdict="kept", findings=())
    recorded(*text_of(render_certificate(kept)))


def test_who_vouches_for_a_certificate_comes_first_and_its_day_and_machine_last() -> None:
    terms = {"date": "2026-01-01", "machine_id": "ab" * 16}
    lines = text_of(render_certificate(certificate(signer=Signer("ssh-ed25519 AAAA", "SHA256:x"), **terms)))
    assert lines[0].startswith("signed by SHA256:x ")
    assert lines[-2:] == ["made on 2026-01-01", f"on the machine {'ab' * 16} (box)"]


def test_what_is_broken_is_red() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard", no_color=False)
    console.print(render_certificate(certificate()))
    red = [line for line in console.file.getvalue().splitlines() if "31m" in line]  # type: ignore[attr-defined]
    assert [re.split("[ \x1b]", line.split("m", 1)[1])[0] for line in red] == ["NUM-2", "CKPT-1", "NUM-2", "the"]


NODES = (
    NodeReport("one", 0.0, (Check("gpu", "ok", "8 x H100"), Check("disk", "warn", "9 GB left", "make room"))),
    NodeReport("two", 0.0, (Check("gpu", "fail", "no GPU"),)),
)


def test_a_diagnosis(recorded: Recorded) -> None:
    between = (Check("clocks", "ok", "1 ms apart"),)
    recorded(*text_of(render_diagnosis(Diagnosis("fail", NODES, between, "two", None))))


def test_a_diagnosis_of_one_node(recorded: Recorded) -> None:
    recorded(*text_of(render_diagnosis(Diagnosis("warn", NODES[:1], (), "one", None))))


def test_a_plan_tells_its_model_devices_and_layout(forecast: tuple[RunSpec, RunForecast]) -> None:
    spec, _ = forecast
    plan = Plan(spec, Layout(dp_shard=2), "cuda", 2, 8, "bf16", 2, 4, "none", "none", 8_030_261_248, 5.1e10)
    lines = dict(line.split(None, 1) for line in describe_plan(plan).splitlines())
    assert list(lines) == ["model", "devices", "layout", "batch", "steps", "compute"]
    assert lines["model"] == "llama3_8b, 8.03B parameters"
    assert lines["devices"] == f"{plan.world_size} x cuda, bf16"
    assert lines["layout"] == plan.layout.describe()
    assert lines["compute"] == "51 GFLOP per token"
    nameless = replace(spec, model=replace(spec.model, name=""))
    groups = replace(plan, spec=nameless, replica_groups=2, kernels=KernelSpec(rope="compiled"))
    lines = dict(line.split(None, 1) for line in describe_plan(groups).splitlines())
    assert lines["model"].startswith("decoder, ")
    assert lines["groups"].startswith(f"2 of {groups.group_size} each") and lines["groups"].endswith("nccl")
    assert lines["kernels"] == "rope compiled"


def test_a_checkpoint_that_is_written_beside_training(recorded: Recorded) -> None:
    times: tuple[Any, ...] = (None, ABSENT, 0.32, 2.0)
    events = (CheckpointEvent(step=1, path="p", bytes=1, seconds=0.32, written_s=written_s) for written_s in times)
    recorded(*map(describe_event, events))
