"""The coordinator of one of several far-apart sites.

A site trains by itself, in any layout. Every few steps each of its ranks sends an outer gradient of one fragment to the
other sites, and some steps later applies the sum of all sites'. What a round decides holds until the next one is
applied: who is a member, and which samples each member takes. The last round, after the last step, leaves all sites
with the same weights.

Of ranks that hold the same shares (replicas along `dp_replicate`) the first speaks, and hands on what it hears.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples, StepStart
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.run.folder.event_types.events import RecoveryEvent, WarningEvent
from trainspec_cli.wings.sites.engine.outer_state import OuterState
from trainspec_cli.wings.sites.engine.site_voice import SiteVoice, WindowPace
from trainspec_cli.wings.sites.events import ExchangeEvent
from trainspec_cli.wings.sites.meeting import RoundRecord
from trainspec_cli.wings.sites.schedule import BEGINNING, SiteExchange, newest_applied

WAIT_S = 0.01
TROUBLE_S = 5.0
"""A wait for the meeting point that is as long as this is said."""


@dataclass(frozen=True)
class Seen:
    """What all ranks of the site have."""

    answered: bool
    decided: bool
    """The round that is waited for has arrived."""
    follows: bool
    """The site is no member: it has to catch up."""
    stop: bool
    """Some rank was asked to stop."""


class FarSites(Coordinator):
    waits_for_groups = True
    merges_at_end = True

    def __init__(self, run: TrainingRun, source: DataSource):
        super().__init__(run, source)
        self._sites = run.plan.spec.resilience.sites
        assert self._sites.site is not None, "a site is started with its number"
        self.site = self._sites.site
        codec = GRADIENT_CODECS[self._sites.format]
        sites = self._sites
        self._outer = OuterState(
            run.state.shares, sites.fragments, codec, sites.outer_lr, sites.outer_momentum, sites.keep
        )
        run.state.beyond.update(self._outer.saved(f"{run.plan.layout.describe()}.{dist.get_rank()}"))
        self._voice = SiteVoice(run, lambda: self._outer.applied)
        self._record: RoundRecord | None = None
        """The decision that holds now; None before the first."""
        self._applied: list[SiteExchange] = []
        """The exchanges that were applied since the start, from the newest that a checkpoint has on."""
        self._progress = TrainProgress()
        self._taken = 0
        """Samples of the step that is being made."""
        self._pace = WindowPace(follows=self._spec.scheduler.mode == "auto")

    @property
    def _next(self) -> SiteExchange | None:
        """Return the exchange that is to be applied next; None where the run is over."""
        return self._record.following if self._record else BEGINNING

    # Rounds

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        self._pace.pause()
        self._progress = progress
        keeps_up = self._open() and self._keep_up()
        self._pace.go_on()
        return StepStart(self._progress, stop=not keeps_up)

    def bring_together(self, progress: TrainProgress) -> None:
        """Take part in the rounds that are left, whoever asks for a stop meanwhile: without them the run has no end."""
        self._progress = progress
        self._open(heeds_stop=False)
        self._keep_up(heeds_stop=False)

    def _open(self, *, heeds_stop: bool = True) -> bool:
        """Connect at the first call; return False where the run was asked to stop."""
        if self._voice.is_open:
            return True
        outer = self._outer
        step = self._progress.step
        if outer.is_new and step:
            raise _no_shared_weights(step)
        if outer.is_new:
            outer.begin()
        self._voice.open()
        seen = self._wait(outer.applied + 1, lambda seen: seen.answered, heeds_stop=heeds_stop)
        if seen is None:
            return False
        if outer.applied >= 0:
            self._record = self._voice.read_record()
            assert self._record is not None, "the meeting point refuses a site whose newest round it has forgotten"
            self._applied.append(self._record.exchange)
        if seen.follows:
            return self._follow(heeds_stop=heeds_stop)
        if outer.sent_round:
            self._post(outer.sent_round, outer.sent)
        return True

    def _keep_up(self, *, heeds_stop: bool = True) -> bool:
        """Send and apply what is due at this step; return False where the run was asked to stop meanwhile."""
        outer = self._outer
        while exchange := self._next:
            step = self._progress.step
            if exchange.round and exchange.sent_at == step and not outer.sent_round:
                self._post(exchange.round, outer.encode(exchange.round, exchange.fragments))
            if exchange.applied_at != step:
                return True
            seen = self._wait(exchange.round, lambda seen: seen.decided or seen.follows, heeds_stop=heeds_stop)
            if seen is None:
                return False
            if not (self._follow(heeds_stop=heeds_stop) if seen.follows else self._merge(exchange)):
                return False
        return True

    def _post(self, number: int, encoded: bytes) -> None:
        saved = newest_applied(self._applied, self._run.run_dir.newest_step)
        self._applied = [exchange for exchange in self._applied if exchange.round >= saved]
        work = self._outer.sent_work
        digest = self._outer.digest
        self._voice.send(number, encoded, work, self._pace.cut(), digest, saved)

    def _merge(self, exchange: SiteExchange) -> bool:
        """Apply a round as one that has trained; where it has found this site lost, catch up."""
        outer = self._outer
        own = outer.sent
        record, parts = self._voice.take(exchange.round)
        if exchange.round:
            if self.site in record.included:
                outer.note_merged(exchange.fragments)
            self._apply(record, {self.site: own, **parts})
        if record.following is None:
            outer.take_shared()
        self._note(record)
        if self.site in record.members or record.following is None:
            return True
        return self._follow()

    def _follow(self, *, heeds_stop: bool = True) -> bool:
        """Apply rounds without training, until this site is a member again or the run is over."""
        outer = self._outer
        self._warn("this site was left out: it catches up, and what it had not sent yet is given up")
        self._voice.follow(outer.applied)
        while exchange := self._next:
            number = exchange.round
            if not self._wait(number, lambda seen: seen.decided, heeds_stop=heeds_stop):
                return False
            record, parts = self._voice.take(number)
            if number:
                self._apply(record, parts)
            self._note(record)
            if self.site in record.joined:  # rounds of before it was lost name it as a member too
                break
            self._voice.follow(number)
        outer.take_shared()
        self._voice.join()
        assert self._record is not None, "the round that this site goes on from was applied"
        self._progress = TrainProgress(self._record.exchange.applied_at, self._progress.samples)
        return True

    def _apply(self, record: RoundRecord, parts: dict[int, bytes]) -> None:
        if record.diverged:
            raise _diverged(record.diverged, self._progress.step)
        encoded = [parts[site] for site in record.included]
        own = record.included.index(self.site) if self.site in record.included else None
        self._outer.apply(record.exchange.fragments, encoded, record.weights, own)

    def _note(self, record: RoundRecord) -> None:
        """Note a round as applied, and write what it says of the sites."""
        self._outer.note_applied(record.round)
        self._record = record
        self._applied.append(record.exchange)
        for notice in self._voice.cut_notices():
            self._warn(notice)
        if dist.get_rank():
            return
        step = self._progress.step
        voice = self._voice
        self._run.journal.write(
            ExchangeEvent(
                step=step,
                round=record.round,
                sites=record.included,
                members=record.members,
                waited_s=voice.cut_waited_s(),
                sent_bytes=voice.sent_bytes,
                received_bytes=voice.received_bytes,
            )
        )
        for change, sites in (("site_left", record.lost), ("site_joined", record.joined)):
            for site in sites:
                self._run.journal.write(
                    RecoveryEvent(step=step, change=change, group=site, stall_s=None, lost_steps=None)
                )

    def _wait(self, number: int, is_enough: Callable[[Seen], bool], *, heeds_stop: bool) -> Seen | None:
        """Wait until all ranks have seen enough of round `number`; None where the run was asked to stop meanwhile."""
        began_s = time.perf_counter()
        warned = False
        while True:
            seen = self._look(number)
            if is_enough(seen):
                self._voice.note_waited(time.perf_counter() - began_s)
                return seen
            if seen.stop and heeds_stop:
                return None
            self._voice.check()
            trouble = self._voice.trouble
            if trouble and not warned and time.perf_counter() > began_s + TROUBLE_S:
                warned = True
                self._warn(
                    f"the meeting point {self._sites.endpoint} is not reached ({trouble}): this site waits for it"
                )
            time.sleep(WAIT_S)

    def _look(self, number: int) -> Seen:
        """Return what every rank of this site has. Called by all of them together."""
        voice = self._voice
        has = [voice.has_answer, voice.has(number), voice.follows, not self._run.stop.requested]
        least = torch.tensor([float(each) for each in has])
        if dist.get_world_size() > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN)
        answered, decided, follows, goes_on = (bool(each) for each in least)
        return Seen(answered, decided, follows, stop=not goes_on)

    def _warn(self, message: str) -> None:
        self._run.journal.write(WarningEvent(step=self._progress.step, message=message))

    # Steps

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        """Take the samples that the decision in force gives to this site."""
        assert self._record is not None, "a round was applied before the first step"
        pieces = self._record.pieces(self.site)
        place = self._progress.step - self._record.window.start
        (start, samples), *following = pieces[place : place + len(steps)]
        own, micro_batches = self.read((start, samples), *following)
        self._taken = samples
        return StepSamples(
            micro_batches,
            own,
            self.division,
            global_tokens=self.count_targets(start, samples),
            step_samples=samples,
            group_samples=samples,
            took=(start, samples),
        )

    def commit(self) -> bool:
        """The step is made, within this site."""
        data = self._spec.data
        self._outer.count(self._taken * (data.seq_len if data.unit == "tokens" else 1))
        self._pace.note(self._taken)
        return True

    def merged(self) -> AbstractContextManager[None]:
        return self._outer.as_weights()

    def leave(self) -> None:
        super().leave()
        self._voice.close()


def _no_shared_weights(step: int) -> WorkerError:
    return WorkerError(
        f"the checkpoint of step {step} holds no shared weights for this layout: it was written in another one, or "
        "without resilience=sites",
        code="no_shared_weights",
        hint="resume in the layout that the run has begun with, or begin a new run with init.from=<this run's folder>",
    )


def _diverged(sites: Sequence[int], step: int) -> WorkerError:
    named = f"site {sites[0]} differ" if len(sites) == 1 else f"sites {', '.join(map(str, sites))} differ"
    return WorkerError(
        f"the shared weights of {named} from the others' at step {step}: a value changed without an exchange, or the "
        "sites began with other weights",
        code="diverged",
        hint="test that site's memory and devices; go on from a checkpoint before the last exchange that agreed",
    )
