from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from lab.events import ACHIEVED, DIRECTIVE, LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY, write_event

from trainspec_cli.recipe.keys.kernels import KernelFigure, KernelTable
from trainspec_cli.recipe.records import ABSENT, to_plain
from trainspec_cli.reporter.collect import _events_of_ranks, collect
from trainspec_cli.run.folder.event_types.events import PARTS, BucketsEvent, StepEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json

STEP = StepEvent(
    step=1,
    loss=2.0,
    grad_norm=0.5,
    tokens=100,
    step_time_s=1.0,
    time_s=dict.fromkeys(PARTS, 1.0 / len(PARTS)),
    skipped=False,
)


def trained(run: Any, ranks: int = 2, steps: int = 10) -> None:
    for rank in range(ranks):
        run.start(rank=rank)
        for step in range(1, steps + 1):
            run.step(step, rank, seconds=30.0 if step == 1 else 1.0 + rank)


def test_speed_leaves_out_the_steps_that_compile(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None
    assert speed.left_out_steps == (1, 2, 3)
    assert (speed.first_step, speed.last_step) == (4, 10)
    assert speed.tokens_per_s == pytest.approx(100.0)
    assert speed.mfu == pytest.approx(100.0 * 1e6 / (2 * 1e9))
    assert speed.peak_source == "best matmul measured"


def test_the_parts_sum_to_the_step_and_show_the_ranks_apart(fake_run: Any) -> None:
    trained(fake_run)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None
    assert [part.name for part in speed.parts] == list(PARTS)
    assert speed.step_time_s == pytest.approx(1.5)
    assert sum(part.mean_s for part in speed.parts) == pytest.approx(speed.step_time_s)
    assert sum(part.share for part in speed.parts) == pytest.approx(1.0)
    assert (speed.parts[0].min_s, speed.parts[0].max_s) == pytest.approx((1 / len(PARTS), 2 / len(PARTS)))


def test_steps_that_wrote_a_checkpoint_are_not_usual(fake_run: Any) -> None:
    fake_run.start()
    for step in range(1, 13):
        writes = step >= 8
        fake_run.step(step, seconds=9.0 if writes else 1.0, checkpoint=8.0 if writes else 0.0)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None
    assert speed.usual_s == (1.0, 1.0)


def test_a_rank_that_left_nothing_is_named_and_the_others_count(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    report = collect(fake_run.dir.root)
    assert report.missing_ranks == (1,)
    assert report.speed is not None
    assert report.speed.ranks == (0,)


def test_half_a_line_at_the_end_is_passed_over(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    with fake_run.dir.events(0).open("ab") as file:
        file.write(b'{"type": "step", "step": 11, "lo')
    assert collect(fake_run.dir.root).steps == 10


def test_what_a_resume_makes_again_counts_once(fake_run: Any) -> None:
    fake_run.start()
    for step in range(1, 9):
        fake_run.step(step, loss=1.0)
    for step in (5, 8):
        fake_run.write("checkpoint", step=step, path="p", bytes=1, seconds=0.1)
    fake_run.start(step=5)
    for step in (6, 7):
        fake_run.step(step, loss=9.0)
    report = collect(fake_run.dir.root)
    assert report.loss == (*((step, 1.0) for step in range(1, 6)), (6, 9.0), (7, 9.0))
    assert (report.steps, report.final_loss, report.start_steps) == (7, 9.0, (0, 5))
    assert [event.step for event in report.checkpoints] == [5]


def test_the_speed_is_that_of_the_newest_start(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    fake_run.start(step=10)
    for step in range(11, 19):
        fake_run.step(step, seconds=4.0)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None
    assert (speed.first_step, speed.last_step, speed.step_time_s) == (14, 18, pytest.approx(4.0))


def test_a_start_that_made_no_step_leaves_the_speed_of_the_one_before(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    fake_run.start(step=10)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None
    assert speed.last_step == 10


def test_a_loss_that_is_not_finite_is_null_in_strict_json(fake_run: Any) -> None:
    fake_run.start()
    fake_run.step(1, loss=math.nan, skipped=True)
    report = collect(fake_run.dir.root)
    assert (report.loss, report.final_loss, report.skipped_steps) == (((1, None),), None, (1,))
    json.dumps(to_plain(report), allow_nan=False)


def test_evaluations_samples_and_warnings(fake_run: Any) -> None:
    trained(fake_run)
    for step in (5, 10):
        fake_run.write("eval", step=step, heldout_loss=1.0, heldout_bits_per_byte=2.0, xz_bits_per_byte=3.0)
        fake_run.write("sample", step=step, prompt="def ", text=f"main{step}")
    fake_run.write("warning", rank=1, step=3, message="odd")
    report = collect(fake_run.dir.root)
    assert [event.step for event in report.evaluations] == [5, 10]
    assert report.sample is not None
    assert report.sample.text == "main10"
    assert [(event.rank, event.message) for event in report.warnings] == [(1, "odd")]


def test_directives_are_those_of_the_runs_own_file(fake_run: Any) -> None:
    """Each replica group writes there; the log has those of the leading one alone."""
    trained(fake_run)
    write_event(fake_run.dir.directives, DIRECTIVE)
    write_event(fake_run.dir.directives, replace(DIRECTIVE, group=1))
    write_event(fake_run.dir.directives, ACHIEVED)
    write_event(fake_run.dir.directives, MEMORY)
    write_event(fake_run.dir.directives, BucketsEvent(step=4, layout="dp_shard=2", bucket_bytes=8, tries=()))
    write_event(fake_run.dir.directives, LEFT_OUT)
    write_event(fake_run.dir.directives, LEFT_OUT_ACHIEVED)
    write_event(fake_run.dir.events(0), DIRECTIVE)
    write_event(fake_run.dir.events(0), MEMORY)
    report = collect(fake_run.dir.root)
    assert [event.group for event in report.directives] == [ABSENT, 1]
    assert [event.achieved_s for event in report.achieved] == [1.6]
    plain = to_plain(report)
    assert plain["directives"][0]["counts"] == [9, 5]
    assert plain["achieved"][0]["number"] == 1
    assert [one["taken"]["micro_batch_size"] for one in plain["memory"]] == [4]
    assert [one["bucket_bytes"] for one in plain["buckets"]] == [8]
    assert [one["node"] for one in plain["left_out"]] == [3]
    assert [one["achieved_s"] for one in plain["left_out_achieved"]] == [1.4]
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize(
    ("result", "running", "status"), [(None, True, "running"), (None, False, "made"), ("stopped", False, "stopped")]
)
def test_the_status_of_a_run(fake_run: Any, result: str | None, running: bool, status: str) -> None:
    fake_run.about()
    if result:
        fake_run.result(status=result, exit_code=6)
    report = collect(fake_run.dir.root, running=running)
    assert (report.status, report.recipe, report.max_steps) == (status, "tiny", 20)


def test_a_run_without_a_single_event_is_reported_too(fake_run: Any) -> None:
    fake_run.about()
    report = collect(fake_run.dir.root)
    assert (report.steps, report.speed, report.loss, report.missing_ranks) == (0, None, (), ())


def test_only_steps_that_were_left_out_are_skipped(fake_run: Any) -> None:
    fake_run.start()
    for step in range(1, 6):
        fake_run.step(step, skipped=step in (2, 4), loss=float(step))
    report = collect(fake_run.dir.root)
    assert report.skipped_steps == (2, 4)
    assert report.grad_norm == tuple((step, 0.5) for step in range(1, 6))


def test_events_before_a_start_that_was_lost_count(fake_run: Any) -> None:
    fake_run.step(3, loss=1.5)
    fake_run.write("checkpoint", step=3, path="p", bytes=1, seconds=0.1)
    report = collect(fake_run.dir.root)
    assert (report.steps, report.final_loss, report.speed, report.start_steps) == (3, 1.5, None, ())
    assert [event.step for event in report.checkpoints] == [3]


def test_a_run_that_started_and_made_no_step_stands_at_its_start(fake_run: Any) -> None:
    fake_run.start(step=7)
    report = collect(fake_run.dir.root)
    assert (report.steps, report.world_size, report.device_name, report.params) == (7, 2, "a chip", 1_500_000)


def test_eight_in_ten_steps_lie_between_the_usual_times(fake_run: Any) -> None:
    """The third and the nineteenth of the 20 steps after the first three, which take 1 to 20 s."""
    fake_run.start()
    for step in range(1, 24):
        fake_run.step(step, seconds=float(max(1, step - 3)), checkpoint=0.0)
    speed = collect(fake_run.dir.root).speed
    assert speed is not None and speed.usual_s == (3.0, 19.0)


def test_what_the_run_has_left_beside_its_events(fake_run: Any) -> None:
    trained(fake_run)
    fake_run.about()
    fake_run.result(peak_memory_bytes=7, weights_sha256="ab")
    prediction = {"time_s": {"forward": 0.5}, "memory": {"parameters": 8.0}, "beside": {"context": 1.0}}
    spec = {"train": {"max_steps": 20}}
    write_json(fake_run.dir.plan_json, {"spec": spec, "prediction": prediction, "kernels": {"rope": "halves"}})
    report = collect(fake_run.dir.root)
    assert (report.peak_memory_bytes, report.weights_sha256, report.exit_code, report.max_steps) == (7, "ab", 0, 20)
    assert report.predicted is not None
    assert (report.predicted.step_time_s, report.predicted.peak_memory_bytes, report.predicted.needed_bytes) == (
        0.5,
        8.0,
        9.0,
    )
    assert (report.kernels.rope, report.kernel_table, report.elapsed_s >= 0) == ("halves", None, True)


def test_ranks_are_in_order_and_other_files_are_none(fake_run: Any) -> None:
    for rank in (10, 2, 1):
        fake_run.start(rank=rank)
    (fake_run.dir.events_folder / "rank00003.jsonl.old").touch()
    (fake_run.dir.events_folder / "rank.jsonl").touch()
    assert list(_events_of_ranks(fake_run.dir, 1, 0)) == [1, 2, 10]


def test_ranks_of_replica_groups_are_found_in_the_folders_of_their_groups(fake_run: Any) -> None:
    """Two groups of one rank each; the first one writes the run's own file, too."""
    trained(fake_run, ranks=1)
    write_json(fake_run.dir.plan_json, {"spec": {"train": {"max_steps": 20}}, "replica_groups": 2})
    own = fake_run.dir.events(0).read_text()
    assert collect(fake_run.dir.root).missing_ranks == (1,)
    for group in range(2):
        path = fake_run.dir.group_events(group, 0)
        path.parent.mkdir()
        path.write_text(own)
    report = collect(fake_run.dir.root)
    assert report.missing_ranks == () and report.speed is not None and report.speed.ranks == (0, 1)


def test_kernels_that_were_measured_are_told(fake_run: Any) -> None:
    trained(fake_run, ranks=1)
    assert collect(fake_run.dir.root).kernel_table is None
    table = KernelTable("a chip", "bf16", "2.13", figures={"rope": {"halves": KernelFigure("chosen", ratio=0.5)}})
    write_json(fake_run.dir.kernels_json, to_plain(table))
    assert collect(fake_run.dir.root).kernel_table == table


@pytest.mark.slow
def test_a_long_run_is_held_as_numbers_and_not_as_events(fake_run) -> None:
    """An event takes a kilobyte: two hundred bytes of each step of the first rank are kept, and none of the others."""
    fake_run.about()
    peaks = []
    for first, last in ((1, 500), (501, 3000)):
        for rank in range(2):
            if first == 1:
                fake_run.start(rank=rank)
            writer = EventWriter(fake_run.dir.events(rank), rank)
            for step in range(first, last + 1):
                writer.write(replace(STEP, step=step))
            writer.close()
        tracemalloc.start()
        report = collect(fake_run.dir.root)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(report.loss) == last
    steps = 2 * (3000 - 500)
    assert (peaks[1] - peaks[0]) / steps < 300
