"""The planner is called with the run folder and the cache of this machine."""

from __future__ import annotations

import pytest
from planner.test_this_machine import GPU_SPEC, H100S, RAW, as_told, made
from planner.test_this_machine import MACHINE as CPU
from reporter.diagnosis.conftest import Folder

from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.diagnosis.conclude import Outlook
from trainspec_cli.reporter.diagnosis.gather import read_run
from trainspec_cli.run.folder.event_types.events import DirectiveEvent, StartEvent
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.tools import probe_path
from trainspec_cli.session.planning.outlook import outlook_of
from trainspec_cli.session.runs.diagnose import verdicts_of


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainspec_cli.session.planning.outlook.detect", lambda **_: CPU)

    def make(planned: Plan, device_name: str = "CPU") -> Folder:
        folder = Folder(tmp_path / "run")
        folder.ranks = planned.world_size
        write_json(folder.run.plan_json, to_plain(planned))
        about = {"world_size": 2, "params": 1, "peak_flops": 1.0, "peak_source": "", "flops_per_token": 1.0}
        folder.write(0, StartEvent(step=0, device_name=device_name, **about))
        return folder

    return make


def look(folder: Folder) -> Outlook:
    return outlook_of(folder.run, read_run(folder.run))


def keep_probe(planned: Plan) -> None:
    path = probe_path(planned, CPU)
    path.parent.mkdir(parents=True)
    write_json(path, to_plain(as_told(RAW)))


def test_the_probe_of_this_machine_is_taken_from_the_cache(run_of):
    folder = run_of(made())
    assert "no probe of" in look(folder).basis
    keep_probe(made())
    assert look(folder).is_known


def test_gpus_are_those_that_the_workers_found(run_of):
    planned = plan(GPU_SPEC, H100S)
    assert "8 x H100-SXM-80GB" in look(run_of(planned, H100S.gpu_names[0])).basis
    assert "like Abacus-9000" in look(run_of(planned, "Abacus-9000")).basis


def test_the_layout_in_force_counts(run_of):
    keep_probe(made())
    folder = run_of(made())
    before = look(folder)
    folder.write(
        0,
        DirectiveEvent(
            step=3, number=1, before_s=0.0, expected_s=0.0, kind="layout", applied=True, counts=(), reason="",
            layout=Layout(tp=2), micro_batch_size=8, micro_batches=1,
        ),
    )  # fmt: skip
    assert before.is_known
    assert "cannot predict this" in look(folder).basis


def test_a_plan_of_another_version_leaves_the_measured_parts(run_of):
    folder = run_of(made())
    write_json(folder.run.plan_json, {"num_nodes": 1, "devices_per_node": 2, "layout": {}, "spec": {"new": 1}})
    folder.steps(1, 40)
    (verdict,) = verdicts_of(folder.run, asks_planner=True)
    assert "relies on measurements" in verdict.evidence[1]
    assert verdict.what_if[0].change.startswith("twice ")


def test_what_would_help_stands_in_the_verdict(run_of):
    keep_probe(made())
    folder = run_of(made())
    folder.steps(1, 40)
    (verdict,) = verdicts_of(folder.run, asks_planner=True)
    plain = verdict.as_json()["what_if"]
    assert isinstance(plain, list)
    assert set(plain[0]) == {"change", "step_s", "saved_s"}
    assert verdict.what_if[0].saved_s == max(one.saved_s for one in verdict.what_if)
    assert "the probe" in verdict.evidence[1]
    assert verdicts_of(folder.run, asks_planner=True) == (verdict,)
