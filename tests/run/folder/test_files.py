import json
import math
import os

import pytest

from trainspec_cli.run.folder.files import read_json, write_json, write_text
from trainspec_cli.run.folder.paths import RunDir


@pytest.mark.clause("RUN-3")
def test_json_is_read_back_and_nothing_is_left_beside_it(tmp_path):
    write_json(tmp_path / "a" / "x.json", {"é": [1, None]})
    assert read_json(tmp_path / "a" / "x.json") == {"é": [1, None]}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "x", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "x", "new \ud800")
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_only_whole_checkpoints_are_listed(tmp_path):
    run_dir = RunDir(tmp_path)
    assert run_dir.checkpoint_steps() == []
    for name in ("step_00000020", "step_00000003", ".step_00000030.partial", "notes"):
        (run_dir.checkpoints / name).mkdir(parents=True)
    assert run_dir.checkpoint_steps() == [3, 20]
    assert run_dir.checkpoint(20).name == "step_00000020"


@pytest.mark.clause("RUN-5")
def test_json_holds_nothing_that_another_parser_refuses(tmp_path):
    write_json(tmp_path / "x.json", {"final_loss": math.nan, "name": "a\udcff"})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "final_loss": None,
        "name": "a\udcff",
    }


@pytest.mark.clause("RUN-3")
def test_nothing_is_written_through_links_at_names_that_could_be_guessed(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("words")
    (tmp_path / f".x.{os.getpid()}.partial").symlink_to(victim)
    (tmp_path / "x").symlink_to(victim)
    write_text(tmp_path / "x", "new")
    assert (victim.read_text(), (tmp_path / "x").read_text()) == ("words", "new")


@pytest.mark.clause("RUN-3")
def test_the_content_is_on_disk_before_the_name_is(tmp_path, disk_calls):
    write_text(tmp_path / "x", "new")
    (kind, partial), renamed = disk_calls
    assert kind == "fsync" and partial.startswith(".x.") and partial.endswith(".partial")
    assert renamed == ("rename", "x")


def test_all_of_the_content_is_there_when_it_is_flushed(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write_text(tmp_path / "x", "é" * 100)
    write_json(tmp_path / "y", {})
    assert sizes == [200, 3]
    assert (tmp_path / "y").read_text() == "{}\n"
