from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from lab.events import ACHIEVED, DIRECTIVE, LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY, write_event
from lab.recorded import Recorded
from rich.console import Console, RenderableType

from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.reporter.collect import collect
from trainspec_cli.reporter.render import render_report, render_summary
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.accounting import WallTime
from trainspec_cli.run.folder.event_types.events import PARTS


def text_of(rendered: RenderableType) -> str:
    output = io.StringIO()
    Console(file=output, width=120).print(rendered)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def line_with(shown: str, part: str) -> str:
    (line,) = (line for line in shown.splitlines() if part in line)
    return line


def section_of(shown: str, title: str) -> str:
    """The lines from a title to the next empty line."""
    lines = shown.splitlines()
    first = lines.index(title)
    return "\n".join(lines[first : lines.index("", first)])


def trained(run: Any) -> None:
    run.about()
    for rank in (0, 1):
        run.start(rank=rank)
        for step in range(1, 11):
            run.step(step, rank, loss=10.0 - step)
    run.write("eval", step=10, heldout_loss=1.0, heldout_bits_per_byte=2.0, xz_bits_per_byte=2.5, seconds=1.0)
    run.write("sample", step=10, prompt="def ", text="main(argv):\n    [return]")


def test_steps_that_differ_are_told_of(fake_run: Any, recorded: Recorded) -> None:
    fake_run.about()
    fake_run.start()
    for step in range(1, 24):
        fake_run.step(step, seconds=1.4 if step % 4 else 1.0)
    assert "other work slowed" not in text_of(render_report(collect(fake_run.dir.root)))
    for step in range(24, 30):
        fake_run.step(step, seconds=3.0)
    recorded(line_with(text_of(render_report(collect(fake_run.dir.root))), "steps took"))


def test_the_exposed_part_of_exchanges_is_told_where_some_went_on_beside_the_computation(
    fake_run: Any, recorded: Recorded
) -> None:
    """Means over the steps of both ranks that show it."""
    fake_run.about()
    for rank in (0, 1):
        fake_run.start(rank=rank)
        fake_run.step(1, rank)
        for step in (2, 3):
            fake_run.step(step, rank, exchange_s=0.5 - 0.2 * rank, exposed_s=0.1 * rank)
    recorded(line_with(text_of(render_report(collect(fake_run.dir.root))), "exchanged"))


def test_long_waits_for_data_are_told_of(fake_run: Any) -> None:
    fake_run.about()
    fake_run.start()
    for step in range(1, 11):
        fake_run.step(step, data_wait=0.04)
    assert "waiting for data" not in text_of(render_report(collect(fake_run.dir.root)))
    for step in range(11, 21):
        fake_run.step(step, data_wait=0.2)
    assert "waiting for data" in text_of(render_report(collect(fake_run.dir.root)))


def test_what_the_scheduler_did_has_a_section(fake_run: Any, recorded: Recorded) -> None:
    trained(fake_run)
    assert "scheduler" not in text_of(render_report(collect(fake_run.dir.root))).splitlines()
    write_event(fake_run.dir.directives, DIRECTIVE)
    write_event(fake_run.dir.directives, replace(DIRECTIVE, group=1))
    write_event(fake_run.dir.directives, replace(ACHIEVED, group=1))
    write_event(fake_run.dir.directives, MEMORY)
    write_event(fake_run.dir.directives, LEFT_OUT)
    write_event(fake_run.dir.directives, LEFT_OUT_ACHIEVED)
    recorded(section_of(text_of(render_report(collect(fake_run.dir.root))), "scheduler"))


def test_recoveries_have_a_section(fake_run: Any, recorded: Recorded) -> None:
    trained(fake_run)
    assert "recoveries" not in text_of(render_report(collect(fake_run.dir.root))).splitlines()
    fake_run.write("recovery", step=5, change="left", group=1, stall_s=1.26, lost_steps=1)
    recorded(section_of(text_of(render_report(collect(fake_run.dir.root))), "recoveries"))


def test_links_have_a_table_of_the_slowest_and_a_line_for_each_change(fake_run: Any, recorded: Recorded) -> None:
    trained(fake_run)
    assert "links" not in text_of(render_report(collect(fake_run.dir.root))).splitlines()
    slow = {"links": 4, "noise": 0.08, "sent_bytes": 2.0**20, "waited_s": 0.25, "last_rank": 3, "samples": 9}
    before = [{"axis": "tp", "ranks": [0, 1], "bytes_per_s": 9e9, **slow}]
    fake_run.write("links", step=4, links=before)
    pair = {"axis": "tp", "ranks": [2, 3], "bytes_per_s": 1.2e9, **slow}
    alone = {"axis": "dp_shard", "ranks": [0, 4, 8], "bytes_per_s": 5e9, **slow, "links": 1, "planned_bytes_per_s": 6e9}
    fake_run.write("links", step=9, links=[pair, alone])
    change = {"axis": "tp", "ranks": [2, 3], "before_bytes_per_s": 9.6e9, "now_bytes_per_s": 1.2e9, "since_step": 5}
    fake_run.write("link", step=9, **change)
    fake_run.write("link", step=10, **{**change, "now_bytes_per_s": 2.4e10}, changed_links=3, group=1)
    shown = text_of(render_report(collect(fake_run.dir.root)))
    recorded(section_of(shown, "links"), section_of(shown, "link changes"))


def test_long_lists_show_their_end(fake_run: Any) -> None:
    trained(fake_run)
    for step in range(20):
        fake_run.write("checkpoint", step=step, path="p", bytes=1024, seconds=0.1)
    shown = text_of(render_report(collect(fake_run.dir.root)))
    assert "(12 earlier)" in shown
    assert "step 11: checkpoint" not in shown
    assert "step 19: checkpoint, 1.00 KiB" in shown


def test_what_is_amiss_is_told(fake_run: Any) -> None:
    fake_run.about()
    generations.begin(fake_run.dir)
    fake_run.start()
    fake_run.step(1, skipped=True)
    for rank in (0, 2):
        fake_run.write("warning", rank, step=1, message="odd")
    shown = text_of(render_report(collect(fake_run.dir.root)))
    assert "killed, 1 of 20 steps" in shown
    assert "step 1: odd (rank 0, 2)" in shown
    assert "events of rank 1" in shown


def test_a_run_without_events_has_a_report(fake_run: Any) -> None:
    fake_run.about()
    assert "made, 0 of 20 steps" in text_of(render_report(collect(fake_run.dir.root)))


BEGIN = {
    "device_name": "a chip", "peak_flops": 1e9, "peak_source": "best matmul measured", "params": 1_500_000,
    "flops_per_token": 1e6,
}  # fmt: skip


def a_long_run(run: Any) -> None:
    """Two starts of two ranks; rank 1 takes twice as long in `forward` and waits for data."""
    run.about()
    for rank in (0, 1):
        run.start(rank=rank)
        for step in range(1, 9):
            run.step(step, rank, loss=10.0 - step)
        run.start(step=5, rank=rank)
        for step in range(6, 21):
            parts = dict.fromkeys(PARTS, 0.1) | {"forward": 0.4 * (rank + 1), "checkpoint": 0.0}
            run.step(step, rank, 1.0 if step % 2 else 2.0, loss=10.0 - step / 4, **parts)
    for step in (10, 20):
        sets = {"code": {"loss": 1.25, "bits_per_byte": None}}
        run.write("eval", step=step, heldout_loss=20.0 / step, heldout_bits_per_byte=2.5, sets=sets)
    run.write("checkpoint", step=20, path="p", bytes=3 * 2**30, seconds=0.5, written_s=4.0)
    for rank in (0, 1):
        run.write("warning", rank, step=7, message="slow disk")
    run.write("sample", step=20, prompt="def ", text="main(argv):\n    [return]")
    run.result(status="stopped", exit_code=6, peak_memory_bytes=3 * 2**30, weights_sha256="ab12")


def test_the_whole_report(fake_run: Any, recorded: Recorded) -> None:
    """Each figure follows from those of the run."""
    a_long_run(fake_run)
    predicted = LocalPrediction({"forward": 0.5, "backward": 0.75}, {"parameters": 2.0**31})
    report = replace(
        collect(fake_run.dir.root),
        path="runs/tiny",
        elapsed_s=90.0,
        predicted=predicted,
        time_s=WallTime(productive=90.0, checkpoint=6.0, idle=24.0),
        goodput=0.75,
    )
    recorded.screen("report.txt", text_of(render_report(report)) + "\n")
    recorded.screen("summary.txt", text_of(render_summary(report)) + "\n")


def test_a_run_of_one_rank_without_a_prediction(fake_run: Any) -> None:
    fake_run.about()
    fake_run.write("start", step=0, world_size=1, **BEGIN)
    for step in range(1, 11):
        fake_run.step(step)
    lines = text_of(render_report(collect(fake_run.dir.root))).splitlines()
    (at,) = (number for number, line in enumerate(lines) if "part of a step" in line)
    assert [line.split() for line in lines[at : at + 2]] == [
        ["part", "of", "a", "step", "time", "share"],
        ["data", "wait", "143", "ms", "14.3%", "███"],
    ]
    assert "1.5M parameters" in "\n".join(lines) and "1 x a chip" in "\n".join(lines)
    assert not any("resumed" in line or "kernels" in line or "weights" in line for line in lines)


def test_many_ranks_that_warn_are_cut_short(fake_run: Any, recorded: Recorded) -> None:
    fake_run.about()
    fake_run.start()
    for rank in range(10):
        fake_run.write("warning", rank, step=1, message="odd")
    recorded(line_with(text_of(render_report(collect(fake_run.dir.root))), "odd"))
