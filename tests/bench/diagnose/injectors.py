"""How each mechanism is done to a live run, and undone."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Protocol

from lab.hosts import Hosts
from lab.memory_limit import MemoryLimit
from lab.quota import Quota

from .cases import Case, Injection
from .live_run import LiveRun
from .processor import Bursts, Competitors, pin


class Removable(Protocol):
    def remove(self) -> object: ...


MOST = 8
"""Competitors for a core."""
NICENESS, WEIGHT = -10, 9.3
"""Of a competitor, and how many ordinary processes it counts for: a rank that sleeps in its passes needs less of a core
than its share among eight, and would not be slowed."""
LEAST_PERCENT = 1.0
"""The kernel takes no smaller share of a core."""
WHOLE_BOUNDS_S = (1.5, 3.0)
"""Bounds of the time between two outages of a cable."""

Inject = Callable[[LiveRun, Injection], Removable | None]


def prepare(run: LiveRun, case: Case) -> None:
    """Do what must be so from the beginning, for all steps to be alike but for the injection."""
    for injection in case.injections:
        if injection.mechanism == "lengths":
            _in_all_ranks(run, injection)


def settle(run: LiveRun, case: Case) -> None:
    """Once all ranks run: the one whose core will be shared has it to itself, the others have the other cores."""
    for injection in case.injections:
        if injection.mechanism == "competitors":
            cores = _cores(injection)
            for rank in range(case.ranks):
                pin(run.worker(rank), cores if rank == injection.rank else os.sched_getaffinity(0) - cores)


def inject(run: LiveRun, injection: Injection) -> Removable | None:
    """Begin; return what ends it again, None where nothing outlives the run."""
    return INJECTORS[injection.mechanism](run, injection)


def _cores(injection: Injection) -> set[int]:
    """Return the core that a rank and its competitors share."""
    cores = sorted(os.sched_getaffinity(0))
    assert injection.rank is not None and len(cores) > 1, "a core for one rank, and others for the rest"
    return {cores[injection.rank % len(cores)]}


def _quota(run: LiveRun, injection: Injection) -> Removable:
    """The rank, or each of the node's ranks, gets so much less of a core that what it computes in a step takes longer
    than a step: it sleeps in its passes, and a share of what it needs while it computes would not hold it back."""
    ranks = [injection.rank] if injection.node is None else list(run.case.ranks_of_node(injection.node))
    takes_s = (1 + injection.strength) * run.recent_step_s()
    quota = Quota(max(LEAST_PERCENT, 100 * sum(run.processor_step_s(rank) / takes_s for rank in ranks)))
    for rank in ranks:
        quota.hold(run.worker(rank))
    return quota


def _competitors(run: LiveRun, injection: Injection) -> Removable:
    """So many processes share the rank's core with it that its own work takes longer."""
    assert injection.rank is not None
    more = injection.strength * run.recent_step_s() / run.processor_step_s(injection.rank)
    return Competitors(max(1, min(MOST, round(more / WEIGHT))), _cores(injection), NICENESS)


def _cable(run: LiveRun, injection: Injection) -> None:
    """`strength`: of `loss` percent of packets, of `delay` milliseconds each way."""
    assert run.hosts is not None and injection.node is not None
    host = injection.node + 1
    match injection.mechanism:
        case "rate":
            takes_s = (1 + injection.strength) * run.recent_step_s()  # up to a step of it passes beside computing
            run.hosts.limit_rate(host, f"{8e-6 * run.step_bytes(injection.node) / takes_s:.1f}mbit")
        case "loss":
            run.hosts.lose(host, injection.strength)
        case "delay":
            run.hosts.delay(host, injection.strength)


def _stop(run: LiveRun, injection: Injection) -> None:
    assert injection.rank is not None
    run.worker(injection.rank).suspend()


def _in_rank(run: LiveRun, injection: Injection) -> None:
    """`strength`: as the function of this name in `inside/sitecustomize.py` takes it."""
    assert injection.rank is not None
    run.order(injection.rank, injection.mechanism, injection.strength)


def _in_all_ranks(run: LiveRun, injection: Injection) -> None:
    for rank in range(run.case.ranks):
        run.order(rank, injection.mechanism, injection.strength)


def _bursts(run: LiveRun, injection: Injection) -> Removable:
    """`strength`: seconds of a burst."""
    return Bursts(injection.strength, run.case.seed)


def _short_memory(run: LiveRun, injection: Injection) -> Removable:
    """The rank goes through `strength` bytes in each pass, and half of them fit into its memory."""
    assert injection.rank is not None
    limit = MemoryLimit(int(injection.strength / 2))
    limit.hold(run.worker(injection.rank))
    _in_rank(run, injection)
    return limit


def _flaps(run: LiveRun, injection: Injection) -> Removable:
    """`strength`: seconds for which the node's cable is out, again and again."""
    assert run.hosts is not None and injection.node is not None
    return Flaps(run.hosts, injection.node + 1, injection.strength, run.case.seed)


class Flaps:
    """A cable that goes away for a while and comes back, again and again."""

    def __init__(self, hosts: Hosts, host: int, outage_s: float, seed: int):
        self._hosts, self._host, self._outage_s = hosts, host, outage_s
        self._draw, self._ended = random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        while not self._ended.is_set():
            self._hosts.cut(self._host)
            self._ended.wait(self._outage_s)
            self._hosts.heal(self._host)
            self._ended.wait(self._draw.uniform(*WHOLE_BOUNDS_S))

    def remove(self) -> None:
        self._ended.set()
        self._thread.join()


def _nothing(run: LiveRun, injection: Injection) -> None:
    """The recipe or `prepare` has done it."""


INJECTORS: dict[str, Inject] = {
    "quota": _quota,
    "node_quota": _quota,
    "competitors": _competitors,
    "rate": _cable,
    "loss": _cable,
    "delay": _cable,
    "slow_reads": _in_rank,
    "garbage": _in_rank,
    "leak": _in_rank,
    "spin": _in_rank,
    "stop": _stop,
    "slow_disk": _in_all_ranks,
    "burst": _bursts,
    "short_memory": _short_memory,
    "shapes": _in_rank,
    "flaps": _flaps,
    "lengths": _nothing,
    "stage": _nothing,
}
