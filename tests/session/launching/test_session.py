"""A start of a run: its steps in their order, what each is given, and what is written down before the job runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from lab.problems import raises

from trainspec_cli.balance.advisor import LayoutAdvisor
from trainspec_cli.core.errors import MachineError, PlanError, Problem, WorkerError
from trainspec_cli.core.printable import format_count
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan
from trainspec_cli.recipe.results.tables import Relief
from trainspec_cli.recipe.results.tools import MachineProbe
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.backend.local import LocalBackend
from trainspec_cli.run.backend.nodes.backend import NodesBackend, Reach
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.event_types.events import StartEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.folder import claim, is_running
from trainspec_cli.run.memory_limits import Learned, LimitsWatch, MemoryLimits
from trainspec_cli.run.notify import NOBODY
from trainspec_cli.session.launching import session as session_module
from trainspec_cli.session.launching.changes import plan_on_fewer
from trainspec_cli.session.launching.session import CHECK_NODES, Session, rehearse, start
from trainspec_cli.session.planning.predict import describe_load
from trainspec_cli.session.recipe.load import load, plan_on

MakeRun = Callable[..., RunDir]
PREDICTION = LocalPrediction(time_s={"forward": 1.0}, memory={"parameters": 1.0})
REACH = Reach("head", ("srun", "agent"))


class Steps:
    """Stands in for what a start does, and notes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: Path):
        self.taken: list[str] = []
        self.job: Any = None
        self.plan: Any = None
        self.backend: Any = None
        self.options: dict[str, Any] = {}
        self.was_claimed = False
        self.exit_code = 6
        self._data = data
        for name in ("predict", "select_kernels", "prepare_data", "run", "probe_after_run"):
            monkeypatch.setattr(session_module, name, getattr(self, name))
        monkeypatch.setattr(session_module, "parts_of", {CHECK_NODES: [self.check_nodes]}.get)

    def predict(self, plan: Plan, machine: Machine, console: Any, **options: Any) -> Plan:
        self.taken.append("predict")
        self.options["predict"] = options
        return replace(plan, prediction=PREDICTION)

    def check_nodes(self, plan: Plan, folder: Path, console: Any, force: bool) -> str:
        assert plan.prediction == PREDICTION, "it counts the memory that is predicted"
        self.taken.append("check_nodes")
        self.options["check_nodes"] = {"folder": folder, "force": force}
        return "examination"

    def select_kernels(self, plan: Plan, machine: Machine, console: Any, **options: Any) -> tuple[Plan, None]:
        self.taken.append("select_kernels")
        self.options["select_kernels"] = options
        return replace(plan, kernels=replace(plan.kernels, adamw="foreach")), None

    def prepare_data(self, loaded: Any, console: Any) -> Path:
        self.taken.append("prepare_data")
        return self._data

    def run(self, job: Any, plan: Plan, backend: Any, console: Any, limits: LimitsWatch, **options: Any) -> int:
        self.taken.append("run")
        limits.look()
        self.job, self.plan, self.backend = job, plan, backend
        self.options["run"] = options
        self.was_claimed = is_running(job.run)
        return self.exit_code

    def probe_after_run(self, plan: Plan, machine: Machine, console: Any) -> None:
        assert not is_running(self.job.run), "what waits for the run's end need not wait for this"
        self.taken.append("probe_after_run")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    return Steps(monkeypatch, tmp_path / "tokens")


@pytest.fixture
def new(here: Machine, console: RunConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    monkeypatch.chdir(tmp_path)

    def make(*arguments: str, **options: Any) -> Session:
        loaded = load(["recipe=tiny", *arguments])
        return Session(plan_on(loaded, here), here, loaded, console, **options)

    return make


def test_a_new_run_takes_every_step_in_order_and_is_written_down(
    new: Callable[..., Session], steps: Steps, tmp_path: Path
) -> None:
    assert start(new("run.dir=mine", force=True, as_json=True)) == 6
    assert steps.taken == ["predict", "check_nodes", "select_kernels", "prepare_data", "run"]
    assert steps.options["predict"] == {"force": True}
    assert steps.options["check_nodes"] == {"folder": tmp_path / "mine", "force": True}
    given = steps.options["run"]
    assert (given.pop("as_json"), given.pop("requests")) == (True, None)
    assert isinstance(given.pop("advisor"), LayoutAdvisor)
    assert given.pop("replan").func is plan_on_fewer
    assert isinstance(given.pop("mail"), WorkerMail)
    assert given == {"notifies": NOBODY}
    assert steps.backend is LocalBackend
    assert steps.was_claimed, "nobody else may start it meanwhile"
    run = RunDir(tmp_path / "mine")
    written = read_plan(run)
    assert (written, written.prediction, written.kernels.adamw) == (steps.plan, PREDICTION, "foreach")
    about = read_json(run.run_json)
    assert (about["data_dir"], about["resumes"]) == (str(tmp_path / "tokens"), [])
    assert not is_running(run)


def test_a_run_without_a_folder_gets_one_below_runs(new: Callable[..., Session], steps: Steps, tmp_path: Path) -> None:
    start(new())
    assert steps.options["check_nodes"]["folder"] == Path("runs")
    assert steps.job.root.parent == tmp_path / "runs" / "tiny"


def test_nodes_are_examined_and_reached(new: Callable[..., Session], steps: Steps, tmp_path: Path) -> None:
    start(new("run.dir=mine", "cluster.num_nodes=2", reach=REACH))
    assert steps.taken == ["predict", "check_nodes", "select_kernels", "prepare_data", "run"]
    assert steps.backend.func is NodesBackend
    assert steps.backend.keywords == {"reach": REACH, "examination": "examination"}
    assert steps.job.command == REACH.start
    assert read_plan(RunDir(tmp_path / "mine")).prediction == PREDICTION


def test_what_is_refused_leaves_nothing(
    new: Callable[..., Session], steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PlanError(Problem("does_not_fit", "too large"))

    for step in ("predict", "parts_of", "select_kernels", "prepare_data"):
        with monkeypatch.context() as patched:
            patched.setattr(session_module, step, refuse if step != "parts_of" else lambda _: [refuse])
            with pytest.raises(PlanError):
                start(new("run.dir=mine"))
        assert not (tmp_path / "mine").exists(), step


def test_a_disk_that_refuses_is_the_machines_fault(new: Callable[..., Session], steps: Steps, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(MachineError, "cannot_write", "file/mine", "Not a directory", path="run.dir"):
        start(new("run.dir=file/mine"))


def own(run: RunDir, machine: Machine, console: RunConsole, reach: Reach | None = None) -> Session:
    return Session(read_plan(run), machine, run, console, reach)


def test_a_run_that_goes_on_says_from_where_and_keeps_its_data(
    make_run: MakeRun, here: Machine, console: RunConsole, shown: StringIO, steps: Steps
) -> None:
    run = make_run()
    start(own(run, here, console))
    assert steps.taken == ["predict", "check_nodes", "select_kernels", "run"]
    assert shown.getvalue() == "continues from step 10\n"
    (resume,) = read_json(run.run_json)["resumes"]
    assert resume["from_step"] == 10
    assert read_plan(run) == steps.plan


def test_a_run_without_a_checkpoint_starts_again(
    make_run: MakeRun, here: Machine, console: RunConsole, shown: StringIO, steps: Steps
) -> None:
    run = make_run()
    run.checkpoint(10).rmdir()
    start(own(run, here, console))
    assert shown.getvalue().startswith("no checkpoint: ")
    assert read_json(run.run_json)["resumes"][0]["from_step"] == 0


@pytest.mark.parametrize(("reach", "says_none"), [(None, True), (REACH, False)])
def test_a_node_without_copies_of_its_own_does_not_rule_them_out(
    make_run: MakeRun,
    here: Machine,
    console: RunConsole,
    shown: StringIO,
    steps: Steps,
    reach: Reach | None,
    says_none: bool,
) -> None:
    """A node that was switched off has lost its copies in memory; another node of the run may have some."""
    run = make_run("cluster.num_nodes=2", "checkpoint.memory_interval_steps=2")
    run.checkpoint(10).rmdir()
    start(own(run, here, console, reach))
    assert shown.getvalue().startswith("no checkpoint: ") is says_none


@pytest.mark.parametrize("begins", [False, True], ids=["refused by the workers", "failed later"])
def test_a_resume_that_fails_before_its_workers_begin_leaves_the_run_as_it_was(
    make_run: MakeRun, here: Machine, console: RunConsole, steps: Steps, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    run = make_run()
    before = {path: path.read_bytes() for path in run.root.iterdir() if path.is_file()}
    old = read_plan(run)

    def fail(job: Any, plan: Plan, *_: Any, **__: Any) -> int:
        assert read_plan(run).spec.optim.lr == 0.5, "the workers read it"
        if begins:
            writer = EventWriter(run.events(0), 0)
            chip = {"device_name": "cpu", "peak_flops": 1.0, "peak_source": "measured"}
            writer.write(StartEvent(step=10, world_size=1, params=1, flops_per_token=1.0, **chip))
            writer.close()
        raise WorkerError("checkpoint refused")

    monkeypatch.setattr(session_module, "run", fail)
    changed = replace(old, spec=replace(old.spec, optim=replace(old.spec.optim, lr=0.5)))
    with pytest.raises(WorkerError):
        start(replace(own(run, here, console), plan=changed))
    after = {path: path.read_bytes() for path in run.root.iterdir() if path.is_file()}
    assert (after == before) is not begins
    assert read_plan(run).spec.optim.lr == (0.5 if begins else old.spec.optim.lr)
    assert len(read_json(run.run_json)["resumes"]) == begins


def test_a_launch_says_what_adapters_train_and_which_other_runs_train_here(
    new: Callable[..., Session], steps: Steps, make_run: MakeRun, shown: StringIO
) -> None:
    other = make_run()
    start(new("run.dir=alone"))
    assert "parameters are trained" not in shown.getvalue() and str(other.root) not in shown.getvalue()
    with claim(other, "launch"):
        start(new("run.dir=mine", "lora.rank=8"))
    assert f"{other.root} is also training" in shown.getvalue()
    # Seven matrices of each of two layers: rank 8 times their rows and columns.
    model = steps.plan.spec.model
    hidden, inner, keys = model.hidden_size, model.ffn_size, model.num_kv_heads * model.head_dim
    trained = 8 * model.num_layers * (2 * 2 * hidden + 2 * (hidden + keys) + 3 * (hidden + inner))
    assert f"{format_count(trained)} of {format_count(steps.plan.params + trained)} parameters" in shown.getvalue()


def test_a_run_that_was_only_written_down_begins(
    make_run: MakeRun, here: Machine, console: RunConsole, shown: StringIO, steps: Steps
) -> None:
    """In a Slurm job's first start, the prediction and the kernels are recorded, and no resume is."""
    run = make_run(step=0)
    start(own(run, here, console, REACH))
    assert shown.getvalue() == ""
    assert read_json(run.run_json)["resumes"] == []
    written = read_plan(run)
    assert (written.prediction, written.kernels.adamw) == (PREDICTION, "foreach")
    assert steps.job.root == run.root


@pytest.mark.parametrize(("step", "begins_with"), [(10, 4), (0, 2)], ids=["goes on", "begins"])
def test_a_run_that_goes_on_follows_no_limits_of_other_runs(
    make_run: MakeRun,
    here: Machine,
    console: RunConsole,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    begins_with: int,
) -> None:
    session = own(make_run(step=step), here, console)
    assert session.plan.micro_batch_size == 4
    learned = Learned(
        Relief(*(replace(session.plan.memory_setting, micro_batch_size=size) for size in (4, 2))), "", 0.0
    )
    limits = MemoryLimits("m", "d", "l", (learned,))
    monkeypatch.setattr("trainspec_cli.session.planning.predict.read_limits", lambda *_: limits)
    start(session)
    assert steps.plan.micro_batch_size == begins_with
    assert rehearse(session)[1].micro_batch_size == begins_with


@pytest.mark.parametrize(
    ("exit_code", "others", "measures"), [(0, 0, True), (6, 0, False), (0, 1, False)], ids=["done", "stopped", "busy"]
)
def test_the_machine_is_measured_after_a_run_and_never_while_another_trains(
    new: Callable[..., Session],
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    exit_code: int,
    others: int,
    measures: bool,
) -> None:
    monkeypatch.setattr(session_module, "_describe_other_runs", lambda _: ["another trains"] * others)
    steps.exit_code = exit_code
    assert start(new("run.dir=mine")) == exit_code
    assert (steps.taken[-1], "probe_after_run" in steps.taken[:-1]) == ("probe_after_run" if measures else "run", False)


def test_what_another_machine_changes_is_shown(
    make_run: MakeRun, here: Machine, console: RunConsole, shown: StringIO, steps: Steps
) -> None:
    run = make_run()
    start(replace(own(run, here, console), plan=replace(read_plan(run), micro_batch_size=2, grad_accum_steps=2)))
    size, steps = shown.getvalue().splitlines()[1:]
    assert size.startswith("micro_batch_size is 2 ") and size.endswith(" 4")
    assert steps.startswith("grad_accum_steps is 2 ") and steps.endswith(" 1")


def test_a_rehearsal_says_that_predictions_are_for_a_load(
    new: Callable[..., Session],
    steps: Steps,
    shown: StringIO,
    monkeypatch: pytest.MonkeyPatch,
    made_up_probe: MachineProbe,
) -> None:
    probe = replace(made_up_probe, displaced=0.4)
    monkeypatch.setattr(session_module, "known_probe", lambda *_: probe)
    rehearse(new())
    assert shown.getvalue().splitlines() == list(describe_load(probe))


def test_a_rehearsal_starts_measures_and_makes_nothing(
    new: Callable[..., Session], steps: Steps, tmp_path: Path
) -> None:
    job, plan = rehearse(new(force=True))
    assert steps.taken == ["predict", "select_kernels"]
    assert steps.options == {"predict": {"force": True}, "select_kernels": {"may_measure": False}}
    assert job.root == tmp_path / "runs" / "tiny" / "TIME"
    assert plan.kernels.adamw == "foreach"
    assert rehearse(new("run.dir=mine", "cluster.num_nodes=2", reach=REACH))[0].command == REACH.start
    assert list(tmp_path.iterdir()) == []
