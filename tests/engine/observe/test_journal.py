"""The events of a run, as every tracker has them."""

import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import psutil
import pytest
from lab.problems import raises

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.observe.journal import (
    TRACKERS,
    DirectiveLog,
    Journal,
    TensorBoardLog,
    scalars_of,
)
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import (
    DirectiveEvent,
    EvalEvent,
    SampleEvent,
    SetFigures,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.recipe.load import load

STEP = StepEvent(step=1, loss=2.5, grad_norm=1.0, lr=0.1, tokens=100, step_time_s=0.5, time_s={}, skipped=False)
SETS = {"web": SetFigures(loss=1.5, bits_per_byte=None)}
EVAL = EvalEvent(step=1, heldout_loss=2.0, heldout_bits_per_byte=None, sets=SETS)


@cache
def tiny():
    return load(["recipe=tiny"]).spec


def spec_with(**tracking):
    spec = tiny()
    return replace(spec, tracking=replace(spec.tracking, **tracking))


@pytest.fixture
def journal(tmp_path):
    def make(**tracking) -> Journal:
        return Journal(RunDir(tmp_path / "run"), 0, spec_with(**tracking))

    return make


def test_numbers_have_the_same_names_everywhere():
    assert scalars_of(STEP) == {
        "step/loss": 2.5,
        "step/grad_norm": 1.0,
        "step/lr": 0.1,
        "step/step_time_s": 0.5,
        "step/tokens_per_s": 200.0,
    }
    assert scalars_of(EVAL) == {"eval/heldout_loss": 2.0, "eval/web/loss": 1.5}


def fill(journal) -> None:
    journal.write(STEP)
    journal.write(EVAL)
    journal.write(SampleEvent(step=1, prompt="a", text="b"))
    journal.close()


def test_events_alone_need_no_tracker(journal, tmp_path):
    fill(journal())
    events = list(read_events(RunDir(tmp_path / "run").events(0)))
    assert [event["type"] for event in events] == ["step", "eval", "sample"]
    assert events[1]["sets"] == {"web": {"loss": 1.5, "bits_per_byte": None}}


def test_mlflow_keeps_the_numbers_in_the_run_folder(journal, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    fill(journal(mlflow=True))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("trainspec").experiment_id])
    assert run.data.metrics["step/loss"] == 2.5 and run.data.metrics["eval/web/loss"] == 1.5
    assert len(run.data.tags["recipe_digest"]) == 64


def test_wandb_is_offline_in_the_run_folder(journal, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fill(journal(wandb=True))
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


class Memo:
    """A tracker that notes what it is given."""

    def __init__(self):
        self.recorded, self.is_closed = [], False

    def record(self, event):
        self.recorded.append(event)

    def close(self):
        self.is_closed = True


@pytest.fixture
def memos(monkeypatch):
    memos = {name: Memo() for name in TRACKERS}
    monkeypatch.setattr(
        "trainspec_cli.engine.observe.journal.TRACKERS", {name: lambda *_, m=memo: m for name, memo in memos.items()}
    )
    return memos


def test_the_trackers_that_are_asked_for_get_every_event_of_rank_0(journal, memos, tmp_path):
    fill(journal(tensorboard=True, mlflow=False, wandb=True))
    assert memos["tensorboard"].recorded == memos["wandb"].recorded
    assert memos["wandb"].recorded[:2] == [STEP, EVAL] and memos["wandb"].is_closed
    assert memos["mlflow"].recorded == []
    other = Journal(RunDir(tmp_path / "run"), 1, spec_with(wandb=True))
    other.write(STEP)
    assert len(memos["wandb"].recorded) == 3
    assert other.events_of(7) == RunDir(tmp_path / "run").events(7)


def test_a_journal_of_an_older_start_is_closed_to_it(journal, tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    monkeypatch.setenv(GENERATION, str(generations.begin(run_dir)))
    generations.begin(run_dir)
    with raises(WorkerError, generations.FENCED, "start 2 owns"):
        journal().write(STEP)
    assert list(read_events(run_dir.events(0))) == []


START = StartEvent(
    step=0, world_size=2, params=1, flops_per_token=1.0, device_name="a chip", peak_flops=1e9, peak_source="measured"
)


def steps_of(path):
    return [(event["type"], event["step"]) for event in read_events(path)]


def test_a_replica_group_writes_the_runs_log_while_it_leads(journal, tmp_path):
    run_dir, spec = RunDir(tmp_path / "run"), spec_with()
    group = Journal(run_dir, 0, spec, group=1)
    group.write(START)
    group.write(replace(STEP, step=1))
    assert steps_of(run_dir.events(0)) == []
    for step, leads in ((2, True), (3, True), (4, False), (5, True)):
        group.lead(leads, step - 1)
        group.write(replace(STEP, step=step))
    group.close()
    assert steps_of(run_dir.group_events(1, 0)) == [("start", 0), *(("step", step) for step in range(1, 6))]
    assert steps_of(run_dir.events(0)) == [("start", 1), ("step", 2), ("step", 3), ("start", 4), ("step", 5)]
    assert group.events_of(3) == run_dir.group_events(1, 3)


def test_other_ranks_of_the_leading_group_write_their_own_events_alone(journal, tmp_path):
    run_dir, spec = RunDir(tmp_path / "run"), spec_with()
    group = Journal(run_dir, 1, spec, group=0)
    group.lead(True, 0)
    group.write(STEP)
    group.close()
    assert steps_of(run_dir.events(0)) == []
    assert steps_of(run_dir.group_events(0, 1)) == [("step", 1)]


def test_tensorboard_gets_the_numbers_and_the_text(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *scalar):
            written.append(scalar)

        add_text = add_scalar

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log = TensorBoardLog(tmp_path)
    for event in (START, EVAL, SampleEvent(step=3, prompt="a", text="b")):
        log.record(event)
    log.close()
    scalars = [("eval/heldout_loss", 2.0, 1), ("eval/web/loss", 1.5, 1)]
    assert written == [str(tmp_path), *scalars, ("sample", "**a**b", 3), "closed"]


def test_pictures_are_counted_in_samples_a_second():
    pictures = StepEvent(step=1, loss=None, grad_norm=1.0, lr=0.1, samples=8, step_time_s=0.5, time_s={}, skipped=False)
    found = scalars_of(pictures)
    assert found["step/samples_per_s"] == 16.0
    assert "step/loss" not in found and "step/tokens_per_s" not in found
    assert scalars_of(START) == {}


class Calls:
    """Notes every call of a library's object, and answers with what `answers` has for it."""

    def __init__(self, **answers):
        self.noted, self._answers = [], answers

    def __getattr__(self, name):
        def call(*given, **named):
            self.noted.append((name, given, named))
            return self._answers.get(name)

        return call


SAMPLE = SampleEvent(step=3, prompt="a", text="b")


@pytest.mark.parametrize(("asked", "mode"), [(None, "offline"), ("online", "online")])
def test_wandb_goes_on_with_the_run_of_its_folder(tmp_path, monkeypatch, asked, mode):
    run = Calls()
    library = Calls(init=run)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if asked:
        monkeypatch.setenv("WANDB_MODE", asked)
    log = TRACKERS["wandb"](RunDir(tmp_path / "runs" / "mine"), spec_with(project="p"))
    ((_, _, given),) = library.noted
    assert {name: given[name] for name in ("project", "dir", "id", "resume", "mode")} == {
        "project": "p",
        "dir": str(tmp_path / "runs" / "mine"),
        "id": "mine",
        "resume": "allow",
        "mode": mode,
    }
    assert given["config"]["tracking"]["project"] == "p"
    for event in (START, replace(STEP, step=2), EVAL, SAMPLE):
        log.record(event)
    log.close()
    assert run.noted == [
        ("log", (scalars_of(STEP),), {"step": 2}),
        ("log", (scalars_of(EVAL),), {"step": 1}),
        ("log", ({"sample": "ab"},), {"step": 3}),
        ("finish", (), {}),
    ]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("server", [None, "http://there"])
def test_mlflow_has_one_experiment_a_project_and_a_run_each(tmp_path, monkeypatch, known, server):
    created = SimpleNamespace(info=SimpleNamespace(run_id="run 5"))
    experiment = SimpleNamespace(experiment_id="7") if known else None
    client = Calls(get_experiment_by_name=experiment, create_experiment="8", create_run=created)
    places = []
    monkeypatch.setitem(
        sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda place: places.append(place) or client)
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    log = TRACKERS["mlflow"](RunDir(tmp_path / "mine"), spec_with(project="p"))
    assert places == [server or f"sqlite:///{tmp_path}/mine/mlflow.db"]
    calls = {name: given for name, given, _ in client.noted}
    assert calls["get_experiment_by_name"] == ("p",)
    assert calls.get("create_experiment") == (
        None if known else ("p", None if server else (tmp_path / "mine/mlflow").as_uri())
    )
    assert ("create_run", ("7" if known else "8",), {"run_name": "mine"}) in client.noted
    assert calls["set_tag"][:2] == ("run 5", "recipe_digest") and len(calls["set_tag"][2]) == 64
    client.noted.clear()
    for event in (START, replace(STEP, step=2), SAMPLE):
        log.record(event)
    log.close()
    metrics = [("log_metric", ("run 5", name, value), {"step": 2}) for name, value in scalars_of(STEP).items()]
    assert client.noted == [*metrics, ("set_terminated", ("run 5",), {})]


def test_tensorboard_lies_in_the_runs_folder_and_gets_each_steps_numbers(tmp_path, monkeypatch):
    writer = Calls()
    folders = []
    board = SimpleNamespace(SummaryWriter=lambda folder: folders.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    log = TRACKERS["tensorboard"](RunDir(tmp_path), spec_with())
    log.record(replace(STEP, step=4))
    assert folders == [str(tmp_path / "tensorboard")]
    assert [given for _, given, _ in writer.noted] == [(name, value, 4) for name, value in scalars_of(STEP).items()]


def test_a_closed_journal_keeps_no_file_open_and_no_log_of_its_group(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    group = Journal(run_dir, 0, spec_with(), group=0)
    group.lead(True, 0)
    group.write(STEP)
    group.close()
    assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


def test_a_decision_stands_in_its_own_file_before_the_run_tells_of_it(tmp_path):
    run_dir, seen = RunDir(tmp_path), []

    class Telling:
        def write(self, event):
            seen.append((event, [line["number"] for line in read_events(run_dir.directives)]))

    log = DirectiveLog(run_dir, Telling())
    log.close()
    assert not run_dir.directives.exists(), "a run without decisions has no file of them"
    figures = {"applied": True, "counts": (1,), "reason": "", "before_s": 2.0, "expected_s": 1.0}
    for number in (1, 2):
        log.write(DirectiveEvent(step=number, number=number, **figures))
    log.close()
    assert [numbers for _, numbers in seen] == [[1], [1, 2]]
