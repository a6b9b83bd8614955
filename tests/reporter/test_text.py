"""Events whose figures were not finite are null, and told as such."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"heldout_bits_per_byte": 2.0, "xz_bits_per_byte": 3.0}, "2.000 bits per byte (xz 3.000), loss not finite"),
        ({"heldout_bits_per_byte": None}, "loss not finite"),
        ({"heldout_accuracy": None}, "accuracy not finite, loss not finite"),
    ],
)
def test_an_evaluation(figures: dict[str, Any], shown: str) -> None:
    event = EvalEvent(step=3, heldout_loss=None, **figures)
    assert describe_event(event) == f"step 3: held out {shown}"


def test_a_step() -> None:
    progress = Progress(9)
    figures: dict[str, Any] = {"grad_norm": None, "tokens": 1, "step_time_s": 1.0, "time_s": {}}
    progress.add(StepEvent(step=1, loss=None, skipped=True, **figures))
    assert describe_progress(progress) == "loss not finite"


def test_a_cadence_where_no_failure_is_expected() -> None:
    event = CadenceEvent(step=1, interval_steps=7, blocked_s=1.0, drag_s=0.0, written_s=1.0, step_time_s=1.0)
    assert describe_event(event).endswith("; no failures are expected")


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


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (START, "2.5M parameters on 1 process, a chip\nMFU is relative to 2 TFLOP/s per process (maker)"),
        (
            replace(START, adapter_params=500_000),
            "3M parameters, 500k of them trained on 1 process, a chip\n"
            "MFU is relative to 2 TFLOP/s per process (maker)",
        ),
        (EVAL, "step 4: held out 2.000 bits per byte, loss 1.5000"),
        (
            replace(EVAL, sets={"web": SetFigures(loss=1.0, bits_per_byte=0.5)}),
            "step 4: held out 2.000 bits per byte, loss 1.5000; web 0.500 bits per byte, loss 1.0000",
        ),
        (EvalEvent(step=4, heldout_loss=0.25, heldout_accuracy=0.9), "step 4: held out accuracy 0.900, loss 0.2500"),
        (EvalEvent(step=4, heldout_loss=0.25, heldout_dice=0.5), "step 4: held out Dice 0.500, loss 0.2500"),
        (
            CheckpointEvent(step=4, path="p", bytes=2048, seconds=0.5, written_s=2.0),
            "step 4: checkpoint, 2.00 KiB in 2.0 s, training held up for 500 ms",
        ),
        (
            CheckpointEvent(step=4, path="p", bytes=2048, seconds=2.0, written_s=2.0),
            "step 4: checkpoint, 2.00 KiB in 2.0 s",
        ),
        (CheckpointEvent(step=4, path="p", bytes=2048, seconds=0.5), "step 4: checkpoint, 2.00 KiB in 500 ms"),
        (
            CadenceEvent(
                step=4, interval_steps=1200, blocked_s=1.0, drag_s=2.0, written_s=9.0, step_time_s=1.0, mtbf_s=7200.0
            ),
            "step 4: from here a checkpoint every 1,200 steps: one costs 3.0 s and is complete after 9.0 s; "
            "a failure is expected every 2 h 0 min",
        ),
        (
            CadenceEvent(
                step=4,
                interval_steps=60,
                blocked_s=1.0,
                drag_s=2.0,
                written_s=9.0,
                step_time_s=1.0,
                mtbf_s=1500.0,
                failures=1,
                observed_s=120.0,
            ),
            "step 4: from here a checkpoint every 60 steps: one costs 3.0 s and is complete after 9.0 s; "
            "a failure is expected every 25 min 0 s, judging by 1 in 2 min 0 s and the cluster's figure",
        ),
        (
            RecoveryEvent(step=4, change="left", group=1, stall_s=1.257, lost_steps=1),
            "step 4: group 1 left: 1.26 s, 1 step lost",
        ),
        (
            RecoveryEvent(step=4, change="joined", group=0, stall_s=None, lost_steps=2),
            "step 4: group 0 came back: 2 steps lost",
        ),
        (
            RecoveryEvent(step=4, change="retried", group=None, stall_s=None, lost_steps=0),
            "step 4: the step was repeated",
        ),
    ],
)  # fmt: skip
def test_an_event_in_words(event: Event, shown: str) -> None:
    assert describe_event(event) == shown


def test_a_plan_tells_its_batch_and_steps(forecast: tuple[RunSpec, RunForecast]) -> None:
    spec, _ = forecast
    constant = Plan(spec, Layout(), "cuda", 2, 8, "bf16", 2, 4, "none", "none", 8_030_261_248, 5.1e10)
    seesaw = replace(spec, batching=replace(spec.batching, schedule=BatchScheduleSpec(kind="seesaw")))
    shown = describe_plan(constant)
    assert "batch     128 samples of 8192 tokens, 2 per process and micro-batch" in shown
    assert "steps     1000, 1.05B tokens in total" in shown
    shown = describe_plan(replace(constant, spec=seesaw, steps=640))
    assert "batch     128 samples of 8192 tokens at first (seesaw), 2 per process and micro-batch" in shown
    assert "steps     640, 1.05B tokens in total" in shown


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


def test_a_backtest() -> None:
    assert render_backtest(backtest(row("bf16"), row("zero 1", "bf16"))).split("\n") == [
        "1200 rows, 1000 predicted, 2 rejected",
        "step time: mean error 12.5%, median 10.0%, bias +5.0%, over 900 measured rows",
        "  sources that the planner was fitted to: mean error 12.5%, median 10.0%, bias -5.0%, "
        "nine in ten within x1.00, over 3 rows",
        "  unseen sources: mean error 12.5%, median 10.0%, bias -5.0%, nine in ten within x1.50, over 2 rows",
        "memory: mean error 6.2%, largest underestimate -20.0%",
        "",
        "source                                     rows   mean  median    bias",
        "a paper                                       3   12.5%   10.0%   -5.0%",
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx      3   12.5%   10.0%   -5.0%",
        "",
        "chip   rows   mean  median    bias",
        "H100      3   12.5%   10.0%   -5.0%",
        "",
        "sweeps of layouts: the one predicted fastest is within 5% of the fastest in 1 of 3",
        "   50.0% slower: llama on A100, 7 layouts",
        "    5.1% slower: llama on H100, 7 layouts",
        "    5.0% slower: llama on H100, 7 layouts",
        "",
        "refused",
        "      2  no such model",
        "",
        "assumed where a row does not state it",
        "      2  bf16",
        "      1  zero 1",
    ]


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


def test_a_certificate() -> None:
    assert text_of(render_certificate(certificate())) == [
        "unsigned: anyone could have written this certificate, including its measured values and its machine",
        "",
        "clause  level  what it says  cases  failed    worst    bound",
        "NUM-1   MUST   losses agree      3       0  2.5e-07  1.0e-05",
        "NUM-2   MUST   losses agree      2       1     0.50     0.25",
        "CKPT-1  MUST   losses agree      1       1  differs    exact",
        "CKPT-2  MUST   losses agree      1       0    exact    exact",
        "",
        "NUM-2 is broken by moe: error 5.00e-01, parameter norm",
        "",
        "the training spec 0.2: broken, 7 cases measured on 8 CPU cores; digest 0123456789abcdef",
    ]


def test_a_certificate_of_a_few_clauses_that_were_kept() -> None:
    kept = certificate("H200", "H200", whole=False, verdict="kept", findings=())
    assert text_of(render_certificate(kept))[-2:] == [
        "",
        "4 clauses of the spec: kept, 7 cases measured on 2 x H200; digest 0123456789abcdef",
    ]


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


def test_a_diagnosis() -> None:
    between = (Check("clocks", "ok", "1 ms apart"),)
    assert text_of(render_diagnosis(Diagnosis("fail", NODES, between, "two", None))) == [
        "one",
        "  ok    gpu             8 x H100",
        "  warn  disk            9 GB left",
        "                        make room",
        "two",
        "  FAIL  gpu             no GPU",
        "between the processes",
        "  ok    clocks          1 ms apart",
        "2 nodes: 2 ok, 1 warning, 1 failed",
        "slowest node: two",
    ]


def test_a_diagnosis_of_one_node() -> None:
    assert text_of(render_diagnosis(Diagnosis("warn", NODES[:1], (), "one", None)))[-2:] == [
        "                        make room",
        "1 node: 1 ok, 1 warning, 0 failed",
    ]


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


@pytest.mark.parametrize(
    ("written_s", "shown"),
    [(None, "in 320 ms"), (ABSENT, "in 320 ms"), (0.32, "in 320 ms"),
     (2.0, "in 2.0 s, training held up for 320 ms")],
)  # fmt: skip
def test_a_checkpoint_that_is_written_beside_training(written_s: Any, shown: str) -> None:
    event = CheckpointEvent(step=1, path="p", bytes=1, seconds=0.32, written_s=written_s)
    assert describe_event(event) == f"step 1: checkpoint, 1 B {shown}"
