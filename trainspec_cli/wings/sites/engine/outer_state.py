"""The weights shared by all sites, as kept by one rank of a site, and the rank's encoded outer gradients.

For its share of each trained parameter, in any layout, the rank keeps the shared weights and the outer momentum in
fp32. Each share is encoded separately, so copies of a share on several ranks stay bitwise identical."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainspec_cli.engine.comm.codec import Codec
from trainspec_cli.engine.digest import sum_bits
from trainspec_cli.engine.shares import Share

LAYER = re.compile(r"blocks\.(\d+)\.")
INPUT = "embed."
NEVER = -2
"""The newest applied round of a state that has neither been initialised nor loaded."""


@dataclass(frozen=True)
class OuterShare:
    """One rank's share of a parameter, with its shared weights and outer momentum."""

    share: Share
    fragment: int
    shared: Tensor
    momentum: Tensor

    @property
    def values(self) -> int:
        return self.shared.numel()


class OuterState:
    """The outer state of a rank. Its tensors only change between steps, so a checkpoint is consistent."""

    def __init__(
        self,
        shares: Sequence[Share],
        fragments: int,
        codec: Codec,
        lr: float,
        momentum: float,
        keep: float | None = None,
    ):
        self._codec = codec
        self._lr = lr
        self._factor = momentum
        self._keep = keep
        self.fragments = fragments
        trained = [share for share in shares if share.is_trained and share.local.numel()]
        self.shares = [_beside(share, fragments) for share in trained]
        device = self.shares[0].shared.device if self.shares else torch.device("cpu")
        sizes = [sum(self._bytes_of(one) for one in self._of((fragment,))) for fragment in range(fragments)]
        self._sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        """The encoded outer gradient that was sent but not yet merged."""
        self._about = torch.tensor([NEVER, 0, 0, 0, 0])
        """The newest applied round, followed by the data of the outer gradient in flight: its round (0 if none), size
        in bytes, tokens and steps."""
        self.counts = torch.zeros(2, fragments, dtype=torch.int64)
        """For each fragment, the number of tokens that this site has trained on, and the number of steps that it has
        taken, since its work on the fragment was last merged."""

    def saved(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint. `prefix` identifies the rank and the layout that they belong to."""
        named = {"about": self._about, "counts": self.counts, "sent": self._sent}
        for place, one in enumerate(self.shares):
            named |= {f"shared.{place}": one.shared, f"momentum.{place}": one.momentum}
        return {f"sites.{prefix}.{name}": tensor for name, tensor in named.items()}

    @property
    def is_new(self) -> bool:
        return self.applied == NEVER

    @property
    def applied(self) -> int:
        """The newest applied round; -1 if there is none."""
        return int(self._about[0])

    @property
    def sent_round(self) -> int:
        return int(self._about[1])

    @property
    def sent(self) -> bytes:
        """The encoded outer gradient in flight."""
        return bytes(self._sent[: int(self._about[2])].cpu().numpy().tobytes())

    @property
    def sent_work(self) -> tuple[int, int]:
        """The tokens and steps of the outer gradient in flight."""
        tokens, steps = self._about[3:].tolist()
        return tokens, steps

    @property
    def digest(self) -> str:
        """A digest of this rank's part of the shared state. Any flipped bit changes it."""
        kept = [tensor for one in self.shares for tensor in (one.shared, one.momentum)]
        return str(int(sum_bits(kept)))

    @torch.no_grad()
    def begin(self) -> None:
        """Initialise the shared weights with this rank's weights."""
        for one in self.shares:
            one.shared.copy_(one.share.local)
        self._about[0] = -1

    def count(self, tokens: int) -> None:
        """Count a step."""
        self.counts += torch.tensor([[tokens], [1]])

    @torch.no_grad()
    def encode(self, number: int, fragments: Sequence[int]) -> bytes:
        """Return the encoded outer gradient of these fragments."""
        rows = []
        for one in self._of(fragments):
            # The outer gradient points away from the site's weights, because the update moves shared weights towards
            # the site's.
            wanted = (one.shared - one.share.local.detach().float()).flatten()
            rows.append(self._codec.encode(wanted[None])[0])
        sent = torch.cat(rows) if rows else self._sent[:0]
        if len(sent) > len(self._sent):  # the last exchange contains all fragments, and no checkpoint follows it
            self._sent = sent
        else:
            self._sent[: len(sent)] = sent
        tokens, steps = self.counts[:, list(fragments)].amax(1).tolist()  # those of the least recently merged fragment
        self._about[1:] = torch.tensor([number, len(sent), tokens, steps])
        return self.sent

    @torch.no_grad()
    def apply(
        self, fragments: Sequence[int], encoded: Sequence[bytes], weights: Sequence[float], own: int | None
    ) -> None:
        """Update the shared weights with the weighted mean of the sites' outer gradients, summed in fp32 in the given
        order. Then update this rank's own weights accordingly.

        `own`: index of this site's outer gradient, or None. Raises ValueError if the length of a gradient differs from
        this rank's."""
        chosen = self._of(fragments)
        sizes = [self._bytes_of(one) for one in chosen]
        rows = [_row(one, self._sent.device) for one in encoded]
        if any(len(row) != sum(sizes) for row in rows):
            raise ValueError(f"outer gradients have {[len(row) for row in rows]} bytes, expected {sum(sizes)}")
        parts = [row.split(sizes) for row in rows]
        for place, one in enumerate(chosen):
            gradient = torch.zeros_like(one.shared)
            sent = None
            for site, weight in enumerate(weights):
                decoded = self._codec.decode(parts[site][place][None], one.values)[0].view_as(one.shared)
                gradient += decoded * weight
                sent = decoded if site == own else sent
            # Nesterov momentum as in torch's SGD: m' = factor m + g, weights -= rate (g + factor m').
            momentum = one.momentum * self._factor + gradient
            shared = one.shared - (gradient + momentum * self._factor) * self._lr
            local = one.share.local
            if self._keep is None or sent is None:
                # A site's weights change by the update of the shared weights minus the site's own contribution. The
                # remaining difference between the two is exactly what was not sent (later steps and encoding errors),
                # and the next outer gradient starts from it.
                local.copy_(local + (0.0 if sent is None else sent) + (shared - one.shared))
            else:
                # Streaming DiLoCo, arXiv:2501.18512, equation 3.
                local.copy_(local * self._keep + shared * (1 - self._keep))
            one.shared.copy_(shared)
            one.momentum.copy_(momentum)

    def note_applied(self, number: int) -> None:
        self._about[:] = torch.tensor([number, 0, 0, 0, 0])

    def note_merged(self, fragments: Sequence[int]) -> None:
        """Record that the outer gradient in flight was merged. Steps taken since it was sent count towards the next
        one."""
        chosen = list(fragments)
        self.counts[:, chosen] = (self.counts[:, chosen] - self._about[3:, None]).clamp_min(0)

    @torch.no_grad()
    def take_shared(self) -> None:
        """Continue from the shared weights, and discard what only this site has learned."""
        for one in self.shares:
            one.share.local.copy_(one.shared)
        self.counts.zero_()

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Load the shared weights into the model for the duration of the block."""
        with torch.no_grad():
            own = [one.share.local.detach().clone() for one in self.shares]
            for one in self.shares:
                one.share.local.copy_(one.shared)
        yield
        with torch.no_grad():
            for one, weights in zip(self.shares, own, strict=True):
                one.share.local.copy_(weights)

    def _of(self, fragments: Sequence[int]) -> list[OuterShare]:
        return [one for fragment in fragments for one in self.shares if one.fragment == fragment]

    def _bytes_of(self, one: OuterShare) -> int:
        """Return the size of a share's encoded gradient in bytes."""
        return len(self._codec.encode(torch.zeros(1, one.values))[0])


@torch.no_grad()
def _beside(share: Share, fragments: int) -> OuterShare:
    if layer := LAYER.match(share.name):
        # The stride gives each fragment both early and late layers.
        fragment = int(layer[1]) % fragments
    else:
        fragment = 0 if share.name.startswith(INPUT) else fragments - 1
    shared = share.local.detach().float().clone()
    return OuterShare(share, fragment, shared, torch.zeros_like(shared))


def _row(encoded: bytes, device: torch.device) -> Tensor:
    if not encoded:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
