"""Replica groups as threads: whatever dies, returns or fails, every sample is taken once and all groups agree.

A group's model is a count of the samples that it has seen: its gradient is one at each position that it reads, so that
the weights tell which samples the steps that counted were made of.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.drawing import slow_after
from lab.engine_runs import CPU, Numbered, run_of
from lab.quorum import DiedError, FakeComm, Network
from lab.supervisor import PlayedSupervisor
from torch import nn

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.codec import WireMeter
from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.elastic.membership import HealFailedError
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.replica_groups import HEALS_WITHOUT_LOST, STAGED, START, ReplicaGroups
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.shortage import PassesOutOfMemory
from trainspec_cli.engine.run.training_run import TrainProgress
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.run.channel.messages import ExpectGroups
from trainspec_cli.run.folder.event_types.events import StepEvent
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

STEPS, BATCH, SAMPLES = 12, 7, 200
WAIT_S = 60
RESILIENCE = ResilienceSpec(mode="elastic", sdc_check=1)
SPEC = RunSpec(
    model=DecoderModel(1, 32, 2, 1, 16, 48, 50),
    data=DataSpec(seq_len=1, source="python_stdlib"),
    optim=OptimSpec(lr=1.0),
    batching=BatchingSpec(global_batch_size=BATCH, micro_batch_size=1),
    train=TrainSection(max_steps=STEPS),
    resilience=RESILIENCE,
)


class Group:
    """One replica group of one rank, trained as `Trainer` does."""

    def __init__(self, lab: Lab, number: int):
        self.lab, self.number = lab, number
        self.weights = torch.zeros(SAMPLES)
        self.share = Share("weights", nn.Parameter(self.weights))
        self.router = SimpleNamespace(tokens_per_expert_E=torch.zeros(2))
        self.noise = torch.zeros(4, dtype=torch.float64)
        self.across: list[tuple[float, float, float]] = []
        """Measurements of each exchange with the other groups: (bytes, seconds, seconds of waiting)."""
        state = SimpleNamespace(
            clock=StepClock(CPU),
            device=CPU,
            links=SimpleNamespace(
                note_across=lambda *seen: self.across.append(seen),
                is_due=lambda step: number == 0 and lab.is_sampled(step),
            ),
            shares=[self.share],
            parts=[],
            late_sums=[],
            routers=[self.router],
            stages=SimpleNamespace(noise=SimpleNamespace(sums=self.noise)),
            held=SimpleNamespace(tensors=lambda: [self.weights]),
            mesh=SimpleNamespace(data_rank=0, layout=Layout()),
            compression=lab.compression,
            wire=WireMeter(),
            await_sums=lambda: lambda: None,
        )
        plan = SimpleNamespace(
            spec=lab.spec,
            replica_groups=lab.groups,
            layout=Layout(),
            micro_batch_size=1,
            grad_accum_steps=1,
            num_nodes=1,
        )
        journal = Journal(lab.run, 0, lab.spec, number)
        self.supervisor = PlayedSupervisor()
        run = run_of(plan, state, lab.run, journal, number)
        run.supervisor = self.supervisor
        self.stop = run.stop
        self.coordinator = ReplicaGroups(run, Numbered())
        self.pace = StepPace(lab.spec)
        self.state, self.progress, self.error = state, TrainProgress(), None
        self.restores = 0
        self.failed_in_passes: bool | None = None
        self.rates: list[float] = []
        self.led: list[int] = []
        """Steps that this group made as the leading one."""
        self.thread = threading.Thread(target=self._run, name=f"{number}/{id(self)}", daemon=True)

    def _run(self) -> None:
        try:
            self.train()
        except (DiedError, HealFailedError, WorkerError) as error:
            self.error = error
        finally:
            self.lab.network.lose_thread(self.thread.name)

    def train(self) -> None:
        while self.pace.batch(self.progress):
            start = self.coordinator.begin(self.progress, self.restore)
            self.progress = start.progress
            if start.stop:
                break
            self.step()
        self.coordinator.leave()

    def restore(self) -> TrainProgress:
        """The newest checkpoint: that of step 2."""
        self.restores += 1
        self.weights[: 2 * BATCH] = 1.0
        return TrainProgress(2, 2 * BATCH)

    def step(self) -> None:
        """Make a step, as `train_step` does; where memory runs out in its passes, again."""
        step = self.progress.step
        self.lab.reached(self, "take", step)
        samples = self.coordinator.take(self.pace.coming(self.progress, 2))
        self.share.parameter.grad = None
        self.coordinator.begin_passes(self.state, len(samples.micro_batches))
        seen = torch.zeros(SAMPLES)
        for (positions,) in samples.micro_batches:
            seen[positions] += 1
        loss = seen.sum()
        (self.share.parameter * seen).sum().backward()  # its packet goes
        try:
            self.lab.reached(self, "passes", step)
        except PassesOutOfMemory:
            self.coordinator.abandon_passes(self.state)
            self.failed_in_passes = self.coordinator._membership.failed
            self.step()
            return
        self.router.tokens_per_expert_E.fill_(1.0)
        self.noise.fill_(0.5)
        self.lab.reached(self, "reduce", step)
        self.coordinator.reduce(self.state, loss)
        self.lab.reached(self, "commit", step)
        if not self.coordinator.commit():
            return
        assert int(loss) == samples.step_samples == samples.global_tokens, "the loss is a sum over all groups"
        assert self.router.tokens_per_expert_E.tolist() == [len(samples.groups)] * 2
        assert self.noise.tolist() == [len(samples.groups) / 2] * 4, "and so is what shows the noise"
        assert self.share.gradient is not None
        self.weights += self.share.gradient
        self.rates.append(samples.lr_factor)
        self.progress = TrainProgress(step + 1, self.progress.samples + samples.step_samples)
        if self.coordinator.leads:
            self.led.append(step + 1)
        figures: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "step_time_s": 0.001, "time_s": {}, "skipped": False}
        figures |= {"samples": samples.step_samples, "group": samples.group}
        figures |= {"groups": samples.groups, "took": samples.took}
        self.coordinator._run.journal.write(StepEvent(step=step + 1, **figures))
        self.coordinator.rate = self.lab.speeds.get(self.number, 0.0)
        self.coordinator.note_step(step + 1, 0.001)


class Lab:
    def __init__(self, folder: Any, patch: pytest.MonkeyPatch, groups: int, spec: RunSpec = SPEC):
        self.run, self.groups, self.spec, self._patch = RunDir(folder), groups, spec, patch
        self.network = Network()
        self.network.install(patch)
        self.acts: dict[tuple[int, str, int], Callable[[Group], None]] = {}
        """(group, phase, step) -> what happens to the group there, once."""
        self.started: list[Group] = []
        self.compression = Compression()
        self.speeds: dict[int, float] = {}
        """Samples that a group computes a second, which it knows after a step; others never know theirs."""
        self.is_sampled: Callable[[int], bool] = lambda step: False
        """True if the first group measures the links in the step after this number of updates."""

    def reached(self, group: Group, phase: str, step: int) -> None:
        if act := self.acts.pop((group.number, phase, step), None):
            act(group)

    def start(self, number: int, generation: int = 1) -> Group:
        self._patch.setenv(START, str(generation))
        self.started.append(Group(self, number))
        self.started[-1].thread.start()
        return self.started[-1]

    def start_all(self, generation: int = 1) -> list[Group]:
        return [self.start(number, generation) for number in range(self.groups)]

    def wait(self) -> None:
        for group in self.started:
            group.thread.join(WAIT_S)
            assert not group.thread.is_alive(), f"group {group.number} hangs at step {group.progress.step}"

    def wait_for_step(self, group: Group, step: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while group.progress.step < step:
            assert group.thread.is_alive(), f"group {group.number} ended at step {group.progress.step}"
            assert time.monotonic() < deadline, f"group {group.number} hangs at step {group.progress.step}"
            group.thread.join(0.005)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Events of `kind` in the log of the leading group."""
        return [event for event in read_events(self.run.events(0)) if event["type"] == kind]

    def check_all_done(self) -> None:
        """The groups that live to the end have the same weights, of every sample once."""
        self.wait()
        ended = [group for group in self.started if group.error is None]
        assert ended and {group.progress.step for group in ended} == {STEPS}
        taken = ended[0].progress.samples
        for group in ended:
            assert group.weights[:taken].eq(1).all() and not group.weights[taken:].any()
        assert [event["step"] for event in self.log("step")] == list(range(1, STEPS + 1))


@pytest.fixture
def lab(one_process: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lab]:
    monkeypatch.setattr("trainspec_cli.engine.run.replica_groups.WAIT_S", 0.002)
    return lambda groups, spec=SPEC: Lab(tmp_path, monkeypatch, groups, spec)


def die(_group: Group) -> None:
    raise DiedError


def run_out(_group: Group) -> None:
    raise PassesOutOfMemory(1)


def wait_for_return(group: Group) -> None:
    """Hold the run up until the other of two groups is there again."""
    group.lab.network.wait_for(lambda: group.lab.network.living == 2)


def with_resilience(**changes: Any) -> RunSpec:
    return replace(SPEC, resilience=replace(RESILIENCE, **changes))


def test_portions_of_unequal_size_make_up_the_batch(lab: Callable[..., Lab]) -> None:
    """Three groups share seven samples."""
    trial = lab(3)
    trial.is_sampled = lambda step: step in (3, 7)
    trial.start_all()
    trial.check_all_done()
    assert {event["samples"] for event in trial.log("step")} == {BATCH}
    assert sorted(len(group.led) for group in trial.started) == [0, 0, STEPS]
    for group in trial.started:
        assert [sent_bytes for sent_bytes, *_ in group.across] == [2 * SAMPLES * 4 * 2 / 3] * 2
        assert all(seconds > 0 and waited_s > 0 for _, seconds, waited_s in group.across)
    assert trial.log("recovery") == trial.log("retry") == []


def test_more_groups_than_samples(lab: Callable[..., Lab]) -> None:
    """A group without samples exchanges an empty part; when another is lost, it takes its sample."""
    trial = lab(3, replace(SPEC, batching=BatchingSpec(global_batch_size=2, micro_batch_size=1)))
    trial.acts[2, "take", 4] = die
    trial.start_all()
    trial.check_all_done()
    assert [event["samples"] for event in trial.log("step")] == [2] * STEPS
    assert [event["groups"] for event in trial.log("step")] == [[0, 1, 2]] * 4 + [[0, 1]] * (STEPS - 4)


@pytest.mark.parametrize("phase", ["take", "passes", "reduce"])
def test_a_step_that_loses_a_group_is_made_again_by_the_others(lab: Callable[..., Lab], phase: str) -> None:
    trial = lab(3)
    trial.acts[1, phase, 4] = die
    trial.start_all()
    trial.check_all_done()
    assert [event["step"] for event in trial.log("retry")] == [5]
    (left,) = trial.log("recovery")
    assert (left["step"], left["change"], left["group"], left["lost_steps"]) == (5, "left", 1, 1)
    assert [event["groups"] for event in trial.log("step")] == [[0, 1, 2]] * 4 + [[0, 2]] * (STEPS - 4)


def test_a_step_whose_passes_are_cut_short_after_a_packet_went_is_made_again_by_all(lab: Callable[..., Lab]) -> None:
    """The group that ran out of memory continues in place; the others have what it sent before."""
    trial = lab(3)
    trial.acts[1, "passes", 4] = run_out
    _, short, _ = trial.start_all()
    trial.check_all_done()
    assert short.failed_in_passes, "it does not take part in the try any more"
    assert [event["step"] for event in trial.log("retry")] == [5]
    assert [event["groups"] for event in trial.log("step")] == [[0, 1, 2]] * STEPS


def test_passes_that_are_cut_short_before_anything_was_sent_cost_the_others_nothing(lab: Callable[..., Lab]) -> None:
    """In a step that shows the links all packets are held back."""
    trial = lab(3)
    trial.is_sampled = lambda step: step == 4
    trial.acts[1, "passes", 4] = run_out
    _, short, _ = trial.start_all()
    trial.check_all_done()
    assert short.failed_in_passes is False
    assert trial.log("retry") == []


def test_what_a_packet_loses_in_few_bits_is_added_to_the_same_packet_of_the_next_step() -> None:
    """Packets of the same size are distinguished by their number."""
    asked: list[Any] = []
    compression = SimpleNamespace(of=lambda *given, **how: asked.append((given, how)) or "format")
    membership = SimpleNamespace(sum_=lambda *given: asked.append(given))
    groups: Any = SimpleNamespace(_membership=membership, _run=SimpleNamespace(plan=SimpleNamespace(num_nodes=1)))
    packet = torch.ones(5)
    state: Any = SimpleNamespace(compression=compression, device=CPU)
    ReplicaGroups._sum_packet(groups, state, 3, packet)
    assert asked == [(("groups.3.5", 5), {"inside": True}), (packet, "format")]


@pytest.mark.parametrize(("gradients", "warnings"), [("int8", 1), ("bf16", 0), ("full", 0)])
def test_a_group_that_heals_says_that_what_its_gradients_had_lost_is_gone(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch, gradients: str, warnings: int
) -> None:
    monkeypatch.setenv(START, "1")
    trial = lab(1)
    compression = trial.compression = Compression(inside=gradients, across=gradients)
    exchange = compression.of("groups.0.4", 4, inside=True)
    if exchange is not None and exchange.feedback is not None:
        exchange.feedback.committed.fill_(0.5)
    group = Group(trial, 0)
    membership = group.coordinator._membership
    agree = membership.agree
    membership.agree = lambda step: replace(agree(step), healed=True)  # type: ignore[method-assign]
    group.coordinator.begin(TrainProgress(7), group.restore)
    group.coordinator.leave()
    own = read_events(trial.run.group_events(0, 0))
    assert [(event["step"], event["message"]) for event in own] == [(7, HEALS_WITHOUT_LOST)] * warnings
    assert not any(feedback.committed.any() for feedback in compression.feedbacks.values())


def test_an_exchange_through_the_host_is_in_the_log_once(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeComm, "staged_because", "no backend")
    trial = lab(2)
    trial.start_all()
    trial.check_all_done()
    assert [event["message"] for event in trial.log("warning")] == [STAGED + "no backend"]


def test_two_groups_that_leave_at_once_cost_as_much_as_one(lab: Callable[..., Lab]) -> None:
    trial = lab(3)
    trial.acts[0, "take", 4] = trial.acts[1, "take", 4] = die
    trial.start_all()
    trial.check_all_done()
    first, second = trial.log("recovery")
    assert [first["group"], second["group"]] == [0, 1]
    assert first["lost_steps"] >= 1 and first["stall_s"] > 0
    assert (second["lost_steps"], second["stall_s"]) == (0, 0.0)


def test_a_group_that_comes_back_heals_and_takes_its_portion_again(lab: Callable[..., Lab]) -> None:
    trial = lab(2)
    trial.acts[1, "take", 2] = die
    trial.acts[0, "take", 6] = wait_for_return
    first, second = trial.start_all()
    second.thread.join(WAIT_S)
    back = trial.start(1, generation=2)
    trial.check_all_done()
    assert back.restores == 0, "it heals from the other group, not from a checkpoint"
    assert [(event["change"], event["group"]) for event in trial.log("recovery")] == [("left", 1), ("joined", 1)]
    assert trial.log("step")[-1]["groups"] == [0, 1]
    assert first.led == list(range(1, STEPS + 1)), "who came back does not lead"


def test_the_next_group_leads_when_the_leading_one_dies(lab: Callable[..., Lab]) -> None:
    trial = lab(3)
    trial.acts[0, "reduce", 5] = die
    trial.start_all()
    trial.check_all_done()
    assert trial.started[0].led == [1, 2, 3, 4, 5]
    assert sorted(trial.started[1].led + trial.started[2].led) == list(range(6, STEPS + 1))


def test_a_group_whose_exchange_fails_after_the_others_heals_from_them(lab: Callable[..., Lab]) -> None:
    """It alone has not made the step, though its samples are in the others' sum."""
    trial = lab(2)
    trial.acts[1, "commit", 3] = lambda group: group.coordinator._membership._drop(RuntimeError("lost"))
    trial.start_all()
    trial.check_all_done()
    assert len(trial.log("retry")) == 0, "the leading group has made it"
    own = read_events(trial.run.group_events(1, 0))
    assert [event["step"] for event in own if event["type"] == "step"] == [
        step for step in range(1, STEPS + 1) if step != 4
    ]


@pytest.mark.parametrize("seed", slow_after(2, range(8)))
def test_random_deaths_and_returns(lab: Callable[..., Lab], seed: int) -> None:
    """Groups die anywhere, up to all but one, and return immediately."""
    trial, generator = lab(3), random.Random(seed)
    for step in generator.sample(range(1, STEPS), 5):
        trial.acts[generator.randrange(2), generator.choice(["take", "passes", "reduce", "commit"]), step] = die
    *living, survivor = trial.start_all()
    while survivor.thread.is_alive():
        for number, group in enumerate(living):
            if group.error is not None:
                group.thread.join(WAIT_S)
                living[number] = trial.start(number, generation=2)
        survivor.thread.join(0.005)
    for group in trial.started:  # one that comes back after the last step waits for the others
        group.stop.requested = True
    trial.wait()
    assert sum(isinstance(group.error, DiedError) for group in trial.started) > 1
    for group in (group for group in trial.started if group.progress.step == STEPS):
        assert group.weights[: STEPS * BATCH].eq(1).all() and not group.weights[STEPS * BATCH :].any()
    assert survivor.progress == TrainProgress(STEPS, STEPS * BATCH)


def test_who_heals_from_a_group_that_dies_meanwhile_ends(lab: Callable[..., Lab]) -> None:
    """Its state is half one group's and half another's."""
    trial = lab(2)
    trial.acts[1, "take", 2] = die
    trial.acts[0, "take", 6] = wait_for_return
    first, second = trial.start_all()
    second.thread.join(WAIT_S)
    first.coordinator._membership._state = lambda: die(first)  # type: ignore[method-assign]
    back = trial.start(1, generation=2)
    trial.wait()
    assert isinstance(first.error, DiedError)
    assert isinstance(back.error, HealFailedError)


def test_groups_restore_where_none_holds_the_state(lab: Callable[..., Lab]) -> None:
    trial = lab(2)
    trial.start_all(generation=2)
    trial.wait()
    assert {group.restores for group in trial.started} in ({1}, {0, 1}), "each does, or one heals from the other"
    for group in trial.started:
        assert group.progress == TrainProgress(STEPS, STEPS * BATCH)
        assert group.weights[: STEPS * BATCH].eq(1).all()
    assert trial.log("step")[0]["step"] == 3


def test_the_first_step_waits_for_all_expected_groups(lab: Callable[..., Lab]) -> None:
    trial = lab(2)
    first = trial.start(0)
    first.thread.join(0.1)
    assert first.thread.is_alive() and first.progress.step == 0
    trial.start(1)
    trial.check_all_done()


def test_one_group_alone_goes_on_where_the_supervisor_expects_no_other(lab: Callable[..., Lab]) -> None:
    trial = lab(2)
    group = trial.start(0)
    group.thread.join(0.1)
    assert group.thread.is_alive() and group.progress.step == 0
    group.supervisor.deliver(ExpectGroups(1))
    trial.check_all_done()


def test_too_few_groups_wait_and_can_be_stopped(lab: Callable[..., Lab]) -> None:
    trial = lab(2, with_resilience(min_groups=2))
    trial.acts[1, "take", 3] = die
    first, _ = trial.start_all()
    trial.wait_for_step(first, 3)
    first.thread.join(0.1)
    assert first.thread.is_alive() and first.progress.step == 3
    first.stop.requested = True
    trial.wait()
    assert first.progress == TrainProgress(3, 3 * BATCH)


def test_a_request_to_one_group_stops_all_at_one_step(lab: Callable[..., Lab]) -> None:
    trial = lab(3)
    trial.acts[2, "commit", 4] = lambda group: setattr(group.stop, "requested", True)
    trial.start_all()
    trial.wait()
    assert {group.progress.step for group in trial.started} == {5}
    assert {group.error for group in trial.started} == {None}
    assert not any(group.coordinator.finished_without for group in trial.started)


def test_a_group_that_comes_back_when_the_run_is_done_leaves_it_as_it_is(lab: Callable[..., Lab]) -> None:
    trial = lab(2)
    write_json(trial.run.result_json, {"status": "done"})
    late = trial.start(1, generation=2)
    trial.wait()
    assert late.coordinator.finished_without and late.progress.step == 2, "from the checkpoint, no further"


@pytest.mark.parametrize(("groups", "named"), [(3, "group 1 differ"), (2, "groups 0, 1 differ")])
def test_a_flipped_bit_ends_every_group_and_names_the_wrong_one(
    lab: Callable[..., Lab], groups: int, named: str
) -> None:
    trial = lab(groups)
    trial.acts[1, "take", 3] = lambda group: group.weights.view(torch.int32)[150].bitwise_xor_(1)
    trial.start_all()
    trial.wait()
    for group in trial.started:
        assert isinstance(group.error, WorkerError) and group.error.problems[0].code == "diverged"
        assert f"{named} " in str(group.error) and "after step 4" in str(group.error)


@pytest.mark.parametrize(("interval", "found_after"), [(5, 5), (None, None)])
def test_weights_are_compared_every_so_many_steps_or_never(
    lab: Callable[..., Lab], interval: int | None, found_after: int | None
) -> None:
    trial = lab(3, with_resilience(sdc_check=interval))
    trial.acts[1, "take", 2] = lambda group: group.weights.view(torch.int32)[150].bitwise_xor_(1)
    trial.start_all()
    trial.wait()
    told = {str(group.error) for group in trial.started}
    if found_after is None:
        assert told == {"None"}
        assert {group.progress.step for group in trial.started} == {STEPS}
    else:
        assert all(f"after step {found_after}" in words for words in told)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3 / BATCH), ("sqrt", (3 / BATCH) ** 0.5), ("none", 1.0)])
def test_a_shrunken_batch_changes_samples_and_learning_rate(lab: Callable[..., Lab], rule: Any, factor: float) -> None:
    trial = lab(2, replace(SPEC, batching=replace(SPEC.batching, on_loss="shrink", shrink_lr=rule)))
    trial.acts[1, "take", 2] = die
    first, _ = trial.start_all()
    trial.check_all_done()
    assert first.rates == pytest.approx([1.0, 1.0] + [factor] * (STEPS - 2))
    assert [event["samples"] for event in trial.log("step")] == [BATCH] * 2 + [3] * (STEPS - 2)


def taken(trial: Lab, group: int) -> list[int]:
    """Return the samples that a group took in each step it made."""
    events = read_events(trial.run.group_events(group, 0))
    return [event["took"][1] for event in events if event["type"] == "step"]


def given(trial: Lab) -> list[dict[str, Any]]:
    return read_events(trial.run.directives) if trial.run.directives.exists() else []


@pytest.mark.parametrize(
    ("speeds", "counts", "reason", "before_s", "expected_s"),
    [
        ((30.0, 10.0, 30.0), (3, 1, 3), ("group 1 ", " 10 samples ", "30)"), 0.2, 0.1),
        ((10.0, 10.0, 50.0), (1, 1, 5), ("group 2 ", " 50 samples ", "10)"), 0.3, 0.1),
        ((30.0, 10.0, 0.0), (4, 1, 2), ("group 1 ", " 10 samples ", "20)"), 0.2, 4 / 30),
    ],
    ids=["a slow group", "a fast group", "an unknown rate is the usual one"],
)
def test_groups_take_samples_by_their_speed(
    lab: Callable[..., Lab],
    speeds: tuple[float, ...],
    counts: tuple[int, ...],
    reason: tuple[str, ...],
    before_s: float,
    expected_s: float,
) -> None:
    """They know their speeds after the first step; the change is written once, by the leading group."""
    trial = lab(3)
    trial.speeds = dict(enumerate(speeds))
    trial.start_all()
    trial.check_all_done()
    assert [taken(trial, group) for group in range(3)] == [
        [even] + [count] * (STEPS - 1) for even, count in zip((3, 2, 2), counts, strict=True)
    ]
    (directive,) = given(trial)
    assert (directive["type"], directive["kind"], directive["step"], directive["applied"]) == (
        *("directive", "group_shares", 1, True),
    )
    assert tuple(directive["counts"]) == counts and all(fact in directive["reason"] for fact in reason)
    assert (directive["before_s"], directive["expected_s"]) == pytest.approx((before_s, expected_s))
    assert [event["number"] for event in trial.log("directive")] == [directive["number"]], "the run's log has it too"


@pytest.mark.parametrize("speeds", [{0: 10.0, 1: 10.9, 2: 10.0}, {}, {1: 5.0}])
def test_groups_about_as_fast_as_one_another_take_equal_parts(
    lab: Callable[..., Lab], speeds: dict[int, float]
) -> None:
    """Within a tenth, or as far as anything is known."""
    trial = lab(3, replace(SPEC, batching=replace(SPEC.batching, global_batch_size=15)))
    trial.speeds = speeds
    trial.start_all()
    trial.check_all_done()
    assert [taken(trial, group) for group in range(3)] == [[5] * STEPS] * 3
    assert given(trial) == []


def test_weights_hold_for_the_groups_that_are_left(lab: Callable[..., Lab]) -> None:
    """Shares that change because a group has left are no decision of the scheduler."""
    trial = lab(3)
    trial.speeds = {0: 30.0, 1: 10.0, 2: 30.0}
    trial.acts[0, "take", 6] = die
    trial.start_all()
    trial.check_all_done()
    assert [taken(trial, group) for group in (1, 2)] == [[2] + [1] * 5 + [2] * 6, [2] + [3] * 5 + [5] * 6]
    (directive,) = given(trial)
    assert directive["step"] == 1


def test_a_directive_counts_the_samples_of_a_shrunken_batch(lab: Callable[..., Lab]) -> None:
    """Two of three groups take part: 6 of 9 samples, in the parts that it says."""
    trial = lab(3, replace(SPEC, batching=replace(SPEC.batching, global_batch_size=9, on_loss="shrink")))
    trial.acts[1, "take", 2] = die
    trial.acts[0, "commit", 5] = lambda group: group.lab.speeds.update({0: 20.0, 2: 10.0})
    trial.start_all()
    trial.wait()
    (directive,) = given(trial)
    assert directive["counts"] == [4, 2] == [taken(trial, 0)[-1], taken(trial, 2)[-1]]


def test_a_growing_batch_ends_with_the_last_sample(lab: Callable[..., Lab]) -> None:
    """Its last step takes what is left, though a group is away for half of the run."""
    growing = replace(
        SPEC.batching, schedule=BatchScheduleSpec(kind="ramp", stages=(RampStage(2 * BATCH, 10), RampStage(44, 18)))
    )
    trial = lab(2, replace(SPEC, batching=growing))
    trial.acts[1, "take", 3] = die
    trial.start_all()
    trial.wait()
    survivor = trial.started[0]
    assert [event["samples"] for event in trial.log("step")] == [7, 7, 10, 10, 10, 18, 22]
    assert survivor.progress.samples == STEPS * BATCH
    assert survivor.weights[: STEPS * BATCH].eq(1).all() and not survivor.weights[STEPS * BATCH :].any()
