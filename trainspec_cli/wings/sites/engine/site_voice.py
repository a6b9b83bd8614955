"""The ranks of one site, as they speak with the meeting point and the other sites.

Each rank has connections of its own (`SiteLink`) for its shares, so a site has as many streams on each way as ranks
that hold different ones. A rank whose shares another one holds too has none: it is told what that one hears.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.json_collectives import broadcast_json, gather_json
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.structure import convert
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.wings.sites.engine.site_link import SiteLink
from trainspec_cli.wings.sites.meeting import RoundRecord, agreement_of
from trainspec_cli.wings.sites.wire import Sent, SiteHello


class WindowPace:
    """How fast a site computes, from one exchange to the next, without its waits for others."""

    def __init__(self, *, follows: bool):
        self._follows = follows
        self._busy_s = 0.0
        self._samples = 0
        self._since_s: float | None = None

    def go_on(self) -> None:
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        if self._since_s is not None:
            self._busy_s += time.perf_counter() - self._since_s
        self._since_s = None

    def note(self, samples: int) -> None:
        """Note a step that was made."""
        self._samples += samples

    def cut(self) -> float:
        """Return the samples a second since the last call; 0 where nothing is to follow from that."""
        busy_s = self._busy_s
        samples = self._samples
        self._busy_s = 0.0
        self._samples = 0
        return samples / busy_s if self._follows and busy_s else 0.0


class SiteVoice:
    """All methods but the properties are called by all ranks of the site together."""

    def __init__(self, run: TrainingRun, applied: Callable[[], int]):
        self._plan = run.plan
        self._applied = applied
        mesh = run.state.mesh
        self._copies = mesh.group("dp_replicate")
        speaks = mesh.rank("dp_replicate") == 0
        self._speakers = [
            rank for rank, spoke in enumerate(gather_json(speaks, lambda one: convert(bool, one))) if spoke
        ]
        self._speaks = speaks
        self.is_open = False
        self._link: SiteLink | None = None
        self._waited_s = 0.0

    def open(self) -> None:
        """Begin to connect."""
        self.is_open = True
        if self._speaks:
            self._link = self._connect()

    def _connect(self) -> SiteLink:
        plan = self._plan
        sites = plan.spec.resilience.sites
        assert sites.site is not None and sites.endpoint and sites.secret, "the launcher has checked them"
        hello = SiteHello(
            site=sites.site,
            rank=self._speakers.index(dist.get_rank()),
            ranks=len(self._speakers),
            batch=plan.spec.batching.global_batch_size,
            applied=self._applied(),
            recipe=agreement_of(plan),
            listen=sites.listen or "",
        )
        secret = read_secret(Path(sites.secret))
        silence_s = plan.spec.resilience.heartbeat_timeout_s
        return SiteLink(sites.endpoint, secret, hello, self._applied, silence_s)

    def close(self) -> None:
        if self._link:
            self._link.close()

    # What has arrived

    @property
    def has_answer(self) -> bool:
        return self._link is None or self._link.is_member is not None

    @property
    def follows(self) -> bool:
        return self._link is None or self._link.is_member is False

    def has(self, number: int) -> bool:
        return self._link is None or self._link.has(number)

    @property
    def trouble(self) -> str:
        return self._link.trouble if self._link else ""

    def check(self) -> None:
        """Raise WorkerError where the meeting point has refused this site."""
        if self._link and (refusal := self._link.refusal):
            raise WorkerError(
                f"the meeting point refuses this site: {refusal.reason}", code="refused", hint=refusal.hint
            )

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, and the outer gradients of this rank's shares by site."""
        record, parts = self._link.take(number) if self._link else (None, {})
        if self._copies.size() == 1:
            assert record is not None, "every rank has a connection"
            return record, parts
        plain = record and [to_plain(record), [[site, len(part)] for site, part in parts.items()]]
        (record, sizes), first = self._hand_on(plain, _read_round)
        content = b"".join(parts.values()) if self._link else bytes(sum(size for _, size in sizes))
        flat = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        dist.broadcast(flat, first, group=self._copies)
        whole = flat.numpy().tobytes()
        cut = {}
        for site, size in sizes:
            cut[site] = whole[:size]
            whole = whole[size:]
        return record, cut

    def read_record(self) -> RoundRecord | None:
        """Return the record of the newest round that was applied before this start."""
        record = self._link.record if self._link else None
        if self._copies.size() == 1:
            return record
        plain = to_plain(record) if record else None
        return self._hand_on(plain, lambda one: one and from_plain(RoundRecord, one))[0]

    def _hand_on(self, plain: Any, read: Callable[[Any], Any]) -> tuple[Any, int]:
        first = dist.get_global_rank(self._copies, 0)
        return broadcast_json(plain, read, first, self._copies), first

    # What is sent

    def send(
        self, number: int, encoded: bytes, work: tuple[int, int], rate: float, digest: str, saved_round: int
    ) -> None:
        """Send the outer gradient of a round. `work`: tokens and steps that it is made of."""
        if self._link:
            self._link.send(Sent(number, *work, rate, digest, saved_round), encoded)

    def follow(self, number: int) -> None:
        if self._link:
            self._link.follow(number)

    def join(self) -> None:
        if self._link:
            self._link.joined()

    # What is to be known of it

    def cut_notices(self) -> list[str]:
        """Return what the user should know of the direct ways to other sites, and was not returned before."""
        return self._link.cut_notices() if self._link else []

    def note_waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def cut_waited_s(self) -> float:
        """Return how long training has waited since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    @property
    def sent_bytes(self) -> int:
        return self._link.sent_bytes if self._link else 0

    @property
    def received_bytes(self) -> int:
        return self._link.received_bytes if self._link else 0


def _read_round(plain: Any) -> tuple[RoundRecord, list[tuple[int, int]]]:
    record, sizes = plain
    return from_plain(RoundRecord, record), [(convert(int, site), convert(int, size)) for site, size in sizes]
