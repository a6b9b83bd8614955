"""The coordinator of one of several distant sites.

A site trains independently, in any layout. Every few steps, each of its ranks sends an outer gradient of one fragment
to the other sites, and a few steps later it applies the sum over all sites. A round's decision names the members and
each member's samples. It holds until the next decision is applied. The last round, after the last step, leaves all
sites with the same weights.

Each rank has separate connections (`SiteLink`) for its parameter shares. Among ranks with the same shares (replicas
along `dp_replicate`), only the first rank is connected, and it forwards everything that it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.json_collectives import broadcast_json, gather_json
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples, StepStart
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.recipe.records import convert, from_plain, to_plain
from trainspec_cli.run.folder.event_types.events import RecoveryEvent, WarningEvent
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.wings.sites.engine.outer_state import OuterState
from trainspec_cli.wings.sites.engine.site_link import SiteLink
from trainspec_cli.wings.sites.events import ExchangeEvent
from trainspec_cli.wings.sites.meeting import BEGINNING, RoundRecord, SiteExchange, agreement_of, newest_applied
from trainspec_cli.wings.sites.messages import Sent, SiteHello

WAIT_S = 0.01
TROUBLE_S = 5.0
"""Waiting for the meeting point is reported after this many seconds."""


@dataclass(frozen=True)
class Seen:
    """The combined observations of all ranks of the site."""

    answered: bool
    decided: bool
    """Whether the round that the site is waiting for has arrived."""
    follows: bool
    """Whether the site is not a member and must therefore catch up."""
    stop: bool
    """Whether at least one rank was asked to stop."""


class FarSites(Coordinator):
    """Coordinates one site. Within a step, a site is the only replica group, because outer gradients are exchanged
    between steps."""

    waits_for_groups = True
    merges_at_end = True

    def __init__(self, run: TrainingRun, source: DataSource):
        super().__init__(run, source)
        sites = run.plan.spec.resilience.sites
        assert sites.site is not None, "a site's recipe contains its number"
        self._sites = sites
        self.site = sites.site
        codec = GRADIENT_CODECS[sites.format]
        self._outer = OuterState(
            run.state.shares, sites.fragments, codec, sites.outer_lr, sites.outer_momentum, sites.keep
        )
        run.state.beyond.update(self._outer.saved(f"{run.plan.layout.describe()}.{dist.get_rank()}"))
        mesh = run.state.mesh
        self._copies = mesh.group("dp_replicate")
        self._speaks = mesh.rank("dp_replicate") == 0
        speaking = gather_json(self._speaks, lambda one: convert(bool, one))
        self._speakers = [rank for rank, speaks in enumerate(speaking) if speaks]
        self._is_open = False
        self._link: SiteLink | None = None
        """The rank's connections; None if another rank forwards what it receives."""
        self._waited_s = 0.0
        """Time in seconds that training has waited since the last exchange."""
        self._record: RoundRecord | None = None
        """The decision that currently applies; None before the first decision."""
        self._applied: list[SiteExchange] = []
        """The exchanges applied since the start, preceded by the newest exchange in the loaded checkpoint."""
        self._progress = TrainProgress()
        self._taken = 0
        """Number of samples in the current step."""
        # These determine this site's speed between two exchanges. Waiting for other sites does not count.
        self._busy_s = 0.0
        self._samples = 0
        self._computes_since_s: float | None = None

    @property
    def _next(self) -> SiteExchange | None:
        """The next exchange to apply; None at the end of the run."""
        return self._record.following if self._record else BEGINNING

    # Rounds

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        if self._computes_since_s is not None:
            self._busy_s += time.perf_counter() - self._computes_since_s
        self._progress = progress
        keeps_up = self._open() and self._keep_up()
        self._computes_since_s = time.perf_counter()
        return StepStart(self._progress, stop=not keeps_up)

    def bring_together(self, progress: TrainProgress) -> None:
        """Take part in the remaining rounds even if a stop is requested in the meantime, because the run cannot end
        without them."""
        self._progress = progress
        self._open(heeds_stop=False)
        self._keep_up(heeds_stop=False)

    def _open(self, *, heeds_stop: bool = True) -> bool:
        """Connect on the first call. Return False if the run was asked to stop."""
        if self._is_open:
            return True
        outer = self._outer
        step = self._progress.step
        if outer.is_new and step:
            raise WorkerError(
                f"the checkpoint of step {step} has no shared weights for this layout: it was written in another "
                "layout or without resilience=sites",
                code="no_shared_weights",
                hint="resume in the run's original layout, or start a new run with init.from=<this run's folder>",
            )
        if outer.is_new:
            outer.begin()
        self._is_open = True
        if self._speaks:
            plan = self._run.plan
            sites = self._sites
            assert sites.endpoint and sites.secret, "the launcher has checked these values"
            hello = SiteHello(
                site=self.site,
                rank=self._speakers.index(dist.get_rank()),
                ranks=len(self._speakers),
                batch=plan.spec.batching.global_batch_size,
                applied=outer.applied,
                recipe=agreement_of(plan),
                listen=sites.listen or "",
            )
            secret = read_secret(Path(sites.secret))
            silence_s = plan.spec.resilience.heartbeat_timeout_s
            self._link = SiteLink(sites.endpoint, secret, hello, lambda: outer.applied, silence_s)
        seen = self._wait(outer.applied + 1, lambda seen: seen.answered, heeds_stop=heeds_stop)
        if seen is None:
            return False
        if outer.applied >= 0:
            record = self._link.record if self._link else None
            if self._copies.size() > 1:
                plain = to_plain(record) if record else None
                record = self._hand_on(plain, lambda one: one and from_plain(RoundRecord, one))
            assert record is not None, "the meeting point rejects a site whose newest round it has deleted"
            self._record = record
            self._applied.append(self._record.exchange)
        if seen.follows:
            return self._follow(heeds_stop=heeds_stop)
        if outer.sent_round:
            self._post(outer.sent_round, outer.sent)
        return True

    def _keep_up(self, *, heeds_stop: bool = True) -> bool:
        """Send and apply the exchanges that are due at this step. Return False if the run was asked to stop in the
        meantime."""
        outer = self._outer
        # Several exchanges may be due: without a delay, a sum is applied in the same step in which it is sent, and
        # round 0 is applied at once.
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
        tokens, steps = self._outer.sent_work
        # The rate in samples per second; 0 if the batch size should not depend on the speed.
        rate = self._samples / self._busy_s if self._spec.scheduler.mode == "auto" and self._busy_s else 0.0
        self._busy_s = 0.0
        self._samples = 0
        message = Sent(number, tokens, steps, rate, self._outer.digest, saved)
        if self._link:
            self._link.send(message, encoded)

    def _merge(self, exchange: SiteExchange) -> bool:
        """Apply a round as a site that has trained. If the round declared this site lost, catch up."""
        outer = self._outer
        own = outer.sent
        record, parts = self._take(exchange.round)
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
        """Apply rounds without training until this site is a member again or the run has ended."""
        outer = self._outer
        self._warn("this site is no longer a member: it catches up, and discards the work that it has not sent yet")
        self._note_followed(outer.applied)
        while exchange := self._next:
            number = exchange.round
            if not self._wait(number, lambda seen: seen.decided, heeds_stop=heeds_stop):
                return False
            record, parts = self._take(number)
            if number:
                self._apply(record, parts)
            self._note(record)
            if self.site in record.joined:
                # Only `joined` counts, because rounds from before the site was lost also name it as a member.
                break
            self._note_followed(number)
        outer.take_shared()
        if self._link:
            self._link.joined()
        assert self._record is not None, "the round that this site resumes from has been applied"
        self._progress = TrainProgress(self._record.exchange.applied_at, self._progress.samples)
        return True

    def _note_followed(self, number: int) -> None:
        if self._link:
            self._link.follow(number)

    def _take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, with the outer gradients by site for this rank's shares."""
        record, parts = self._link.take(number) if self._link else (None, {})
        if self._copies.size() == 1:
            assert record is not None, "every rank has a connection"
            return record, parts

        def read(plain: Any) -> tuple[RoundRecord, list[tuple[int, int]]]:
            record, sizes = plain
            return from_plain(RoundRecord, record), [(convert(int, site), convert(int, size)) for site, size in sizes]

        plain = record and [to_plain(record), [[site, len(part)] for site, part in parts.items()]]
        record, sizes = self._hand_on(plain, read)
        content = b"".join(parts.values()) if self._link else bytes(sum(size for _, size in sizes))
        flat = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        dist.broadcast(flat, dist.get_global_rank(self._copies, 0), group=self._copies)
        whole = flat.numpy().tobytes()
        cut = {}
        for site, size in sizes:
            cut[site] = whole[:size]
            whole = whole[size:]
        return record, cut

    def _hand_on(self, plain: Any, read: Callable[[Any], Any]) -> Any:
        """Return the value of the first rank with the same shares."""
        return broadcast_json(plain, read, dist.get_global_rank(self._copies, 0), self._copies)

    def _apply(self, record: RoundRecord, parts: dict[int, bytes]) -> None:
        if record.diverged:
            sites = record.diverged
            named = f"site {sites[0]} differ" if len(sites) == 1 else f"sites {', '.join(map(str, sites))} differ"
            raise WorkerError(
                f"the shared weights of {named} from those of the other sites at step {self._progress.step}: a value "
                "changed without an exchange, or the sites started with different weights",
                code="diverged",
                hint="test that site's memory and devices; continue from a checkpoint before the last good exchange",
            )
        encoded = [parts[site] for site in record.included]
        own = record.included.index(self.site) if self.site in record.included else None
        self._outer.apply(record.exchange.fragments, encoded, record.weights, own)

    def _note(self, record: RoundRecord) -> None:
        """Record that a round was applied, and write the round's events."""
        self._outer.note_applied(record.round)
        self._record = record
        self._applied.append(record.exchange)
        link = self._link
        for notice in link.cut_notices() if link else ():
            self._warn(notice)
        if dist.get_rank():
            return
        step = self._progress.step
        waited_s = self._waited_s
        self._waited_s = 0.0
        self._run.journal.write(
            ExchangeEvent(
                step=step,
                round=record.round,
                sites=record.included,
                members=record.members,
                waited_s=waited_s,
                sent_bytes=link.sent_bytes if link else 0,
                received_bytes=link.received_bytes if link else 0,
            )
        )
        for change, sites in (("site_left", record.lost), ("site_joined", record.joined)):
            for site in sites:
                self._run.journal.write(
                    RecoveryEvent(step=step, change=change, group=site, stall_s=None, lost_steps=None)
                )

    def _wait(self, number: int, is_enough: Callable[[Seen], bool], *, heeds_stop: bool) -> Seen | None:
        """Wait until all ranks have received enough of round `number`. Return None if the run was asked to stop in the
        meantime."""
        began_s = time.perf_counter()
        warned = False
        while True:
            link = self._link
            # The result is the minimum over all ranks, so a rank without a connection reports everything as done.
            heard = (link.is_member is not None, link.has(number), link.is_member is False) if link else (True,) * 3
            has = [*heard, not self._run.stop.requested]
            least = torch.tensor([float(each) for each in has])
            if dist.get_world_size() > 1:
                dist.all_reduce(least, dist.ReduceOp.MIN)
            answered, decided, follows, goes_on = (bool(each) for each in least)
            seen = Seen(answered, decided, follows, stop=not goes_on)
            if is_enough(seen):
                self._waited_s += time.perf_counter() - began_s
                return seen
            if seen.stop and heeds_stop:
                return None
            if self._link and (refusal := self._link.refusal):
                raise WorkerError(
                    f"the meeting point rejects this site: {refusal.reason}", code="refused", hint=refusal.hint
                )
            trouble = self._link.trouble if self._link else ""
            if trouble and not warned and time.perf_counter() > began_s + TROUBLE_S:
                warned = True
                self._warn(f"cannot reach the meeting point {self._sites.endpoint} ({trouble}): this site waits for it")
            time.sleep(WAIT_S)

    def _warn(self, message: str) -> None:
        self._run.journal.write(WarningEvent(step=self._progress.step, message=message))

    # Steps

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        """Take the samples that the current decision assigns to this site."""
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
        """Count a step of this site."""
        data = self._spec.data
        self._outer.count(self._taken * (data.seq_len if data.unit == "tokens" else 1))
        self._samples += self._taken
        return True

    def merged(self) -> AbstractContextManager[None]:
        return self._outer.as_weights()

    def leave(self) -> None:
        super().leave()
        if self._link:
            self._link.close()
