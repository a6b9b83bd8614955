"""The encrypted and authenticated connections of a rank to the other sites: through the meeting point, and directly
where possible.

A separate thread sends messages, stores what arrives, and re-establishes broken connections. After a reconnect, it
sends outer gradients of undecided rounds to the meeting point again. Outer gradients that do not arrive directly are
requested from the meeting point. The training thread never waits for the network."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.wire.handshake import NONCE_BYTES, PROOF_BYTES, TIMEOUT_S, Answer, HandshakeError
from trainspec_cli.recipe.keys.resilience import FIRST_SITE
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.wings.sites.meeting import RoundRecord
from trainspec_cli.wings.sites.messages import (
    BEAT_S,
    GREETING,
    LINE_BYTES,
    MEETING_POINT,
    Alive,
    Decided,
    Followed,
    Gone,
    Inboxes,
    Lacking,
    Message,
    Passed,
    Refused,
    Sent,
    SiteHello,
    Welcome,
    inbox_of,
    pack,
    purpose_of,
    receive,
    start_tls_as_client,
)

RETRY_S = 0.5
LOST = (OSError, EOFError, ValueError, TimeoutError, TrainspecError)
"""Exceptions that end a connection."""


@dataclass(frozen=True)
class SiteAccess:
    """A rank's credentials and its first message, which are the same for every server."""

    secret: bytes
    hello: Callable[[], SiteHello]
    silence_s: float
    """A server is treated as lost after this many seconds of silence."""


class SiteConnection:
    def __init__(self, server: str, address: str, access: SiteAccess, hear: Callable[[Message, bytes], None]):
        """`server`: the server's name in the proofs of both ends. `hear` is called with every message from the
        server."""
        self.server = server
        self.address = address
        self._access = access
        self._hear = hear
        self.lost: Callable[[], None] = lambda: None
        """Called after every failed attempt to connect and every lost connection."""
        self.refusal: Refused | None = None
        self.trouble = ""
        """Why the last attempt to connect failed, or why the connection ended."""
        self.sent_bytes = self.received_bytes = 0
        """Number of message bytes before encryption. For received messages, only payloads count."""
        self._outbox: asyncio.Queue[bytes] | None = None
        self.unwritten = 0
        """Number of queued messages that have not been written yet."""
        self._last_contact_s = 0.0

    @property
    def is_open(self) -> bool:
        """True if both ends have proved their identity."""
        return self._outbox is not None

    def post(self, content: bytes) -> None:
        """Queue a packed message if the connection is open."""
        if self._outbox is not None:
            self._outbox.put_nowait(content)
            self.unwritten += 1

    async def stay_connected(self) -> None:
        while self.refusal is None:
            try:
                await self._connect()
            except LOST as error:
                self.trouble = self.refusal.reason if self.refusal else str(error) or type(error).__name__
            self.lost()
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Connect and serve the connection until it breaks."""
        host, _, port = self.address.rpartition(":")
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._prove(reader, writer)
            writer.write(pack(self._access.hello()))
            outbox = self._outbox = asyncio.Queue()
            self.unwritten = 0
            await self._serve(reader, writer, outbox)
        finally:
            self._outbox = None
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]
    ) -> None:
        """Write and read until one of them fails or the server has been silent for too long."""
        self._record_contact()
        serving = (self._write(writer, outbox), self._read(reader), self._watch_silence())
        tasks = [asyncio.ensure_future(one) for one in serving]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise HandshakeError("the server does not belong to sites of this version")
        purpose = purpose_of(self.server, await start_tls_as_client(writer))
        answer = Answer(self._access.secret, purpose, await reader.readexactly(NONCE_BYTES))
        writer.write(answer.content)
        try:
            answer.check(await reader.readexactly(PROOF_BYTES))
        except EOFError as error:
            raise HandshakeError("the server has a different secret, belongs to another site, or is full") from error

    async def _write(self, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]) -> None:
        while True:
            posted = True
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await outbox.get()
            except TimeoutError:
                message = pack(Alive())
                posted = False
            self.sent_bytes += len(message)
            writer.write(message)
            await writer.drain()
            self.unwritten -= posted

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message, payload = await receive(reader, self._record_contact)
            self.received_bytes += len(payload)
            if isinstance(message, Refused):
                self.refusal = message
            elif not isinstance(message, Alive):
                self._hear(message, payload)

    def _record_contact(self) -> None:
        self._last_contact_s = asyncio.get_running_loop().time()

    async def _watch_silence(self) -> None:
        while asyncio.get_running_loop().time() < self._last_contact_s + self._access.silence_s:
            await asyncio.sleep(BEAT_S)
        raise TimeoutError(f"the server was silent for {self._access.silence_s:g} s")


HELD_ROUNDS = 4
"""An outer gradient of an undecided round is held if the round is at most this many after the newest applied round."""


@dataclass
class _Arriving:
    record: RoundRecord | None = None
    digests: dict[int, str] = field(default_factory=dict)
    """Digests of the merged outer gradients, by site."""
    decided: dict[int, bytes] = field(default_factory=dict)
    """Outer gradients, by site, that came with the decision or later from the meeting point."""
    early: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """Outer gradients, by site, that came before the decision or directly, with their digests."""

    def lacking(self) -> tuple[int, ...]:
        assert self.record is not None, "the round is decided"
        return tuple(site for site in self.record.included if not self._is_there(site))

    def _is_there(self, site: int) -> bool:
        return site in self.decided or (site in self.early and self.early[site][0] == self.digests.get(site))


class ArrivingRounds:
    """Rounds that are arriving: decisions from the meeting point, and outer gradients from any connection.

    A decision identifies each outer gradient by its digest, so that all sites merge identical data, even if a restarted
    site has sent two outer gradients for one round. An outer gradient is treated as missing if it has not arrived or
    has a different digest. Methods may be called from several threads."""

    def __init__(self, site: int, taken: int):
        """`site`: this site. `taken`: the newest round that this site has applied."""
        self._site = site
        self._taken = taken
        self._rounds: dict[int, _Arriving] = {}
        self._lock = threading.Lock()

    def hold(self, number: int, site: int, content: bytes) -> None:
        """Hold an outer gradient that came directly or before its round's decision."""
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:
            if self._taken < number <= self._taken + HELD_ROUNDS:
                # The training thread holds this site's own gradient, so its digest suffices.
                self._at(number).early[site] = digest, b"" if site == self._site else content

    def decide(self, record: RoundRecord, digests: Sequence[str], parts: Mapping[int, bytes]) -> None:
        """Record a decision. `parts`: the outer gradients that came with it. `digests`: the digests of all merged outer
        gradients."""
        with self._lock:
            if record.round <= self._taken:
                return
            arriving = self._at(record.round)
            if arriving.record is None:
                arriving.record = record
                arriving.digests = dict(zip(record.included, digests, strict=False))
            arriving.decided |= parts

    def lacking(self) -> dict[int, tuple[int, ...]]:
        """Return the sites whose outer gradients are missing, by decided round."""
        with self._lock:
            decided = {number: one.lacking() for number, one in self._rounds.items() if one.record}
            return {number: sites for number, sites in decided.items() if sites}

    def has(self, number: int) -> bool:
        """Return whether a round is decided and complete."""
        with self._lock:
            arriving = self._rounds.get(number)
            return arriving is not None and arriving.record is not None and not arriving.lacking()

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, with the outer gradients by site, and drop earlier rounds. This site's own
        gradient is only included if the merged one differs from the one that this start has sent."""
        with self._lock:
            found = self._rounds[number]
            assert found.record is not None, "the round is decided"
            self._taken = number
            self._rounds = {later: one for later, one in self._rounds.items() if later > number}
            early = {site: content for site, (_, content) in found.early.items() if site != self._site}
            parts = {**early, **found.decided}
            return found.record, {site: parts[site] for site in found.record.included if site in parts}

    def _at(self, number: int) -> _Arriving:
        return self._rounds.setdefault(number, _Arriving())


LISTEN = "resilience.sites.listen"
THROUGH = "through the meeting point"


class DirectSites:
    """The direct connections between sites: to the inboxes of other sites, and to this site's own inbox.

    The meeting point runs at site 0, so a direct connection to or from site 0 would use the same link twice. All
    members except `notices` are used only by the connection thread."""

    def __init__(
        self,
        access: SiteAccess,
        arrived: Callable[[int, int, bytes], None],
        broken: Callable[[], None],
    ):
        """`arrived` is called with the round, the site and the outer gradient that has arrived. `broken` is called when
        a connection that should have delivered an outer gradient has ended."""
        hello = access.hello()
        self._site = hello.site
        self._listen = hello.listen
        self._access = access
        self._arrived = arrived
        self._broken = broken
        self.trusted: set[int] = set()
        """Sites whose direct connection to this site has delivered data and has not been broken since."""
        self.notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Messages for the user. Each message is shown only once."""
        self._said: set[str] = set()
        self._inbox: SiteConnection | None = None
        self._others: dict[int, SiteConnection] = {}
        self._tasks: dict[SiteConnection, asyncio.Task[None]] = {}

    @property
    def connections(self) -> tuple[SiteConnection, ...]:
        return tuple(self._tasks)

    def begin(self) -> None:
        """Connect to this site's own inbox, if it has one."""
        if self._listen:
            self._inbox = self._connect(inbox_of(self._site), self._listen, self._hear, self._lose_inbox)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def meet(self, inboxes: Inboxes) -> None:
        """Connect to the inboxes of the other sites that have an inbox."""
        addresses = dict(zip(inboxes.sites, inboxes.addresses, strict=True))
        others = {
            site: at for site, at in addresses.items() if FIRST_SITE not in (site, self._site) and site != self._site
        }
        if others and not self._listen:
            self._say("listen", f"this site does not listen ({LISTEN}): other sites' outer gradients arrive {THROUGH}")
        for site, address in others.items():
            if not address:
                self._say(
                    f"{site}",
                    f"site {site} does not listen ({LISTEN}): this site's outer gradients reach it {THROUGH}",
                )
            elif site not in self._others or self._others[site].address != address:
                self._meet(site, address)

    def send(self, packed: Callable[[tuple[int, ...]], bytes]) -> bytes:
        """Send a message to all directly reachable sites, and return it. `packed` builds the message from
        their site numbers.

        A site that is still receiving an earlier message is skipped, so that at most one message is queued per site."""
        behind = {site for site, connection in self._others.items() if connection.is_open and connection.unwritten}
        for site in sorted(behind):
            why = f"the direct connection to site {site} is too slow: it is still sending an earlier message"
            self._say(f"{site} behind", f"{why}: later messages go {THROUGH}")
        reached = tuple(site for site, connection in self._others.items() if connection.is_open and site not in behind)
        content = packed(reached)
        for site in reached:
            self._others[site].post(content)
        return content

    def _meet(self, site: int, address: str) -> None:
        if before := self._others.pop(site, None):
            self._tasks.pop(before).cancel()

        def lose() -> None:
            why = f"cannot reach site {site} directly at {address} ({connection.trouble})"
            self._say(f"{site}", f"{why}: this site's outer gradients reach it {THROUGH}")

        connection = self._others[site] = self._connect(inbox_of(site), address, _refuse, lose)

    def _connect(
        self, server: str, address: str, hear: Callable[[Message, bytes], None], lost: Callable[[], None]
    ) -> SiteConnection:
        connection = SiteConnection(server, address, self._access, hear)
        connection.lost = lost
        self._tasks[connection] = asyncio.ensure_future(connection.stay_connected())
        return connection

    def _hear(self, message: Message, payload: bytes) -> None:
        if isinstance(message, Passed):
            self._arrived(message.round, message.site, payload)
            self.trusted.add(message.site)
        elif isinstance(message, Gone):
            self.trusted.discard(message.site)
            self._broken()
        else:
            _refuse(message, payload)

    def _lose_inbox(self) -> None:
        assert self._inbox is not None, "`begin` has connected to the inbox"
        why = f"cannot reach this site's own inbox at {self._listen} ({self._inbox.trouble})"
        self._say("inbox", f"{why}: other sites' outer gradients arrive {THROUGH}")
        self.trusted.clear()
        self._broken()

    def _say(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self.notices.put(message)


def _refuse(message: Message, payload: bytes) -> None:
    raise ValueError(f"{type(message).__name__} is not a message from an inbox")


class SiteLink:
    def __init__(self, endpoint: str, secret: bytes, hello: SiteHello, applied: Callable[[], int], silence_s: float):
        """`applied` returns the newest applied round; a new connection continues after it."""
        access = SiteAccess(secret, lambda: replace(hello, applied=applied()), silence_s)
        self._site = hello.site
        self._silence_s = silence_s
        self._meeting = SiteConnection(MEETING_POINT, endpoint, access, self._hear)
        self._rounds = ArrivingRounds(hello.site, applied())
        self._direct = DirectSites(access, self._rounds.hold, self._ask)
        self.is_member: bool | None = None
        """True if this site is a member; None if the meeting point has not answered yet."""
        self.record: RoundRecord | None = None
        """The record of the newest round that had been applied when the connection started."""
        self._pending: tuple[int, bytes] | None = None
        self._followed: int | None = None
        self._asked: set[tuple[int, int]] = set()
        """Round and site of each request that was sent to the meeting point over the current connection."""
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._stay_connected())
        self._thread = threading.Thread(target=self._run, name="sites", daemon=True)
        self._thread.start()

    # Called from the training thread

    @property
    def refusal(self) -> Refused | None:
        return self._meeting.refusal

    @property
    def trouble(self) -> str:
        """Why there is no connection to the meeting point. Empty while connected."""
        return self._meeting.trouble

    @property
    def sent_bytes(self) -> int:
        return sum(one.sent_bytes for one in (self._meeting, *self._direct.connections))

    @property
    def received_bytes(self) -> int:
        return sum(one.received_bytes for one in (self._meeting, *self._direct.connections))

    def cut_notices(self) -> list[str]:
        """Return new messages about direct connections, for the user."""
        notices = self._direct.notices
        return [notices.get() for _ in range(notices.qsize())]

    def send(self, message: Sent, payload: bytes) -> None:
        """Send an outer gradient to all directly reachable sites and to the meeting point. After each reconnect, it is
        sent to the meeting point again until its round is decided."""
        self._call(lambda: self._send(message, payload))

    def follow(self, number: int) -> None:
        """Report that this site, which is not a member, has applied all rounds up to `number`."""
        self._followed = number
        self._call(self._post_followed)

    def joined(self) -> None:
        """Record that this site is a member from now on."""
        self.is_member = True
        self._followed = None

    def has(self, number: int) -> bool:
        return self._rounds.has(number)

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, with the outer gradients by site, and drop earlier rounds."""
        found = self._rounds.take(number)
        if self._pending and self._pending[0] <= number:
            self._pending = None
        return found

    def close(self) -> None:
        self._call(self._task.cancel)
        self._thread.join(TIMEOUT_S)

    def _call(self, act: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    # Called in the connection thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _stay_connected(self) -> None:
        self._direct.begin()
        try:
            await self._meeting.stay_connected()
        finally:
            await self._direct.close()

    def _send(self, message: Sent, payload: bytes) -> None:
        self._rounds.hold(message.round, self._site, payload)
        whole = replace(message, sha256=hashlib.sha256(payload).hexdigest())
        self._pending = message.round, self._direct.send(lambda sites: pack(replace(whole, direct=sites), payload))
        self._post_pending()

    def _hear(self, message: Message, payload: bytes) -> None:
        """Handle a message from the meeting point. Raises ValueError for unknown messages."""
        if isinstance(message, Welcome):
            self.record = from_plain(RoundRecord, message.record) if message.record else None
            self.is_member = message.is_member
            self._meeting.trouble = ""
            self._asked.clear()
            self._post_pending()
            self._post_followed()
        elif isinstance(message, Decided):
            record = from_plain(RoundRecord, message.record)
            self._rounds.decide(record, message.sha256, _cut(payload, message))
            self._ask()
            # Outer gradients on a direct connection may be lost without notice, so the wait for them is limited.
            self._loop.call_later(self._silence_s, lambda: self._ask(record.round))
        elif isinstance(message, Passed):
            self._rounds.hold(message.round, message.site, payload)
        elif isinstance(message, Inboxes):
            self._direct.meet(message)
        else:
            raise ValueError(f"{type(message).__name__} is not a message from the meeting point")

    def _ask(self, patiently_awaited: int | None = None) -> None:
        """Request from the meeting point the outer gradients that are missing from decided rounds. Outer gradients that
        should arrive directly are not requested yet, except for the round `patiently_awaited`, which has waited long
        enough."""
        for number, sites in self._rounds.lacking().items():
            waits = self._direct.trusted if number != patiently_awaited else set()
            if wanted := tuple(site for site in sites if site not in waits and (number, site) not in self._asked):
                self._asked |= {(number, site) for site in wanted}
                self._meeting.post(pack(Lacking(number, wanted)))

    def _post_pending(self) -> None:
        """Send the outer gradient of the undecided round, if the meeting point has answered."""
        if self._pending and self.is_member and not self.trouble:
            self._meeting.post(self._pending[1])

    def _post_followed(self) -> None:
        if self._followed is not None and not self.trouble:
            self._meeting.post(pack(Followed(self._followed)))


def _cut(payload: bytes, message: Decided) -> dict[int, bytes]:
    """Return the outer gradients by site. Raises ValueError if the sizes do not match."""
    if sum(message.sizes) != len(payload) or len(message.sites) != len(message.sizes):
        raise ValueError("the sizes of outer gradients do not match the payload")
    cut = {}
    start = 0
    for site, size in zip(message.sites, message.sizes, strict=True):
        cut[site] = payload[start : start + size]
        start += size
    return cut
