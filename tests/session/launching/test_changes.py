"""A run that resumes with more steps, another rate or other data reports the change and makes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from lab.problems import in_order

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan, read_run_record
from trainspec_cli.session.launching import session as session_module
from trainspec_cli.session.launching.changes import count_more_steps, describe_changes
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.session.launching.resume import prepare_resume
from trainspec_cli.session.launching.session import write_down
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import load

MakeRun = Callable[..., RunDir]
WORDS = ["bridge", "river", "north", "letter", "answer", "window", "garden", "summer"]


@pytest.mark.parametrize(("change", "meant"), [("=+1000", "=1020"), ("=+1_000", "=1020"), ("=30", "=30"), ("=+", "=+")])
def test_steps_may_be_given_as_so_many_more(change: str, meant: str) -> None:
    spec = load(["recipe=tiny"]).spec
    assert count_more_steps(spec, ["optim.lr=1", f"train.max_steps{change}"]) == [
        "optim.lr=1",
        f"train.max_steps{meant}",
    ]


def test_each_changed_value_is_said_with_what_follows_for_the_rate() -> None:
    cosine = ["optim.schedule.kind=cosine", "optim.schedule.warmup_steps=0", "optim.schedule.final_lr_ratio=0.1"]
    before = load(["recipe=tiny", *cosine, "optim.lr=0.01"]).spec
    longer = replace(before, train=replace(before.train, max_steps=39))
    steps, rate = describe_changes(before, longer, 20, 160)
    assert in_order(steps, "train.max_steps", " 39", " 20")
    # 20 of 38 steps are half a cosine and a little more, where 19 of 19 are all of it.
    assert in_order(rate, "learning rate", " 0.00513", " 0.001")
    assert list(describe_changes(before, longer, 0, 0)) == [steps]
    assert list(describe_changes(before, before, 20, 160)) == []
    faster = replace(before, optim=replace(before.optim, lr=0.02))
    (change,) = describe_changes(before, faster, 0, 0)
    assert in_order(change, "optim.lr", " 0.02", " 0.01")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two files of documents that do not share a word's order."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    paths = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for shift, path in enumerate(paths, 1):
        rows = [" ".join(WORDS[(row * shift + word) % 8] for word in range(60)) for row in range(80)]
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return paths


@pytest.fixture
def run_on(make_run: MakeRun, console: RunConsole, texts: tuple[Path, Path]) -> RunDir:
    """A run on the old file, with its tokens and its tokenizer."""
    data = ["data.source=jsonl", f"data.path={texts[0]}", "data.heldout_fraction=0.1", "data.max_bytes=null"]
    run = make_run(*data, "data.tokenizer.vocab_size=300")
    folder = prepare_data(load(["recipe=tiny", *data, "data.tokenizer.vocab_size=300"]), console)
    write_json(run.run_json, {**read_json(run.run_json), "data_dir": str(folder)})
    return run


def test_other_data_is_prepared_in_the_tokens_that_the_model_knows(
    run_on: RunDir, texts: tuple[Path, Path], console: RunConsole, shown: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next start reads them: run.json, plan.json and the lines on the terminal say so."""
    monkeypatch.setattr(session_module, "predict", lambda plan, *_, **__: plan)
    monkeypatch.setattr(session_module, "parts_of", lambda _: [])
    old = Path(str(read_run_record(run_on).data_dir))
    session = prepare_resume(run_on, [f"data.path={texts[1]}"], NodeOptions(), console)
    assert read_run_record(run_on).data_dir == str(old), "nothing is written before the start"
    write_down(session)
    new = Path(str(read_run_record(run_on).data_dir))
    assert new != old
    tokens = [Collection.open(folder).main.manifest for folder in (old, new)]
    assert tokens[0].tokenizer_sha256 == tokens[1].tokenizer_sha256
    assert read_plan(run_on).spec.data.path == str(texts[1])
    said = shown.getvalue()
    assert f"data.path is {texts[1]}, and was {texts[0]}\n" in said
    assert " sample 80 " in said
    again = prepare_resume(run_on, [], NodeOptions(), console)
    assert (again.data_folder, again.plan.spec.data) == (None, session.plan.spec.data)


def test_tokens_of_another_tokenizer_are_refused(run_on: RunDir, texts: tuple[Path, Path], console: RunConsole) -> None:
    others = load(["recipe=tiny", "data.source=jsonl", f"data.path={texts[1]}", "data.tokenizer.vocab_size=280"])
    folder = prepare_data(others, console)
    with pytest.raises(RecipeError, match="different tokenizers"):
        prepare_resume(run_on, ["data.source=tokens", f"data.path={folder}"], NodeOptions(), console)


def test_what_is_wrong_with_other_data_is_said(run_on: RunDir, console: RunConsole, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file") as refused:
        prepare_resume(run_on, [f"data.path={tmp_path}/nothing.jsonl"], NodeOptions(), console)
    assert refused.value.problems[0].where() == "command line:1"
