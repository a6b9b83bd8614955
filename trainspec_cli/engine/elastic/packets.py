"""Gradients on their way to the other replica groups: packets that go while the backward pass still runs.

Which gradients share a packet, and the order of the packets, hang on the layout alone, so that all groups send the same
ones, whatever their micro-batches. A packet goes when its gradients, and those of all packets before it, are final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from trainspec_cli.engine.comm.background import Background
from trainspec_cli.engine.elastic.cross_group import packets, sum_as_one
from trainspec_cli.engine.shares import Share


@dataclass(frozen=True)
class Packet:
    number: int
    """Its place in the order of the model."""
    shares: tuple[Share, ...]

    @property
    def gradients(self) -> list[Tensor]:
        return [share.gradient for share in self.shares if share.gradient is not None]


def packets_in_order(shares: Sequence[Share], outside: Collection[str], late: Collection[str]) -> list[Packet]:
    """Return what is trained of `shares` in packets, in about the order in which a backward pass ends with them.

    That of the last block is done first, parameters `outside` of the blocks come when all blocks are done, and those in
    `late`, by name, are not final before all passes are.
    """
    trained = [share for share in shares if share.is_trained]
    made = [
        Packet(number, tuple(trained[place] for place in places))
        for number, places in enumerate(packets([share.local for share in trained]))
    ]
    places = {id(share): place for place, share in enumerate(trained)}

    def order(packet: Packet) -> tuple[int, int]:
        names = {share.name for share in packet.shares}
        end = 2 if names & set(late) else 1 if names & set(outside) else 0
        return end, -min(places[id(share)] for share in packet.shares)

    return sorted(made, key=order)


def names_outside_blocks(parts: Iterable[Any]) -> set[str]:
    """Return the parameters of stages that no block holds: embeddings, heads and the norm before them."""
    names: set[str] = set()
    for part in parts:
        of_blocks = {id(parameter) for block in part.block_modules() for parameter in block.parameters()}
        names |= {name for name, parameter in part.named_parameters() if id(parameter) not in of_blocks}
    return names


class GradientPackets:
    """The packets of one train state. Per step: `begin`, then backward passes, then `finish`; or `abandon`."""

    def __init__(
        self,
        ordered: Sequence[Packet],
        late: Collection[str],
        sum_: Callable[[int, Tensor], None],
        beside: Background,
        await_sums: Callable[[], Callable[[], object]] = lambda: lambda: None,
    ):
        """`sum_` is given a packet's number and its gradients in one piece, to be summed over the groups in place.

        `await_sums` returns what waits for the sums within the group that have begun: a packet goes after them.
        """
        self._packets, self._sum, self._beside, self._await_sums = ordered, sum_, beside, await_sums
        shares = [share for packet in ordered for share in packet.shares]
        self._left: dict[int, int] = {}
        """The exchanges within the group that the gradient of each share still waits for; empty between steps."""
        self._next = len(ordered)
        """The packet that goes next."""
        self._hooks = [
            share.parameter.register_post_accumulate_grad_hook(self._noting(share))
            for share in shares
            if share.name not in late
        ]

    def begin(self, exchanges: int) -> None:
        """Begin a step in which each gradient is exchanged within the group so many times. 0: its packets are held back
        until `finish`."""
        self._beside.wait()  # for what a step that was abandoned has left
        self._next = 0
        self._left = {id(share): exchanges for packet in self._packets for share in packet.shares if exchanges}

    def finish(self) -> None:
        """Send what is left, and wait until all is summed."""
        for packet in self._packets[self._next :]:
            self._send(packet)
        self._next, self._left = len(self._packets), {}
        self._beside.wait()

    def abandon(self) -> bool:
        """Send nothing more of this step; return whether something was sent."""
        sent, self._next, self._left = self._next, len(self._packets), {}
        return sent > 0

    def detach(self) -> None:
        """Look at the gradients no more."""
        for hook in self._hooks:
            hook.remove()

    def _noting(self, share: Share) -> Callable[[Tensor], None]:
        def note(_parameter: Tensor) -> None:
            if id(share) in self._left:
                self._left[id(share)] -= 1
                self._send_final()

        return note

    def _send_final(self) -> None:
        while self._next < len(self._packets) and self._is_final(self._packets[self._next]):
            self._send(self._packets[self._next])
            self._next += 1

    def _is_final(self, packet: Packet) -> bool:
        return all(self._left.get(id(share)) == 0 for share in packet.shares)

    def _send(self, packet: Packet) -> None:
        if gradients := packet.gradients:
            act = partial(sum_as_one, gradients, partial(self._sum, packet.number))
            self._beside.start(act, after=self._await_sums())
