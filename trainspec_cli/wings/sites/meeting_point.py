"""The meeting point of the sites: it receives their outer gradients, decides rounds, and forwards the gradients.

It computes nothing from them: each site decodes all outer gradients and sums them in fp32 in the same order, so the
sums are bitwise identical at all sites. On arrival, an outer gradient is forwarded to all sites that do not receive it
directly. Outer gradients that were not forwarded are sent with the decision. `meeting.py` makes the decisions, and this
module handles connections and files. It runs in a thread next to the supervisor of site 0, across restarts of its
workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.recipe.keys.resilience import FIRST_SITE
from trainspec_cli.recipe.records import FieldError, read_record, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.files import read_versioned, write_versioned
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import listen, listening_address
from trainspec_cli.wings.sites.meeting import (
    Contribution,
    Meeting,
    MeetingRules,
    MeetingState,
    RoundRecord,
    SiteSchedule,
    agreement_of,
)
from trainspec_cli.wings.sites.messages import (
    MEETING_POINT,
    Decided,
    Followed,
    Inboxes,
    Lacking,
    Message,
    Passed,
    Refused,
    Sent,
    SiteHello,
    Welcome,
    pack,
)
from trainspec_cli.wings.sites.server import ConnectedSite, RankConnection, SiteInbox, SiteServer, make_inbox


@dataclass(frozen=True)
class Rounds:
    """The meeting point's files: its state and the outer gradients of the newest rounds. They let an absent site catch
    up, and a restarted meeting continue."""

    folder: Path

    def load(self) -> MeetingState:
        """Return the state of the meeting when it last ran. Raises MachineError if it cannot be read."""
        path = self.folder / "meeting.json"
        if not path.exists():
            return MeetingState()
        try:
            # Read leniently, because records from earlier versions also contain the interval of later exchanges.
            return read_record(MeetingState, read_versioned(path))
        except (UnreadableFileError, FieldError) as error:
            message = f"{path} cannot be read: {error}"
            hint = "restore it from a backup, or start a new run"
            raise MachineError(Problem("sites", message, hint=hint, environment=True)) from error

    def keep(self, state: MeetingState, payloads: Mapping[int, Mapping[int, bytes]]) -> None:
        """Write a decided round to disk. This happens before any site receives the round."""
        self.folder.mkdir(exist_ok=True)
        rows = [(site, rank, part) for site, parts in sorted(payloads.items()) for rank, part in sorted(parts.items())]
        head = json.dumps([[site, rank, len(part)] for site, rank, part in rows], allow_nan=False).encode()
        # Write the gradients first, so that the state never refers to a round whose gradients are missing.
        path = self._path(state.round)
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"\n".join((head, b"".join(part for *_, part in rows))))
        partial.replace(path)
        write_versioned(self.folder / "meeting.json", to_plain(state))

    def read(self, number: int, rank: int) -> dict[int, bytes]:
        """Return the outer gradients of a round for one rank, by site."""
        parts = {}
        with self._path(number).open("rb") as file:
            for site, of_rank, size in json.loads(file.readline()):
                if of_rank == rank:
                    parts[site] = file.read(size)
                else:
                    file.seek(size, os.SEEK_CUR)
        return parts

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def forget(self, before: int) -> None:
        for path in self.folder.glob("round_*.bin"):
            if int(path.stem.removeprefix("round_")) < before:
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"round_{number:08d}.bin"


KEPT_INTERVALS = 32
"""How long rounds are kept for an absent site, in exchanges of the full model."""
LINGER_S = 120.0
"""How many seconds a finished meeting waits for sites that have not received the last round yet."""
Gradient = tuple[Sent, bytes]


class MeetingPoint:
    def __init__(self, meeting: Meeting, rounds: Rounds, secret: bytes, recipe: str, silence_s: float, log: TextIO):
        """`recipe`: a digest of everything that all sites must agree on."""
        self._meeting = meeting
        self._rounds = rounds
        self._recipe = recipe
        self._silence_s = silence_s
        self._server = SiteServer(MEETING_POINT, self, secret, log)
        self.start = self._server.start
        self.close = self._server.close
        self._log = self._server.log
        self._sites: dict[int, ConnectedSite] = {}
        self._sent: dict[int, dict[int, Gradient]] = {}
        """The ranks' messages for the next round, by site. Includes sites that have left since they sent them."""
        self._saved: dict[int, int] = {}
        """The newest round in the checkpoints of each site."""
        self._served_here: dict[int, set[int]] = {}
        """For each site, the sites that receive its outer gradients only through the meeting point."""
        self._asked_by: dict[int, set[int]] = {}
        """For each site, the sites whose outer gradients it had to request because they did not arrive directly."""

    def tick(self) -> None:
        """Close silent connections, and decide the next round when it is due."""
        for site in list(self._sites.values()):
            if any(rank.silent(self._silence_s) for rank in site.ranks.values()):
                site.abort()
        while record := self._meeting.decide(time.monotonic()):
            sent = {number: self._sent[number] for number in record.included}
            payloads = {number: {rank: part for rank, (_, part) in parts.items()} for number, parts in sent.items()}
            # Delete rounds that no site can still request.
            schedule = self._meeting.schedule
            newest = self._meeting.state.round
            saved = min(self._saved.values(), default=0)
            before = max(saved, newest - KEPT_INTERVALS * schedule.fragments)
            self._meeting.forget(before)
            self._rounds.forget(before)
            self._rounds.keep(self._meeting.state, payloads)
            for number, site in self._sites.items():
                site.sent.clear()
                if site.is_welcome:
                    for rank, connection in site.ranks.items():
                        of_rank = {one: parts[rank] for one, parts in sent.items()}
                        # Outer gradients that were not forwarded to the rank and do not reach it directly.
                        left = {
                            one: payload
                            for one, (message, payload) in of_rank.items()
                            if one != number and number not in message.direct
                            if connection.passed.get(one) != message.sha256
                        }
                        connection.send(*_decided(record, left, of_rank))
            self._sent.clear()
            for number in record.lost:
                self._log(f"site {number} is lost: the other sites train on the samples whose work it had not sent yet")
            for number in record.joined:
                self._log(f"site {number} is a member again after round {record.round}")

    def lingers(self, closed_for_s: float) -> bool:
        """Return whether to stay open. A finished meeting ends once all sites have left with the last round."""
        return self._meeting.is_over and bool(self._sites) and closed_for_s < LINGER_S

    def abort(self) -> None:
        for site in self._sites.values():
            site.abort()

    # A connection

    def refusal(self, hello: SiteHello) -> Refused | None:
        state = self._meeting.state
        if hello.recipe != self._recipe:
            reason = "the site's recipe differs from that of site 0 in the model, layout, data or exchange"
            return Refused(reason, "give all sites the same recipe; batching, cluster and run may differ")
        if not 0 <= hello.site < self._meeting.rules.sites:
            return Refused(
                f"there are {self._meeting.rules.sites} sites, numbered from 0", "set another resilience.sites.site"
            )
        if hello.applied > state.round:
            reason = (
                f"the site has applied round {hello.applied}, but the meeting point only knows {state.round + 1} rounds"
            )
            return Refused(reason, "resume the run of site 0 that the sites started with")
        # A site needs the record of the newest round that it has applied, and all later rounds.
        known = {record.round for record in state.records}
        wanted = range(max(0, hello.applied), state.round + 1)
        missing = [one for one in wanted if one not in known or (one > hello.applied and not self._rounds.has(one))]
        if missing:
            reason = f"the site was away for too long: round {missing[0]} is no longer kept"
            return Refused(reason, "copy another site's newest checkpoint folder into this run's checkpoints")
        return None

    def arrive(self, hello: SiteHello, connection: RankConnection) -> None:
        before = self._sites.get(hello.site)
        if before is not None and hello.rank in before.ranks:
            # a restarted rank whose previous connections are not known to be broken yet
            self._drop(hello.site)
        site = self._sites.setdefault(hello.site, ConnectedSite())
        site.ranks[hello.rank] = connection
        site.hellos[hello.rank] = hello
        if site.is_complete:
            number = hello.site
            is_member = self._meeting.connect(number, min(hello.batch for hello in site.hellos.values()))
            site.is_welcome = True
            state = self._meeting.state
            records = {record.round: record for record in state.records}
            for rank, connection in site.ranks.items():
                applied = site.hellos[rank].applied
                of_applied = records.get(applied)
                connection.send(Welcome(is_member, to_plain(of_applied) if of_applied else None))
                for missed in range(applied + 1, state.round + 1):
                    connection.send(*_decided(records[missed], self._rounds.read(missed, rank)))
            self._log(f"site {number} is connected" + ("" if is_member else " and catches up"))
            inboxes = {number: site.inbox for number, site in sorted(self._sites.items()) if site.is_welcome}
            for other in self._sites.values():
                for connection in other.ranks.values() if other.is_welcome else ():
                    connection.send(Inboxes(tuple(inboxes), tuple(inboxes.values())))

    def handle(self, hello: SiteHello, message: Message, payload: bytes) -> None:
        site = self._sites.get(hello.site)
        if site is None:
            raise ConnectionError("another rank of the site was lost")
        if isinstance(message, Sent):
            # The contribution may be for an older round, which was decided without it, but not for a newer round,
            # because the site waits for each decision.
            if message.round == self._meeting.state.round + 1:
                site.sent[hello.rank] = message, payload
                if hello.site in self._meeting.members:
                    # Forward the outer gradient to the ranks that do not receive it directly.
                    packed = pack(Passed(message.round, hello.site), payload)
                    for number, other in self._sites.items():
                        if number != hello.site and number not in message.direct and other.is_welcome:
                            connection = other.ranks[hello.rank]
                            connection.passed[hello.site] = message.sha256
                            connection.send_packed(packed)
                self._contribute(hello.site, site)
        elif isinstance(message, Lacking):
            # These outer gradients did not arrive directly.
            record = next((one for one in self._meeting.state.records if one.round == message.round), None)
            if record is None:
                raise ValueError(f"round {message.round} is unknown")
            parts = self._rounds.read(message.round, hello.rank)
            site.ranks[hello.rank].send(*_decided(record, {one: parts[one] for one in message.sites}))
            asked = self._asked_by.setdefault(hello.site, set())
            for one in set(message.sites) - asked:
                asked.add(one)
                self._log(
                    f"site {hello.site} did not get the outer gradient of site {one} directly "
                    f"in round {message.round}: the meeting point sends it"
                )
        elif isinstance(message, Followed):
            site.followed[hello.rank] = message.round
            if len(site.followed) == hello.ranks:
                self._meeting.follow(hello.site, min(site.followed.values()))
        else:
            raise ValueError(f"{type(message).__name__} is not a message for the meeting point")

    def _contribute(self, number: int, site: ConnectedSite) -> None:
        if len(site.sent) < len(site.ranks):
            return
        of_ranks = [message for _, (message, _) in sorted(site.sent.items())]
        first = of_ranks[0]
        digests = tuple(message.digest for message in of_ranks)
        contribution = Contribution(first.tokens, first.steps, first.rate, digests, first.saved_round)
        if self._meeting.contribute(number, first.round, contribution):
            self._sent[number] = dict(site.sent)
            self._saved[number] = first.saved_round
            # Log which sites now receive a site's outer gradients only through the meeting point, or directly again.
            others = {one for one, site in self._sites.items() if site.is_welcome} - {number, FIRST_SITE}
            through = {
                one for one in others if number != FIRST_SITE and any(one not in sent.direct for sent in of_ranks)
            }
            before = self._served_here.get(number, set())
            for one in sorted(through - before):
                self._log(f"outer gradients of site {number} reach site {one} through the meeting point")
            for one in sorted(before & others - through):
                self._log(f"outer gradients of site {number} reach site {one} directly again")
            self._served_here[number] = through | before - others

    def leave(self, hello: SiteHello, connection: RankConnection) -> None:
        site = self._sites.get(hello.site)
        if site is not None and site.ranks.get(hello.rank) is connection:
            self._drop(hello.site)
            self._log(f"site {hello.site} is no longer connected")

    def _drop(self, number: int) -> None:
        """Disconnect a site that has lost one rank. All of its ranks then reconnect together."""
        self._sites.pop(number).abort()
        self._meeting.disconnect(number)


@contextmanager
def serve_site(run: RunDir, plan: Plan) -> Iterator[None]:
    """Run a site's server for the duration of the block: the meeting point at site 0, or the inbox of another site that
    listens."""
    sites = plan.spec.resilience.sites
    address = sites.endpoint if sites.site == FIRST_SITE else sites.listen
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    listener = listen(listening_address(host), int(port))
    folder = run.root / "sites"
    folder.mkdir(exist_ok=True)
    secret = read_secret(Path(str(sites.secret)))
    with (folder / "sites.log").open("a", encoding="utf-8") as log:
        server: MeetingPoint | SiteInbox
        if sites.site == FIRST_SITE:
            server = make_meeting_point(plan, folder, secret, log)
        else:
            server = make_inbox(plan, secret, log)
        server.start(listener)
        try:
            yield
        finally:
            server.close()


def make_meeting_point(plan: Plan, folder: Path, secret: bytes, log: TextIO) -> MeetingPoint:
    """Return the meeting point for a plan's sites. It continues after the rounds in `folder`."""
    spec = plan.spec
    sites = spec.resilience.sites
    rules = MeetingRules(sites.count, sites.quorum, sites.grace_s, spec.run.node_timeout_s, spec.scheduler.change)
    rounds = Rounds(folder)
    schedule = SiteSchedule(plan.total_steps, sites.interval_steps, sites.fragments, sites.delay_steps)
    meeting = Meeting(rules, schedule, rounds.load())
    return MeetingPoint(meeting, rounds, secret, agreement_of(plan), spec.resilience.heartbeat_timeout_s, log)


def _decided(
    record: RoundRecord, parts: Mapping[int, bytes], sent: Mapping[int, Gradient] | None = None
) -> tuple[Decided, bytes]:
    """Return the message for a decision. It contains the outer gradients `parts`; the rank receives the others in
    another way. `sent`: all outer gradients."""
    chosen = [site for site in record.included if site in parts]
    sizes = tuple(len(parts[site]) for site in chosen)
    digests = tuple(sent[site][0].sha256 for site in record.included) if sent else ()
    return Decided(to_plain(record), tuple(chosen), sizes, digests), b"".join(parts[site] for site in chosen)
