"""The report of the ranks' speeds: written whole, read strictly, and found when it is new."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.verdict import MeasuredLink
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.looks import SpeedsReport, SpeedsWatch, read_speeds, write_speeds
from trainspec_cli.run.folder.paths import RunDir

REPORT = SpeedsReport(
    step=12,
    step_s=6.5,
    layout=Layout(pp=2, stage_layers=(3, 1)),
    micro_batches=2,
    samples=(8, 8),
    fixed_s=(0.25, 0.5),
    per_sample_s=(0.5, 0.75),
    links=(MeasuredLink(axis="pp", ranks=(0, 1), bytes_per_s=1.5e9, noise=0.05, sent_bytes=4096.0),),
)
LINK = {"axis": "pp", "ranks": [0, 1], "bytes_per_s": 1.5e9, "noise": 0.05, "sent_bytes": 4096.0}


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    write_speeds(RunDir(tmp_path), REPORT)
    assert read_speeds(RunDir(tmp_path)) == REPORT


def test_what_ranks_compute() -> None:
    uneven = SpeedsReport(**{**vars(REPORT), "layout": Layout(dp_shard=2), "samples": (12, 4)})
    assert uneven.compute_s == (6.5, 4.0)
    assert uneven.even_s == REPORT.compute_s == (4.5, 7.0)


def test_a_watch_finds_each_report_once_and_none_of_an_earlier_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_speeds(run, REPORT)
    watch = SpeedsWatch(run)
    assert watch.poll() is None
    write_speeds(run, REPORT)
    assert watch.poll() == REPORT
    assert watch.poll() is None
    fresh = SpeedsWatch(RunDir(tmp_path / "new"))
    assert fresh.poll() is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec_version": "9.1"}, "was made by a newer trainspec: it is of version 9.1 of the training spec"),
        ({"samples": [8]}, "has other numbers of figures than the layout's ranks, 2"),
        ({"links": [{**LINK, "ranks": [0, 2]}]}, "has a link without a speed, or of ranks beyond the layout's, 2"),
        ({"links": [{**LINK, "ranks": []}]}, "has a link without a speed, or of ranks beyond the layout's, 2"),
        ({"links": [{**LINK, "bytes_per_s": 0}]}, "has a link without a speed, or of ranks beyond the layout's, 2"),
        ({"step": "many"}, "is no report of speeds: `step` is "),
        ({"layout": {"pp": "two"}}, "is no report of speeds: `layout` does not fit: "),
    ],
)
def test_a_report_that_cannot_be_used_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    run = RunDir(tmp_path)
    write_speeds(run, REPORT)
    write_json(run.speeds_json, {**read_json(run.speeds_json), **changes})
    with pytest.raises(UnreadableFileError, match=says.replace("(", r"\(")):
        read_speeds(run)
