"""The choice of the timed exchanges, and their reports: transfer and waiting separately, on a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from trainspec_cli.balance.decisions.links import TIMED_EXCHANGES, Transfer
from trainspec_cli.engine import digest
from trainspec_cli.engine.observe import links
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.links import GROUPS, LinkSample, LinkTimers

BYTES = 4e6
MEETING_S = 0.25
GROUP: Any = SimpleNamespace(size=lambda: 2, group_name="main")
OTHER: Any = SimpleNamespace(size=lambda: 2, group_name="of the thread")


class Network:
    """A group whose other rank comes `late_s` after this one, and whose exchanges take `transfer_s`."""

    def __init__(self) -> None:
        self.now_s, self.late_s, self.transfer_s, self.meetings = 100.0, 0.0, 1.0, 0
        self.met = set[str]()

    def perf_counter(self) -> float:
        return self.now_s

    def barrier(self, group: Any) -> None:
        self.met.add(group.group_name)
        self.meetings += 1
        self.now_s += MEETING_S + self.late_s
        self.late_s = 0.0

    def exchange(self) -> None:
        self.now_s += self.late_s + self.transfer_s


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(digest, "time", network)
    monkeypatch.setattr(links, "dist", network)
    return network


class Step(NamedTuple):
    timed: list[int]
    """The exchanges that were timed."""
    sample: LinkSample


def step(timers: LinkTimers, network: Network, exchanges: int, *, sampled: bool, late_s: float = 0.0) -> Step:
    """Make a step with `exchanges` exchanges along tp."""
    time, timed = timers.of("tp", GROUP), []
    timers.begin(sampled)
    for number in range(exchanges):
        network.late_s = late_s
        with time():
            network.exchange()  # a message next to nothing
        network.late_s = late_s
        with time(BYTES) as is_timed:
            network.exchange()
        timed += [number] if is_timed else []
    return Step(timed, timers.end())


def test_a_sample_shows_the_transfer_apart_from_waiting_for_the_last_rank(network: Network) -> None:
    timers = LinkTimers(StepClock(torch.device("cpu")))
    assert step(timers, network, 3, sampled=False).timed == []
    assert network.meetings == 0, "other steps exchange no more than they need"
    timed, sample = step(timers, network, 3, sampled=True, late_s=7.0)
    assert timed == [0, 1, 2]
    assert sample.transfer("tp") == Transfer(BYTES, 1.0, MEETING_S + 7.0)
    assert sample.cost_s == 4 * MEETING_S, "waiting for a late rank costs nothing: the exchange would have waited"
    assert step(timers, network, 3, sampled=False).timed == []
    assert sample.transfer("tp").sent_bytes == BYTES, "a later step does not change it"


def test_exchanges_that_are_hidden_otherwise_cost_what_they_take(network: Network) -> None:
    timers = LinkTimers(StepClock(torch.device("cpu")))
    timers.of("tp", GROUP, is_hidden=True)
    _, sample = step(timers, network, 3, sampled=True, late_s=7.0)
    assert sample.cost_s == 4 * MEETING_S + 3 * network.transfer_s


def test_exchanges_that_go_on_beside_the_backward_cost_what_all_of_them_take(network: Network) -> None:
    """Also those that are not timed; waiting for a late rank is left out. Other exchanges of the axis cost nothing."""
    timers = LinkTimers(StepClock(torch.device("cpu")))
    step(timers, network, 9, sampled=False)
    held_back = timers.of_held_back("tp", GROUP)
    timers.begin(True)
    for _ in range(6):
        network.late_s = 7.0
        with held_back(BYTES):
            network.exchange()
    with held_back(None):
        network.exchange()
    assert timers.end().cost_s == 3 * MEETING_S + 6 * network.transfer_s, "two of six were timed"
    timers.begin(False)
    timed, sample = step(timers, network, 3, sampled=True)
    assert timed == [0, 2]
    assert sample.cost_s == 3 * MEETING_S


def test_a_few_exchanges_spread_over_the_step_are_timed(network: Network) -> None:
    timers = LinkTimers(StepClock(torch.device("cpu")))
    step(timers, network, 11, sampled=False)
    assert step(timers, network, 11, sampled=True).timed == [0, 3, 6, 9]
    assert TIMED_EXCHANGES == 4 and network.meetings == 5


def test_an_exchange_without_bytes_is_met_for_like_any_other(network: Network) -> None:
    """Ranks whose experts get nothing meet those whose experts do."""
    timers = LinkTimers(StepClock(torch.device("cpu")))
    time = timers.of("ep", GROUP)
    timers.begin(True)
    with time(0.0) as is_timed:
        assert is_timed
    assert timers.end().transfer("ep") == Transfer()
    assert network.meetings == 2


def test_time_inside_is_exposed_communication(network: Network) -> None:
    clock = StepClock(torch.device("cpu"))
    timers = LinkTimers(clock)
    parts = [name for name, _ in clock._marks]
    step(timers, network, 1, sampled=True)
    assert "exposed_comm" in {name for name, _ in clock._marks} - set(parts)


def test_one_rank_alone_has_no_links() -> None:
    clock = StepClock(torch.device("cpu"))
    assert LinkTimers(clock).of("tp", SimpleNamespace(size=lambda: 1)) == clock.collective  # type: ignore[arg-type]


def test_replica_groups_are_told_of_and_forgotten_with_the_step() -> None:
    timers = LinkTimers(StepClock(torch.device("cpu")))
    timers.begin(True)
    timers.note_across(8.0, 0.5, 0.1)
    sample = timers.end()
    assert sample.transfer(GROUPS) == Transfer(8.0, 0.5, 0.1)
    assert sample.cost_s == 0.5, "in another step they overlap with the backward"
    timers.begin(True)
    assert timers.end().transfer(GROUPS) == Transfer()


def test_two_groups_of_one_axis_meet_each_by_itself(network: Network) -> None:
    """One of them is a thread's, which may be in the middle of an exchange when the other one's ranks meet."""
    timers = LinkTimers(StepClock(torch.device("cpu")))
    held_back, gather = timers.of_held_back("dp_shard", OTHER), timers.of("dp_shard", GROUP)
    timers.begin(is_sampled=True)
    with held_back():
        network.exchange()  # it encodes, and so shows nothing
    with gather(BYTES):
        network.exchange()
    assert network.met == {"main"}
    with held_back(BYTES):
        network.exchange()
    assert network.met == {"main", "of the thread"}
    assert timers.end().transfer("dp_shard") == Transfer(BYTES, 1.0, MEETING_S)
