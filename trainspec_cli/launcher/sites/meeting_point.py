"""The meeting point of the sites: it hears their outer gradients, decides on rounds, and passes the gradients on.

It computes nothing with them: each site decodes and sums what all have sent, in fp32 and in the same order, so that all
come to the same bits. `policy.sites.meeting` decides; here are connections and files. It runs in a thread beside the
supervisor of site 0, over the starts of its workers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from trainspec_cli.errors import TrainspecError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.launcher.rendezvous.door import BAD_REQUEST, Door, prove
from trainspec_cli.launcher.sites.connections import ConnectedSite, RankConnection
from trainspec_cli.launcher.sites.rounds import Rounds
from trainspec_cli.policy.sites.agreement import agreement_of, rules_of, schedule_of
from trainspec_cli.policy.sites.meeting import Meeting
from trainspec_cli.policy.sites.round import Contribution, RoundRecord
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.records import read_record
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.wire.handshake import Challenge
from trainspec_cli.wire.sites import (
    GREETING,
    LINE_BYTES,
    OPERATION,
    OPERATIONS,
    Alive,
    Decided,
    Followed,
    Refused,
    Sent,
    SiteHello,
    Welcome,
    receive,
)
from trainspec_cli.wire.tls import TlsCertificate, make_certificate

TICK_S = 0.05
KEPT_INTERVALS = 32
"""Rounds are kept for a site that is away for so many intervals in which the whole model is exchanged."""
LINGER_S = 120.0
"""A meeting that is over stays for sites that have not heard of its last round yet."""
ENDS = (*BAD_REQUEST, OSError, EOFError, TrainspecError, asyncio.CancelledError)


class MeetingPoint:
    def __init__(
        self,
        meeting: Meeting,
        rounds: Rounds,
        secret: bytes,
        certificate: TlsCertificate,
        recipe: str,
        silence_s: float,
        log: TextIO = sys.stderr,
    ):
        """`recipe` is the digest of what all sites have to agree on."""
        self._meeting, self._rounds, self._secret, self._certificate = meeting, rounds, secret, certificate
        self._recipe, self._silence_s, self._log = recipe, silence_s, log
        self._sites: dict[int, ConnectedSite] = {}
        self._sent: dict[int, dict[int, tuple[Sent, bytes]]] = {}
        """What the ranks of each site have sent for the next round, also of a site that has left since."""
        self._saved: dict[int, int] = {}
        """The newest round that each site has in a checkpoint."""
        self._door = Door(log)
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, listener: socket.socket) -> None:
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(listener)), name="meeting point", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End; a meeting that is over does so once the sites have left, each with the last round."""
        self._closing.set()
        if self._thread:
            self._thread.join()
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve_connection, sock=listener, limit=LINE_BYTES)
        closing_s = 0.0
        while True:
            self._turn()
            await asyncio.sleep(TICK_S)
            if self._closing.is_set():
                closing_s = closing_s or time.monotonic()
                lingers = self._meeting.is_over and self._sites and time.monotonic() < closing_s + LINGER_S
                if not lingers:
                    break
        server.close()
        for site in self._sites.values():
            site.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _turn(self) -> None:
        """End silent connections, and decide on the next round where it is time."""
        for site in list(self._sites.values()):
            if site.silent(self._silence_s):
                site.abort()
        while record := self._meeting.decide(time.monotonic()):
            self._announce(record)

    def _announce(self, record: RoundRecord) -> None:
        payloads = {
            number: {rank: part for rank, (_, part) in self._sent[number].items()} for number in record.included
        }
        self._forget()
        self._rounds.keep(self._meeting.state, payloads)
        for number, site in self._sites.items():
            site.sent.clear()
            if site.is_welcome:
                for rank, connection in site.ranks.items():
                    others = {one: parts[rank] for one, parts in payloads.items() if one != number}
                    connection.send(*_decided(record, others))
        self._sent.clear()
        for number in record.lost:
            self._say(f"site {number} is lost: what it had not sent yet is trained by the others")
        for number in record.joined:
            self._say(f"site {number} is a member again after round {record.round}")

    def _forget(self) -> None:
        """Forget rounds that no site asks for any more."""
        schedule, newest = self._meeting.schedule, self._meeting.state.round
        saved = min(self._saved.values(), default=0)
        before = max(saved, newest - KEPT_INTERVALS * schedule.fragments)
        self._meeting.forget(before)
        self._rounds.forget(before)

    # One connection

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. An error is logged and closes the connections of this site alone."""
        connection = RankConnection(writer)
        hello: SiteHello | None = None
        try:
            async with self._door.proving():
                writer.write(GREETING)
                await writer.start_tls(self._certificate.context)
                await prove(reader, writer, Challenge(self._secret, self._certificate.purpose))
                hello = await self._greet(reader, connection)
            if hello is not None:
                await self._serve_rank(reader, connection, hello)
        except ENDS as error:
            self._door.note_refusal("sites", writer, error)
        finally:
            if hello is not None:
                self._leave(hello, connection)
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, connection: RankConnection) -> SiteHello | None:
        """Return what the rank says of itself; None where it was refused."""
        hello = await _next(reader, connection, SiteHello)
        if refusal := self._refusal(hello):
            self._say(f"site {hello.site} is refused: {refusal.reason}")
            connection.send(refusal)
            await connection.flush()
            return None
        return hello

    def _refusal(self, hello: SiteHello) -> Refused | None:
        state = self._meeting.state
        if hello.recipe != self._recipe:
            reason = "its recipe differs from that of site 0 in the model, the layout, the data or what sites exchange"
            return Refused(reason, "give all sites the same recipe; batching, cluster and run may differ")
        if not 0 <= hello.site < self._meeting.rules.sites:
            return Refused(f"there are {self._meeting.rules.sites} sites, from 0", "type another --site")
        if hello.applied > state.round:
            reason = f"it has applied round {hello.applied}, and the meeting point knows {state.round + 1}"
            return Refused(reason, "resume the run of site 0 that the sites have begun with")
        if missing := self._missing_for(hello.applied):
            reason = f"it was away for too long: round {missing[0]} is not kept any more"
            return Refused(reason, "copy the newest folder of another site's checkpoints into this run's checkpoints")
        return None

    def _missing_for(self, applied: int) -> list[int]:
        """Return the rounds that a site would need which has applied them up to one: the record of that, and all of
        those after it."""
        state = self._meeting.state
        known = {record.round for record in state.records}
        wanted = range(max(0, applied), state.round + 1)
        return [one for one in wanted if one not in known or (one > applied and not self._rounds.has(one))]

    async def _serve_rank(self, reader: asyncio.StreamReader, connection: RankConnection, hello: SiteHello) -> None:
        self._arrive(hello, connection)
        writing = asyncio.ensure_future(connection.write())
        try:
            while True:
                fields, payload = await receive(reader, connection.hear)
                self._hear(hello, fields, payload)
        finally:
            writing.cancel()

    def _arrive(self, hello: SiteHello, connection: RankConnection) -> None:
        before = self._sites.get(hello.site)
        if before is not None and hello.rank in before.ranks:
            self._drop(hello.site)  # a new start, whose last connections have not been found broken yet
        site = self._sites.setdefault(hello.site, ConnectedSite())
        site.ranks[hello.rank], site.hellos[hello.rank] = connection, hello
        if site.is_complete:
            self._welcome(hello.site, site)

    def _welcome(self, number: int, site: ConnectedSite) -> None:
        is_member = self._meeting.connect(number, min(hello.batch for hello in site.hellos.values()))
        site.is_welcome = True
        state = self._meeting.state
        for rank, connection in site.ranks.items():
            applied = site.hellos[rank].applied
            of_applied = next((record for record in state.records if record.round == applied), None)
            connection.send(Welcome(is_member, to_plain(of_applied) if of_applied else None))
            for missed in range(applied + 1, state.round + 1):
                record = next(record for record in state.records if record.round == missed)
                parts = {one: ranks[rank] for one, ranks in self._rounds.read(missed).items()}
                connection.send(*_decided(record, parts))
        self._say(f"site {number} is connected" + ("" if is_member else ", and catches up"))

    def _hear(self, hello: SiteHello, fields: JsonObject, payload: bytes) -> None:
        """Raise one of `BAD_REQUEST` where a message does not fit."""
        message = read_record(OPERATIONS[str(fields[OPERATION])], fields)
        site = self._sites.get(hello.site)
        if site is None:
            raise ConnectionError("another rank of the site was lost")
        if isinstance(message, Sent):
            if message.round == self._meeting.state.round + 1:
                site.sent[hello.rank] = message, payload
                self._contribute(hello.site, site)
        elif isinstance(message, Followed):
            site.followed[hello.rank] = message.round
            if len(site.followed) == hello.ranks:
                self._meeting.follow(hello.site, min(site.followed.values()))
        elif not isinstance(message, Alive):
            raise ValueError(f"`{fields[OPERATION]}` is not for the meeting point")

    def _contribute(self, number: int, site: ConnectedSite) -> None:
        if len(site.sent) < len(site.ranks):
            return
        of_ranks = [message for _, (message, _) in sorted(site.sent.items())]
        first = of_ranks[0]
        digests = tuple(message.digest for message in of_ranks)
        contribution = Contribution(
            first.tokens,
            first.steps,
            first.rate,
            digests,
            first.saved_round,
            step_s=first.step_s,
            exchange_s=_slowest_s([message.exchange_s for message in of_ranks]),
            came_s=time.monotonic(),
        )
        if self._meeting.contribute(number, first.round, contribution):
            self._sent[number] = dict(site.sent)
            self._saved[number] = first.saved_round

    def _leave(self, hello: SiteHello, connection: RankConnection) -> None:
        site = self._sites.get(hello.site)
        if site is not None and site.ranks.get(hello.rank) is connection:
            self._drop(hello.site)
            self._say(f"site {hello.site} is not connected any more")

    def _drop(self, number: int) -> None:
        """One rank of the site is lost, and so are the others' connections: all of them come again together."""
        self._sites.pop(number).abort()
        self._meeting.disconnect(number)

    def _say(self, text: str) -> None:
        print(f"sites: {text}", file=self._log, flush=True)


def make_meeting_point(plan: Plan, folder: Path, secret: bytes, log: TextIO) -> MeetingPoint:
    """Make the meeting point of a plan's sites, which goes on where the rounds in `folder` end."""
    rounds = Rounds(folder)
    meeting = Meeting(rules_of(plan), schedule_of(plan), rounds.load())
    silence_s = plan.spec.resilience.heartbeat_timeout_s
    return MeetingPoint(meeting, rounds, secret, make_certificate(), agreement_of(plan), silence_s, log)


async def _next(reader: asyncio.StreamReader, connection: RankConnection, kind: type[SiteHello]) -> SiteHello:
    fields, _ = await receive(reader, connection.hear)
    if fields.pop(OPERATION) != "hello":
        raise ValueError("a rank begins with hello")
    return read_record(kind, fields)


def _slowest_s(exchanges_s: list[float]) -> float:
    """Return how long the slowest rank's exchange took; 0 where one of them has not measured it."""
    return max(exchanges_s) if all(exchanges_s) else 0.0


def _decided(record: RoundRecord, parts: dict[int, bytes]) -> tuple[Decided, bytes]:
    chosen = [site for site in record.included if site in parts]
    sizes = tuple(len(parts[site]) for site in chosen)
    return Decided(to_plain(record), tuple(chosen), sizes), b"".join(parts[site] for site in chosen)
