"""The events of a run, as every tracker has them."""

import pytest

from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.observe.trackers import scalars_of
from trainspec_cli.rundir.event_types import EvalEvent, SampleEvent, SetFigures, StepEvent
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir

STEP = StepEvent(step=1, loss=2.5, grad_norm=1.0, lr=0.1, tokens=100, step_time_s=0.5, time_s={}, skipped=False)
SETS = {"web": SetFigures(loss=1.5, bits_per_byte=None)}
EVAL = EvalEvent(step=1, heldout_loss=2.0, heldout_bits_per_byte=None, sets=SETS)


@pytest.fixture
def journal(tmp_path):
    from dataclasses import replace

    from trainspec_cli.session.load import load

    def make(**tracking) -> Journal:
        spec = load(["recipe=tiny"]).spec
        return Journal(RunDir(tmp_path / "run"), 0, replace(spec, tracking=replace(spec.tracking, **tracking)))

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
