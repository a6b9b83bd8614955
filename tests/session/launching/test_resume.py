"""What may be changed of a run that goes on, what is refused, and how several nodes go on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.tables import MemorySetting, Relief
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan
from trainspec_cli.run.job.folder import write_other_nodes
from trainspec_cli.run.notify import NOBODY
from trainspec_cli.run.recovery.memory import with_reliefs
from trainspec_cli.run.slurm.queue import note_job
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.session.launching.resume import prepare_resume, prepare_unchanged, resume_recipe
from trainspec_cli.session.launching.session import Session

MakeRun = Callable[..., RunDir]
Prepare = Callable[..., Session]
NOISE = ("batching=noise", "batching.schedule.max_global_batch_size=64")
ALONE = NodeOptions()
FIRST_OF_TWO = NodeOptions(2, 0, "head:29500")


@pytest.fixture
def prepare(console: RunConsole) -> Prepare:
    def call(run: RunDir, *changes: str, nodes: NodeOptions = ALONE) -> Session:
        return prepare_resume(run, changes, nodes, console)

    return call


@pytest.mark.clause("LAUNCH-8")
@pytest.mark.parametrize(
    "change",
    [
        "model.num_layers=3",
        "data.seq_len=32",
        "data.tokenizer.vocab_size=300",
        "optim.name=sgd",
        "batching.global_batch_size=4",
        "train.seed=1",
        "run.dir=elsewhere",
        "~model.rope_theta",
        "lora.rank=16",
        "lora.alpha=8",
        "lora.targets=[q]",
        "lora.base=nf4",
        "init.from=elsewhere",
    ],
)
def test_what_the_checkpoint_depends_on_is_fixed(make_run: MakeRun, prepare: Prepare, change: str) -> None:
    run = make_run("model.rope_theta=5e5", "lora.rank=8")
    with pytest.raises(RecipeError) as refused:
        prepare(run, change)
    path = change.lstrip("~").partition("=")[0]
    problems = {problem.path: problem for problem in refused.value.problems}
    assert problems[path].code == "fixed_value"
    assert ("launch recipe=tiny" in problems[path].hint) is (path != "run.dir")
    assert ("trainspec export" in problems[path].hint) is (f"export {run.root} --output MERGED" in problems[path].hint)


def test_more_steps_are_counted_from_those_of_the_run(make_run: MakeRun, prepare: Prepare) -> None:
    assert prepare(make_run(), "train.max_steps=+1000").plan.spec.train.max_steps == 1020


def test_every_problem_of_the_changes_is_found_at_once(make_run: MakeRun, prepare: Prepare) -> None:
    with pytest.raises(RecipeError) as refused:
        prepare(make_run(), "train.seed=2", "train.max_steps=many", "train.what=1", "optim.lr=-1")
    assert {(problem.code, problem.path, problem.line) for problem in refused.value.problems} == {
        ("fixed_value", "train.seed", 1),
        ("wrong_type", "train.max_steps", 2),
        ("unknown_key", "train.what", 3),
        ("out_of_range", "optim.lr", 4),
    }


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("train.max_steps=400", lambda plan: plan.spec.train.max_steps == 400),
        ("optim.lr=0.5", lambda plan: plan.spec.optim.lr == 0.5),
        ("checkpoint.interval_steps=7", lambda plan: plan.spec.checkpoint.interval_steps == 7),
        ("batching.micro_batch_size=1", lambda plan: plan.micro_batch_size == 1),
        ("cluster.devices_per_node=1", lambda plan: plan.world_size == 1),
    ],
)
def test_the_rest_may_change(make_run: MakeRun, prepare: Prepare, change: str, value: Callable[..., bool]) -> None:
    session = prepare(make_run(), change)
    assert value(session.plan)
    assert isinstance(session.begins, RunDir)
    assert session.reach is None
    assert session.folder == session.begins.root


@pytest.mark.parametrize(
    ("changes", "size", "largest"),
    [
        ((), 1, 1),
        (("optim.lr=0.5",), 1, 1),
        (("scheduler.mode=auto",), 1, 1),
        (("scheduler.mode=off",), 4, None),
        (("batching.micro_batch_size=2",), 2, None),
        (("recompute=full",), 4, None),
        (("cluster.devices_per_node=1",), 8, None),
    ],
)
def test_a_run_keeps_the_setting_of_memory_that_it_began_with(
    make_run: MakeRun, prepare: Prepare, changes: tuple[str, ...], size: int, largest: int | None
) -> None:
    """Earlier runs have shown that no more fits; a value given now takes precedence."""
    run = make_run()
    began = with_reliefs(read_plan(run), [Relief(read_plan(run).memory_setting, MemorySetting(1, "none", "none"))])
    write_json(run.plan_json, to_plain(began))
    plan = prepare(run, *changes).plan
    assert (plan.micro_batch_size, plan.largest_micro_batch_size) == (size, largest)


def test_a_layout_that_cannot_read_the_8_bit_state_is_refused_before_the_start(
    make_run: MakeRun, prepare: Prepare
) -> None:
    """Rows of 160 values are one block under tp 1, and two under tp 2."""
    run = make_run("optim=adamw8bit")
    with pytest.raises(RecipeError) as refused:
        prepare(run, "layout.tp=2", "layout.dp_replicate=1")
    (problem,) = refused.value.problems
    assert (problem.path, problem.file, problem.line) == ("layout.tp", "command line", 1)
    assert "layout.tp 1 and 2 " in problem.message
    assert "layout.tp=1" in problem.hint
    assert prepare(run, "layout.dp_replicate=1", "layout.dp_shard=2").plan.layout.dp_shard == 2


def test_a_layout_that_changes_goes_on_with_the_axes_that_the_plan_has_chosen(
    make_run: MakeRun, prepare: Prepare
) -> None:
    run = make_run("layout=auto", "scheduler.changes=[{step: 3, pp: 2, dp_shard: 1}]")
    changed = prepare(run).plan.changes
    assert changed == read_plan(run).changes and [change.layout.pp for change in changed] == [2]


def test_where_nothing_is_saved_every_layout_can_begin(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run("optim=adamw8bit", step=0)
    assert prepare(run, "layout.tp=2", "layout.dp_replicate=1").plan.layout.tp == 2


@pytest.mark.parametrize(
    ("step", "max_steps", "is_refused"), [(10, 10, True), (10, 11, False), (20, 20, True), (15, 5, True)]
)
def test_a_run_that_is_done_goes_on_only_with_more_steps(
    make_run: MakeRun, prepare: Prepare, step: int, max_steps: int, is_refused: bool
) -> None:
    run = make_run(step=step)
    if not is_refused:
        assert prepare(run, f"train.max_steps={max_steps}").plan.spec.train.max_steps == max_steps
        return
    with raises(RecipeError, "nothing_left") as refused:
        prepare(run, f"train.max_steps={max_steps}")
    hint = refused.value.problems[0].hint
    assert hint.endswith(f"trainspec resume {run.root} train.max_steps={2 * step}")


@pytest.mark.parametrize(
    ("schedule", "step", "samples", "is_done"),
    [
        (("batching=seesaw",), 13, 160, True),
        (("batching=seesaw",), 13, 159, False),
        (("batching=seesaw",), 19, 152, False),
        (NOISE, 9, 160, True),
        (NOISE, 19, 159, False),
    ],
)
def test_a_run_whose_batch_changes_is_done_when_its_samples_are_trained(
    make_run: MakeRun, prepare: Prepare, schedule: tuple[str, ...], step: int, samples: int, is_done: bool
) -> None:
    """20 steps of 8 samples, however many steps it took."""
    run = make_run(*schedule, step=step)
    write_json(run.manifest(step), {"about": {"step": step, "samples": samples}})
    if not is_done:
        assert prepare(run).plan.spec.batching == read_plan(run).spec.batching
        return
    with pytest.raises(RecipeError) as refused:
        prepare(run)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("nothing_left", "train.max_steps")
    for fact in (f"step {step}", "160 samples", "`train.max_steps` 20", "`batching.global_batch_size` 8 is 160"):
        assert fact in problem.message
    assert problem.hint.endswith(f"trainspec resume {run.root} train.max_steps=40")
    assert prepare(run, "train.max_steps=21").plan.spec.train.max_steps == 21


@pytest.mark.parametrize("content", ["{}", '{"about": {"samples": "many"}}'])
def test_a_checkpoint_that_does_not_say_how_far_the_run_is_is_named(
    make_run: MakeRun, prepare: Prepare, content: str
) -> None:
    run = make_run("batching=seesaw")
    run.manifest(10).write_text(content)
    with pytest.raises(UnreadableFileError, match=r"step_00000010/manifest.json"):
        prepare(run)


def test_data_that_is_gone_and_cannot_be_made_again_is_refused(
    make_run: MakeRun, prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    gone = tmp_path / "gone"
    write_json(run.run_json, {**read_json(run.run_json), "data_dir": str(gone)})
    monkeypatch.setattr("trainspec_cli.session.recipe.data.prepare", lambda data: tmp_path / "other")
    with raises(MachineError, "missing_data", gone, path="data"):
        prepare(run)
    monkeypatch.setattr("trainspec_cli.session.recipe.data.prepare", lambda data: gone)
    assert prepare(run).plan == read_plan(run)


def test_a_run_that_makes_up_its_data_has_no_folder_to_find(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run()
    write_json(run.run_json, {**read_json(run.run_json), "data_dir": None})
    assert prepare(run).plan.spec.data.source == "python_stdlib"


def test_kernels_that_were_chosen_hold_until_others_are_asked_for(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run()
    plan = read_plan(run)
    chosen = replace(plan.kernels, adamw="foreach")
    write_json(run.plan_json, to_plain(replace(plan, kernels=chosen)))
    assert prepare(run).plan.kernels == chosen
    assert prepare(run, "kernels.adamw=for_loop").plan.kernels.adamw == "for_loop"


def test_a_machine_that_lacks_the_chosen_kernels_is_refused(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run()
    plan = read_plan(run)
    write_json(run.plan_json, to_plain(replace(plan, kernels=replace(plan.kernels, ssd_scan="fla"))))
    with pytest.raises(MachineError, match=r"kernels\.ssd_scan"):
        prepare(run)


def test_several_nodes_go_on_just_as_they_were(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run("cluster.num_nodes=2")
    session = prepare(run, nodes=FIRST_OF_TWO)
    assert session.plan == read_plan(run)
    assert session.reach is not None
    assert (session.reach.head, session.reach.rendezvous_port) == ("head", 29500)


def test_several_nodes_go_on_with_other_values_and_another_number_of_nodes(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run("cluster.num_nodes=3", "batching.global_batch_size=12")
    changed = prepare(run, "train.max_steps=400", nodes=FIRST_OF_TWO)
    assert (changed.plan.num_nodes, changed.plan.spec.train.max_steps) == (2, 400)
    assert changed.reach is not None and changed.reach.head == "head"
    alone = prepare(run, "cluster.num_nodes=1")
    assert (alone.plan.num_nodes, alone.reach) == (1, None)
    with pytest.raises(RecipeError) as refused:
        prepare(run, "optim.name=muon", nodes=FIRST_OF_TWO)
    assert [(one.code, one.path) for one in refused.value.problems] == [("fixed_value", "optim.name")]


def test_a_run_that_left_a_node_out_goes_on_with_all_of_them(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run("cluster.num_nodes=2")
    whole = read_plan(run)
    for nodes in (1, 1):
        write_other_nodes(run, replace(whole, num_nodes=nodes))
    assert read_plan(run).num_nodes == 1
    session = prepare(run, nodes=FIRST_OF_TWO)
    assert (session.plan, session.reach is not None) == (whole, True)


@pytest.mark.parametrize(("rank", "is_allowed"), [(2, True), (3, True), (4, False)])
def test_spare_nodes_have_numbers_after_the_others(make_run: MakeRun, rank: int, is_allowed: bool) -> None:
    spec = read_plan(make_run("cluster.num_nodes=2", "cluster.reliability.spare_nodes=2")).spec
    given = NodeOptions(2, rank, "head:1")
    if is_allowed:
        assert given.reach(spec, "/run") is not None
        return
    with pytest.raises(RecipeError) as refused:
        given.reach(spec, "/run")
    for fact in ("--node-rank is 4;", "2 spares (cluster.reliability.spare_nodes)", "0 to 3"):
        assert fact in refused.value.problems[0].message


def test_one_node_becomes_several(make_run: MakeRun, prepare: Prepare) -> None:
    session = prepare(make_run(), nodes=FIRST_OF_TWO)
    assert (session.plan.num_nodes, session.reach is not None) == (2, True)


def test_a_run_made_for_slurm_is_submitted_again(make_run: MakeRun, prepare: Prepare) -> None:
    run = make_run("cluster.num_nodes=2")
    run.job_sbatch.touch()
    with raises(RecipeError, "several_hosts", "2 Slurm nodes") as refused:
        prepare(run)
    assert refused.value.problems[0].hint == f"run sbatch {run.job_sbatch}"
    with pytest.raises(RecipeError) as refused:
        prepare(run, "optim.lr=1e-3")
    hint = refused.value.problems[0].hint
    assert f"trainspec resume {run.root} optim.lr=1e-3, " in hint and hint.endswith(f" sbatch {run.job_sbatch}")
    assert prepare(run, nodes=FIRST_OF_TWO).reach is not None, "unless the addresses of its nodes are given"


@pytest.fixture
def of_slurm(make_run: MakeRun) -> RunDir:
    run = make_run("cluster.num_nodes=2", "cluster.devices_per_node=1")
    run.job_sbatch.write_text("#!/bin/bash\n")
    return run


def resume_here(run: RunDir, *changes: str) -> int:
    return resume_recipe(run, changes, ALONE, NOBODY, force=False, as_json=False, detach=False)


def test_changes_of_a_run_that_slurm_starts_are_written_down_for_its_next_job(
    of_slurm: RunDir, console: RunConsole, here: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_plan(of_slurm)
    assert resume_here(of_slurm, "train.max_steps=+100", "optim.lr=0.5") == 0
    plan = read_plan(of_slurm)
    assert (plan.spec.train.max_steps, plan.spec.optim.lr) == (before.spec.train.max_steps + 100, 0.5)
    assert (plan.layout, plan.num_nodes) == (before.layout, 2)
    assert read_json(of_slurm.run_json)["resumes"][-1]["from_step"] == 10
    shown = capsys.readouterr().out
    assert "optim.lr is 0.5" in shown and "0.003" in shown and f"sbatch {of_slurm.job_sbatch}" in shown
    # What the job's script then does: it goes on just as the run is written down.
    reach = Reach("head", ("srun", "agent"))
    assert prepare_unchanged(of_slurm, reach, console).plan == plan


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["optim.name=sgd"], "fixed_value"),
        (["cluster.slurm.time=1:00:00"], "fixed_value"),
        (["train.max_steps=5"], "nothing_left"),
        (["optim.lrr=1"], "unknown_key"),
    ],
)
def test_what_the_next_job_could_not_go_on_with_is_refused_and_the_run_stays(
    of_slurm: RunDir, here: Machine, changes: list[str], code: str
) -> None:
    before = of_slurm.plan_json.read_bytes()
    with pytest.raises(RecipeError) as refused:
        resume_here(of_slurm, *changes)
    assert [problem.code for problem in refused.value.problems] == [code]
    assert of_slurm.plan_json.read_bytes() == before


def test_a_run_whose_job_waits_is_not_changed(of_slurm: RunDir, here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.session.launching.resume.status_of_run", lambda run: "queued")
    note_job(of_slurm, "41")
    with pytest.raises(RecipeError) as refused:
        resume_here(of_slurm, "optim.lr=0.5")
    (problem,) = refused.value.problems
    assert problem.code == "still_running" and "scancel 41" in problem.hint


def test_an_agents_session_ends_where_nothing_is_left(make_run: MakeRun, console: RunConsole) -> None:
    run = make_run("cluster.num_nodes=2", step=20)
    reach = FIRST_OF_TWO.reach(read_plan(run).spec, str(run.root))
    assert reach is not None
    with raises(RecipeError, "nothing_left"):
        prepare_unchanged(run, reach, console)
    shutil.rmtree(run.checkpoints)
    assert prepare_unchanged(run, reach, console, force=True).force


@pytest.mark.parametrize(
    ("nodes", "run_dir", "message"),
    [
        (NodeOptions(None, 0, "head:1"), "/run", "`cluster.num_nodes`"),
        (NodeOptions(2, 0, None), "/run", "`cluster.num_nodes`"),
        (NodeOptions(2, 0, "head"), "/run", "--rdzv-endpoint is `head`;"),
        (NodeOptions(2, 0, ":29500"), "/run", "--rdzv-endpoint is `:29500`;"),
        (NodeOptions(2, 0, "head:port"), "/run", "--rdzv-endpoint is `head:port`;"),
        (NodeOptions(2, 2, "head:1"), "/run", "--node-rank is 2; with 2"),
        (NodeOptions(2, -1, "head:1"), "/run", "--node-rank is -1; with 2"),
        (NodeOptions(2, 0, "head:1"), "auto", "`run.dir` is auto"),
    ],
)
def test_how_nodes_reach_one_another_has_to_be_said(
    make_run: MakeRun, nodes: NodeOptions, run_dir: str, message: str
) -> None:
    spec = read_plan(make_run("cluster.num_nodes=2")).spec
    with pytest.raises(RecipeError) as refused:
        nodes.reach(spec, run_dir)
    assert message in refused.value.problems[0].message
