"""The proposal of a layout: written whole and read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.run.folder.files import FileWatch, read_json, write_json
from trainspec_cli.run.folder.looks import ProposalRecord, read_proposal, write_proposal
from trainspec_cli.run.folder.paths import RunDir

PROPOSAL = LayoutProposal(Layout(dp_shard=2), 4, 2, 8, None, 2.0, 1.5, "rank 1 is slow")
RECORD = ProposalRecord(number=3, before=Layout(pp=2, stage_layers=(3, 1)), **vars(PROPOSAL))


def test_it_reads_what_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_proposal(run) is None
    write_proposal(run, RECORD)
    found = read_proposal(run)
    assert found == RECORD
    assert found is not None and found.proposal == PROPOSAL


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec_version": "9.1"}, "was made by a newer trainspec: it is of version 9.1 of the training spec"),
        ({"number": -1}, "is no proposal of a layout: `number` is "),
        ({"before": None}, "is no proposal of a layout: `before` "),
    ],
)
def test_one_that_cannot_be_used_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    run = RunDir(tmp_path)
    write_proposal(run, RECORD)
    write_json(run.proposal_json, {**read_json(run.proposal_json), **changes})
    with pytest.raises(UnreadableFileError, match=says):
        read_proposal(run)


def test_a_file_watch_tells_of_each_new_file_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    watch = FileWatch(path)
    assert not watch.has_changed()
    for content in (1, 2, 2):
        write_json(path, content)
        assert watch.has_changed()
        assert not watch.has_changed()
    assert not FileWatch(path).has_changed()
