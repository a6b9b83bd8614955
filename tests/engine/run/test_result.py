"""Skipped steps, a loss or weights that are not finite end a run; the error names the checkpoint to continue from."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lab.engine_runs import run_of
from lab.problems import raises

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.checkpoint.files import TensorPart
from trainspec_cli.engine.observe.counters import Peak
from trainspec_cli.engine.run import result as module
from trainspec_cli.engine.run.result import Divergence, RunTally, write_result
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import EvalEvent, StepEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_result

pytestmark = pytest.mark.usefixtures("one_process")


def run_with(tmp_path, *checkpoints):
    run = RunDir(tmp_path)
    for step in checkpoints:
        run.checkpoint(step).mkdir(parents=True)
    return run


def steps(*skipped, loss=1.0):
    return [step_event(number, bool(one), loss) for number, one in enumerate(skipped, 1)]


def step_event(step, skipped, loss=1.0):
    figures = {"grad_norm": 1.0, "samples": 1, "step_time_s": 1.0, "time_s": {}}
    return StepEvent(step=step, skipped=skipped, loss=loss, **figures)


def held(**tensors):
    return SimpleNamespace(
        parts=lambda: [TensorPart.whole(name.replace("_", "."), tensor) for name, tensor in tensors.items()]
    )


PEAK = Peak(1e12, "made up")
GOOD = held(model_w=torch.ones(3), optimizer_w=torch.tensor([math.inf]))


def refusal(act):
    with pytest.raises(WorkerError) as raised:
        act()
    assert (raised.value.exit_code, raised.value.problems[0].code) == (5, "not_finite")
    return raised.value.problems[0]


def note(divergence, *skipped):
    for number, one in enumerate(skipped, 1):
        divergence.note_step(number, skipped=bool(one))


def test_skipped_steps_that_are_not_in_a_row_go_on(tmp_path):
    note(Divergence(run_with(tmp_path), 3), 1, 1, 0, 1, 1, 0, 1)


def test_so_many_in_a_row_end_the_run_and_name_the_checkpoint_from_before(tmp_path):
    """The checkpoint of step 4 holds the weights with which step 5 and all after it failed."""
    problem = refusal(lambda: note(Divergence(run_with(tmp_path, 2, 3, 4, 6), 3), 0, 0, 0, 0, 1, 1, 1))
    assert problem.code == "not_finite"
    for fact in (" 3 steps in a row, up to step 7; ", f" {tmp_path}/checkpoints/step_00000003"):
        assert fact in problem.message
    for fact in ("step_00000004, step_00000006 ", " from step 3: ", "optim.lr"):
        assert fact in problem.hint


def test_where_none_is_kept_from_before_it_starts_again(tmp_path):
    problem = refusal(lambda: note(Divergence(run_with(tmp_path, 4, 6), 3), 0, 0, 0, 0, 1, 1, 1))
    assert "no checkpoint" in problem.message
    assert problem.hint.startswith("start again: ") and "optim.lr" in problem.hint


def check_end(tmp_path, own, *, heldout=None, weights=GOOD, step=None):
    divergence = Divergence(run_with(tmp_path), 10)
    tally = RunTally(PEAK, steps=own, heldout=heldout and EvalEvent(step=1, heldout_loss=heldout))
    divergence.check_end(step or len(own), tally, weights)


@pytest.mark.parametrize("skipped", [(0,), (1, 0), (0, 0, 1), (0, 1, 1, 1, 0), (0, 0, 0, 1, 1)])
def test_a_few_skipped_steps_do_no_harm(tmp_path, skipped):
    check_end(tmp_path, steps(*skipped), heldout=2.0)


@pytest.mark.parametrize("skipped", [(1,), (0, 1), (0, 1, 1, 1), (1, 1)])
def test_a_run_whose_second_half_was_skipped_is_not_done(tmp_path, skipped):
    problem = refusal(lambda: check_end(tmp_path, steps(*skipped)))
    assert f"in the last {sum(skipped)} of {len(skipped)} steps" in problem.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_last_loss_that_of_held_out_data_and_the_weights_are_finite_when_a_run_is_done(tmp_path, value):
    own = steps(0, 0, 0)
    last = [*own, step_event(4, skipped=True, loss=value)]
    spoiled = held(model_w=torch.tensor([1.0, value]), model_v=torch.ones(2))
    found = [
        refusal(lambda: check_end(tmp_path, last)).message,
        refusal(lambda: check_end(tmp_path, own, heldout=value)).message,
        refusal(lambda: check_end(tmp_path, own, weights=spoiled)).message,
    ]
    assert "last step, 4, " in found[0]
    assert found[1].startswith("the held-out loss ")
    assert found[2].startswith("w is not finite ")


def test_a_last_step_without_a_loss_is_not_done(tmp_path):
    last = [*steps(0, 0, 0), step_event(4, skipped=True, loss=None)]
    assert "last step, 4, " in refusal(lambda: check_end(tmp_path, last)).message


@pytest.mark.parametrize(("before", "done"), [((0, 0, 0), True), ((0, 1, 1), False), ((1, 1, 1), False)])
def test_steps_of_earlier_starts_count_where_this_one_updated_nothing(tmp_path, before, done):
    log = EventWriter(run_with(tmp_path).events(0), 0)
    for event in steps(*before):
        log.write(event)
    log.close()
    own = [step_event(4, skipped=True)]
    if done:
        check_end(tmp_path, own, step=4)
    else:
        assert "of 4 steps" in refusal(lambda: check_end(tmp_path, own, step=4)).message


def finished(tmp_path, *, unit="tokens", status="done", heldout=None, events=None, on_gpu=False):
    """The result of 40 steps of half a second, by four devices of a made-up peak."""
    run = run_with(tmp_path)
    figures = {"grad_norm": 1.0, "samples": 8, "step_time_s": 0.5, "time_s": {"forward": 0.5}}
    figures |= {"tokens": 1000} if unit == "tokens" else {}
    tally = RunTally(PEAK)
    tally.steps = (
        [StepEvent(step=n, skipped=False, loss=2.0 + n, **figures, time=n * 0.5) for n in range(1, 41)]
        if events is None
        else events
    )
    plan = SimpleNamespace(
        flops_per_token=1e9,
        world_size=4,
        layout=SimpleNamespace(data_parallel_size=2),
        spec=SimpleNamespace(data=SimpleNamespace(unit=unit)),
    )
    state = SimpleNamespace(
        shares=[],
        mesh=SimpleNamespace(group=lambda axis: dist.group.WORLD),
        device=torch.device("cpu"),
        clock=SimpleNamespace(on_gpu=on_gpu),
        wire=SimpleNamespace(totals=lambda: {"gradients": 7, "other": 2**40}),
    )
    tally.heldout = heldout
    loss = heldout.heldout_loss if heldout else ABSENT
    source = SimpleNamespace(summarise=lambda result, evaluated: replace(result, heldout_loss=loss))
    sha256 = write_result(run_of(plan, state, run), tally, source, status=status, step=40)
    return run, sha256


def test_mfu_is_of_the_peak_of_all_devices_whatever_they_share(tmp_path):
    """Two data-parallel ranks of two tensor-parallel ones: four devices."""
    run, sha256 = finished(tmp_path, heldout=EvalEvent(step=40, heldout_loss=1.5))
    result = read_result(run)
    assert (result.status, result.exit_code, result.steps, result.heldout_loss) == ("done", 0, 40, 1.5)
    assert result.tokens_per_s == pytest.approx(2000.0)
    assert result.samples_per_s is ABSENT
    assert result.mfu == pytest.approx(2000.0 * 1e9 / (4 * 1e12))
    assert (result.final_loss, result.weights_sha256) == (42.0, sha256)
    assert result.peak_memory_bytes > 50 * 2**20
    assert result.goodput == result.time_s.goodput


def test_bytes_on_the_wire_are_those_of_all_ranks_where_they_are_counted(tmp_path):
    counted = read_result(finished(tmp_path / "cpu")[0]).wire_bytes
    assert counted == {"gradients": 7, "parameters": 0, "other": 2**40}
    assert read_result(finished(tmp_path / "gpu", on_gpu=True)[0]).wire_bytes is ABSENT


def test_pictures_are_counted_by_the_sample(tmp_path):
    result = read_result(finished(tmp_path, unit="samples")[0])
    assert result.samples_per_s == pytest.approx(16.0)
    assert result.tokens_per_s is ABSENT


def test_a_run_that_makes_no_step_has_no_last_loss(tmp_path):
    assert read_result(finished(tmp_path, events=[])[0]).final_loss is None


@pytest.mark.parametrize(
    ("generation", "noted", "written"), [(None, False, True), ("1", True, True), ("1", False, False)]
)
def test_a_stopped_run_leaves_a_result_where_somebody_asked_it_to_stop(
    tmp_path, monkeypatch, generation, noted, written
):
    """Else its supervisor starts it again."""
    monkeypatch.delenv(GENERATION, raising=False)
    if generation:
        assert generations.begin(RunDir(tmp_path)) == 1
        monkeypatch.setenv(GENERATION, generation)
    monkeypatch.setattr(generations, "was_stop_noted", lambda run, number: noted and number == 1)
    run, _ = finished(tmp_path, status="stopped")
    assert run.result_json.exists() == written
    if written:
        assert (read_result(run).status, read_result(run).exit_code) == ("stopped", 6)


def test_a_worker_of_an_older_start_leaves_no_result(tmp_path, monkeypatch):
    monkeypatch.setenv(GENERATION, str(generations.begin(RunDir(tmp_path))))
    generations.begin(RunDir(tmp_path))
    with raises(WorkerError, generations.FENCED, "start 2 owns"):
        finished(tmp_path)
    assert not RunDir(tmp_path).result_json.exists()


def test_other_ranks_write_no_result_and_agree_on_the_largest_peak(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(module.dist, "all_reduce", lambda memory, how: asked.append((int(memory) > 0, how)))
    run, _ = finished(tmp_path, on_gpu=True)
    assert not run.result_json.exists()
    assert asked == [(True, dist.ReduceOp.MAX)]
