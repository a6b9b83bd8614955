"""The end of a run as the command line tells it, and the exit code."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from lab.problems import in_order

from trainspec_cli.core.environment_names import RENDEZVOUS
from trainspec_cli.core.errors import MachineError, RecipeError, TrainspecError, WorkerError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.collect import collect
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.accounting import Recovery, WallTime
from trainspec_cli.run.folder.event_types.events import FirstTextEvent, RecoveryEvent, TextPart
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import (
    NodeErrorRecord,
    RunResult,
    read_plan,
    read_result,
    write_error,
    write_result,
)
from trainspec_cli.run.job.job import Job, build_job
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.outcome import conclude
from trainspec_cli.run.signals import StopRequests, interrupt, on_stop_signal
from trainspec_cli.run.supervise import Ending
from trainspec_cli.session.launching import run as run_module
from trainspec_cli.session.launching.kinds import command_to_resume
from trainspec_cli.session.recipe.load import load

MakeRun = Callable[..., RunDir]
DONE = RunResult(status="done", exit_code=0, steps=20, final_loss=2.0, time_s=WallTime(productive=1.0))
STOPPED = RunResult(status="stopped", exit_code=6, steps=10, final_loss=3.0)


class Run:
    """A run whose supervision ends as the test says."""

    def __init__(self, run: RunDir, machine: Machine, console: RunConsole, monkeypatch: pytest.MonkeyPatch):
        self.dir, self.plan, self.console = run, read_plan(run), console
        self.job: Job = build_job(self.plan, run.root, machine)
        self.job.logs.mkdir(parents=True, exist_ok=True)
        self.ending = Ending(self.job, 0, stop_requested=False)
        self.watched = self.loses_reader = False
        monkeypatch.setattr(run_module, "supervise", self._supervise)

    def _supervise(
        self, job: Job, plan: Any, backend: Any, watch: Any, report: Any, requests: StopRequests, replan: Any, *_: Any
    ) -> Ending:
        assert (job, plan, backend) == (self.job, self.plan, LocalBackend)
        self.replan = replan
        self.watched = callable(watch) and callable(report) and requests.count == 0
        if self.loses_reader:
            self.console.on_broken_pipe()
            assert requests.count == 1, "the run is asked to stop, whatever signals are ignored"
        return self.ending

    def __call__(self, **options: Any) -> int:
        return run_module.run(self.job, self.plan, LocalBackend, self.console, **options)


@pytest.fixture
def run(make_run: MakeRun, here: Machine, console: RunConsole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(make_run(), here, console, monkeypatch)


def test_a_run_that_is_done(run: Run, shown: StringIO) -> None:
    write_result(run.dir, DONE)
    assert run() == 0
    assert run.watched
    assert shown.getvalue().endswith("done after 20 steps\nrun folder  run\nreport      trainspec report run\n")


def test_a_run_that_stopped_says_how_it_goes_on(run: Run, shown: StringIO) -> None:
    write_result(run.dir, STOPPED)
    run.ending = replace(run.ending, stop_requested=True)
    assert run() == 6
    assert shown.getvalue().endswith(
        "stopped with a checkpoint at step 10\nrun folder  run\nreport      trainspec report run\n"
        "resume      trainspec resume run\n"
    )
    run.dir.job_sbatch.touch()
    assert run() == 6
    assert shown.getvalue().endswith("resume      sbatch run/job.sbatch\n")


@pytest.mark.parametrize(("steps", "stopped", "has_summary"), [(20, False, True), (3, True, True), (0, True, False)])
def test_a_summary_goes_before_where_there_is_something_to_sum_up(
    run: Run, shown: StringIO, monkeypatch: pytest.MonkeyPatch, steps: int, stopped: bool, has_summary: bool
) -> None:
    monkeypatch.setattr(run_module, "render_summary", lambda report: f"summary of {report.path}")
    write_result(run.dir, replace(STOPPED if stopped else DONE, steps=steps))
    run.ending = replace(run.ending, stop_requested=stopped)
    run()
    assert shown.getvalue().startswith(f"summary of {run.dir.root}\n") is has_summary


def test_the_supervisor_may_plan_the_run_anew(run: Run) -> None:
    def replan(plan: Any, nodes: int) -> None:
        raise AssertionError("no node is slow")

    with pytest.raises(WorkerError, match="without writing a result"):
        run(replan=replan)
    assert run.replan is replan


def test_a_run_whose_supervision_fails_goes_on_no_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MachineError("torchrun is not there")

    monkeypatch.setattr(run_module, "supervise", refuse)
    with pytest.raises(MachineError):
        run()
    with pytest.raises(BrokenPipeError):
        run.console.on_broken_pipe()


def test_a_signal_while_the_result_is_written_does_not_break_that_off(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hear(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return conclude(run.job, run.ending)

    write_result(run.dir, DONE)
    monkeypatch.setattr(run_module, "conclude", hear)
    with on_stop_signal(interrupt):
        assert run() == 0


def test_a_signal_while_the_end_is_told_of_does_not_break_that_off(
    run: Run, shown: StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hear(_: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "a summary"

    write_result(run.dir, DONE)
    monkeypatch.setattr(run_module, "render_summary", hear)
    wanted = Notify(f"kill -TERM {os.getpid()}; sleep 0.1; echo told > {tmp_path}/told")
    with on_stop_signal(interrupt):
        assert run(notifies=wanted) == 0
    assert (tmp_path / "told").read_text() == "told\n"
    assert shown.getvalue().startswith("a summary\ndone after 20 steps\n")


def test_the_log_keeps_what_the_console_without_a_terminal_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(job: Job, plan: Any, backend: Any, watch: Any, report: Any, *_: Any) -> Ending:
        watch(False)
        report("replica group 1 failed [so it says]")
        return run.ending

    write_result(run.dir, DONE)
    monkeypatch.setattr(run_module, "supervise", supervise)
    run()
    run()
    lines = ["starting workers", "replica group 1 failed [so it says]"]
    assert run.dir.run_log.read_text().splitlines() == [*lines, *lines]


def test_a_run_without_a_checkpoint_was_interrupted(run: Run, shown: StringIO) -> None:
    run.dir.checkpoint(10).rmdir()
    run.ending = replace(run.ending, stop_requested=True)
    assert run() == 130
    assert shown.getvalue().startswith("interrupted before") and "trainspec resume" not in shown.getvalue()


def fail(run: Run, **options: Any) -> TrainspecError:
    with pytest.raises(TrainspecError) as caught:
        run(**options)
    return caught.value


def report_error(run: Run, **more: Any) -> None:
    words = {"rank": 0, "host": "h", "type": "ValueError", "message": "boo", "traceback": "Traceback ...", "time": 1.0}
    write_json(run.dir.error(0), {**words, **more})


def test_a_failed_run_prints_its_traceback_and_raises_with_how_to_go_on(run: Run, shown: StringIO) -> None:
    report_error(run)
    run.ending = replace(run.ending, exit_code=1)
    (problem,) = fail(run).problems
    assert (problem.code, problem.message) == ("worker_failed", "rank 0 (h): ValueError: boo")
    assert problem.hint.endswith(" step 10: trainspec resume run")
    assert shown.getvalue().split() == ["Traceback", "...", "logs:", f"run/logs/{run.job.logs.name}"]
    run.dir.checkpoint(10).rmdir()
    assert fail(run).problems[0].hint == ""


def test_what_a_script_has_printed_itself_is_not_printed_again(run: Run, shown: StringIO) -> None:
    class Output:
        def look(self, report: Any) -> None: ...

        def has_shown(self, text: str) -> bool:
            return text == "Traceback ..."

    report_error(run, traceback="Traceback ...\n\nand more")
    fail(run, output=Output())
    assert shown.getvalue().split() == ["and", "more", "logs:", f"run/logs/{run.job.logs.name}"]
    assert "Traceback ..." in fail(run, output=Output(), as_json=True).problems[0].message


@pytest.fixture
def on_two_nodes(run: Run) -> Run:
    """A run that was started on two nodes by hand."""
    run.job = replace(run.job, nodes=(0, 1))
    run.ending = replace(run.ending, job=run.job, exit_code=None)
    number = generations.begin(run.dir)
    own = {RENDEZVOUS: "node0:29500"}
    record = GenerationRecord(number, 0.0, "a", "node0", 1, own, 2, "id", str(run.job.logs), (), (), nodes=(0, 1))
    generations.describe(run.dir, record)
    return run


AGAIN = "trainspec resume run --nnodes 1 --node-rank I --rdzv-endpoint node0:29500"


@pytest.mark.parametrize(
    ("node", "host", "kind", "first"),
    [
        (1, "", MachineError, "--node-rank 1; "),
        (1, "b", WorkerError, "node 1 printed; "),
        (0, "a", WorkerError, "torchrun.log; "),
    ],
)
def test_a_node_that_is_missing_is_followed_by_what_to_type_on_each(
    on_two_nodes: Run, node: int, host: str, kind: type[TrainspecError], first: str
) -> None:
    run = on_two_nodes
    write_error(run.dir.node_error(node), NodeErrorRecord(node=node, host=host, message="is gone", lost=True))
    found = fail(run)
    assert type(found) is kind
    assert in_order(found.problems[0].hint, first, f" step 10: {AGAIN}")
    run.dir.checkpoint(10).rmdir()
    assert f"from the beginning: {AGAIN}" in fail(run).problems[0].hint
    run.dir.job_sbatch.touch()
    hint = fail(run).problems[0].hint
    assert hint.startswith("see run/logs/") and hint.endswith("from the beginning: sbatch run/job.sbatch")


def test_a_run_on_several_nodes_that_stopped_says_how_each_goes_on(on_two_nodes: Run, shown: StringIO) -> None:
    write_result(on_two_nodes.dir, STOPPED)
    on_two_nodes.ending = replace(on_two_nodes.ending, stop_requested=True, exit_code=0)
    assert on_two_nodes() == 6
    assert f"resume      {AGAIN}" in shown.getvalue()


@pytest.mark.clause("LAUNCH-2")
@pytest.mark.parametrize(
    ("exit_code", "kind"), [(4, MachineError), (5, WorkerError), (2, RecipeError), (1, WorkerError)]
)
def test_a_failed_run_ends_with_the_exit_code_of_its_cause(
    run: Run, exit_code: int, kind: type[TrainspecError]
) -> None:
    report_error(run, code="x", hint="do this", exit_code=exit_code)
    found = fail(run)
    assert type(found) is kind
    assert found.problems[0].hint == "do this"
    result = read_result(run.dir)
    assert result is not None
    assert (result.exit_code, result.reason, result.hint) == (kind.exit_code, "rank 0 (h): boo", "do this")
    report = collect(run.dir.root)
    assert (report.reason, report.hint) == (result.reason, result.hint)
    with pytest.raises(TrainspecError) as raised:
        report.raise_for_status()
    assert type(raised.value) is kind
    assert raised.value.problems == found.problems


def test_in_json_the_traceback_belongs_to_the_error(run: Run, shown: StringIO) -> None:
    report_error(run)
    message = fail(run, as_json=True).problems[0].message
    summary, traceback, logs = message.split("\n\n")
    assert (summary, traceback) == ("rank 0 (h): ValueError: boo", "Traceback ...")
    assert logs.endswith(f"run/logs/{run.job.logs.name}")
    assert shown.getvalue() == ""


def test_in_json_a_run_prints_its_result_alone(run: Run, shown: StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(run.dir, DONE)
    assert run(as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"run": str(run.dir.root), **json.loads(json.dumps(to_plain(replace(DONE, recoveries=()))))}
    assert shown.getvalue() == ""


def test_in_json_a_run_has_the_first_text_with_its_mask(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(run.dir, DONE)
    writer = EventWriter(run.dir.events(0), 0)
    parts = (TextPart(text="what?", trained=False), TextPart(text="that", trained=True))
    writer.write(FirstTextEvent(step=0, tokens=3, trained=1, parts=parts))
    writer.close()
    assert run(as_json=True) == 0
    shown = [{"text": "what?", "trained": False}, {"text": "that", "trained": True}]
    assert json.loads(capsys.readouterr().out)["first_text"] == {"tokens": 3, "trained": 1, "parts": shown}


def test_processes_that_hang_in_the_kernel_are_named(run: Run, shown: StringIO) -> None:
    write_result(run.dir, DONE)
    run.ending = replace(run.ending, left_behind=(12, 34))
    run()
    assert shown.getvalue().startswith("processes 12, 34 ")


def test_a_run_that_was_begun_anew_elsewhere_is_left_alone(run: Run) -> None:
    run.ending = replace(run.ending, generation=generations.newest(run.dir))
    write_result(run.dir, DONE)
    assert run() == 0
    before = run.dir.result_json.read_bytes()
    generations.begin(run.dir)
    (problem,) = fail(run).problems
    assert problem.code == generations.FENCED
    assert run.dir.result_json.read_bytes() == before


def test_a_reader_that_left_is_told_nothing_more(run: Run, shown: StringIO) -> None:
    write_result(run.dir, DONE)
    run.loses_reader = True
    with pytest.raises(BrokenPipeError):
        run()
    assert shown.getvalue() == ""
    with pytest.raises(BrokenPipeError):
        run.console.on_broken_pipe()


def test_failures_that_the_run_outlived_are_listed(run: Run, shown: StringIO) -> None:
    write_result(run.dir, replace(DONE, recoveries=(Recovery("left", 1, 3, 0.5, 1),)))
    left = RecoveryEvent(time=1.0, step=3, change="left", group=1, stall_s=0.5, lost_steps=1)
    run.dir.events_folder.mkdir(exist_ok=True)
    run.dir.events(0).write_text(json.dumps({"rank": 0, **to_plain(left)}) + "\n")
    assert run() == 0
    lines = shown.getvalue().splitlines()
    place = lines.index("failures")
    assert lines[place + 1].startswith("  ") and "group 1" in lines[place + 1]
    assert lines[place + 2 :][:2] == ["", "done after 20 steps"]


def test_a_worker_that_failed_after_the_end_is_mentioned(run: Run, shown: StringIO) -> None:
    write_result(run.dir, DONE)
    report_error(run, message="Connection reset by peer")
    run.ending = replace(run.ending, exit_code=1)
    assert run() == 0
    assert shown.getvalue().startswith("rank 0 (h): ValueError: Connection reset by peer\n")


def test_a_folder_with_spaces_is_quoted(
    make_run: MakeRun, here: Machine, console: RunConsole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = Run(make_run(), here, console, monkeypatch)
    monkeypatch.chdir(tmp_path)
    spaced = tmp_path / "my run"
    plain.dir.root.rename(spaced)
    assert command_to_resume(RunDir(spaced)) == "trainspec resume 'my run'"
    (spaced / "job.sbatch").touch()
    assert command_to_resume(RunDir(spaced)) == "sbatch 'my run/job.sbatch'"


@pytest.mark.parametrize(("result", "code"), [(DONE, 0), (None, 5)])
def test_whoever_is_to_be_told_hears_of_the_end_and_may_fail(
    run: Run, shown: StringIO, tmp_path: Path, result: RunResult | None, code: int
) -> None:
    if result:
        write_result(run.dir, result)
    else:
        run.ending = replace(run.ending, exit_code=1)
    wanted = Notify(f'printf "%s" "$TRAINSPEC_STATUS" > {tmp_path}/told; exit 9')
    try:
        ended = run(notifies=wanted)
    except WorkerError as failed:
        ended = failed.exit_code
    assert ended == code
    assert (tmp_path / "told").read_text() == ("done" if result else "failed")
    assert f"warning: --notify {wanted.whom}: exit code 9\n" in shown.getvalue()


def test_trackers_say_where_they_record_and_how_that_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(["recipe=tiny", "tracking.wandb=true", "tracking.tensorboard=true"]).spec
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    tensorboard, wandb = run_module.describe_tracking(spec, Path.cwd() / "my runs" / "a")
    assert "--logdir 'my runs/a'/tensorboard" in tensorboard
    assert wandb.endswith("wandb sync 'my runs/a'/wandb/offline-run-*")
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "wandb sync" not in list(run_module.describe_tracking(spec, Path.cwd()))[1]
    assert list(run_module.describe_tracking(load(["recipe=tiny"]).spec, Path.cwd())) == []
