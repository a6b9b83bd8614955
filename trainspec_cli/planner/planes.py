"""The size and parts of a multi-plane fabric, and the cost of losing a part (arXiv:2605.04333).

A switch of C bits per second has k = C p / R ports at R/p, the speed of a NIC's port on one of p planes. Two tiers
connect k^2/2 NICs with 3 k/2 switches per plane (k of them T0, k/2 T1); three tiers connect k^3/4 NICs with 5 k^2/4
switches."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from trainspec_cli.recipe.keys.cluster import ClusterSpec, PlanesSpec, ReliabilitySpec
from trainspec_cli.recipe.results.blueprint import Part, PlanesFigures, PlanesPlan, SprayedEvent


def radix_of(spec: PlanesSpec) -> int:
    """Return the number of ports of a switch at the speed of one plane. The recipe's rules ensure that it is an even
    integer."""
    return round(spec.switch_tbit_per_s * 1e3 * spec.planes / spec.nic_gbit_per_s)


def size_planes(spec: PlanesSpec) -> PlanesFigures:
    radix = radix_of(spec)
    tiers = spec.switch_tiers
    switches = (3 if tiers == 2 else 5) * spec.planes / radix
    # The fraction of a synchronous job's speed that each loss costs. A T0 switch has k/2 uplinks. Losing one removes
    # 2/k of what its NICs can send beyond the switch in that plane, and sprayed traffic loads all planes equally.
    # Losing a port, a T0 switch or a plane costs a NIC one plane; losing the NIC's transceiver costs it all planes.
    link = 2 / radix
    plane = 1 / spec.planes
    lost_speed: dict[Part, float] = {"link": link, "port": plane, "t1_switch": link, "t0_switch": plane}
    lost_speed |= {"plane": plane, "transceiver": 1.0}
    return PlanesFigures(
        planes=spec.planes,
        radix=radix,
        switch_tiers=tiers,
        port_gbit_per_s=spec.nic_gbit_per_s / spec.planes,
        most_nics=radix**2 // 2 if tiers == 2 else radix**3 // 4,
        switches_per_nic=switches,
        optics_per_nic=2.0 * tiers,
        one_hop_nics=radix // 2,
        lost_speed=lost_speed,
    )


def single_plane(spec: PlanesSpec) -> PlanesSpec:
    """Return the single-plane fabric with the same switches and NICs: with two tiers if they connect the same number of
    NICs, otherwise with three."""
    most = size_planes(spec).most_nics
    alone = replace(spec, planes=1, switch_tiers=2)
    return alone if size_planes(alone).most_nics >= most else replace(alone, switch_tiers=3)


def t1_switches(spec: PlanesSpec, nics: int) -> int:
    """Return the number of switches in a plane's second tier for a job with `nics` NICs. It is half the number of T0
    switches, because these use half of their ports as uplinks; it is one if a single T0 switch connects all NICs."""
    t0_switches = max(1, math.ceil(nics / (radix_of(spec) // 2)))
    return max(1, math.ceil(t0_switches / 2))


# A synchronous job on a fabric whose queue pairs spray packets over every plane, while parts of the fabric fail and
# recover.
#
# Packets, queues and ECN marks are not simulated: paths are counted by the parts that they pass through, and speeds
# follow from which ports and links are up. Each NIC sends to one other NIC and receives from one, both beyond its T0
# switch; all NICs wait for the slowest. The cost of an event grows with the number of failed parts, not with the size
# of the job.


DETECT_S = 0.001
"""Time from the failure of a path until its losses are recognised and other paths in its plane are used. This is an
estimate, because the papers do not give a value. The loss until then is 0.2 ms of the 7.6 s that a one-minute port flap
costs."""
PROBE_S = 1.0
"""Time between two probes of a path that is assumed to be bad. This is also an estimate; for comparison, a flapping
link is down for a minute."""
ENDS = 2
"""Number of queue pairs per NIC: the one on which it sends, and the one on which another NIC sends to it."""


@dataclass(frozen=True)
class Failure:
    """A part of the fabric that is down for a while."""

    part: Part
    at_s: float
    for_s: float
    plane: int = 0
    nic: int = 0
    """Index of the NIC with the port or transceiver, which also determines the T0 switch."""
    t0: int = 0
    """Index of the failed T0 switch, or of the failed link's T0 switch."""


class SprayedFabric:
    """The failed parts of a fabric and the speed that remains."""

    def __init__(self, spec: PlanesSpec, nics: int):
        self.spec = spec
        self.nics = nics
        self.nics_per_t0 = min(nics, radix_of(spec) // 2)
        self.uplinks = radix_of(spec) // 2
        self.t1s = t1_switches(spec, nics)
        self._down: Counter[tuple[Part, int, int]] = Counter()
        """(part, plane, number) of each failed part."""

    def change(self, failure: Failure, by: int) -> None:
        # Two failures of the same part count once. A part is identified by its plane and its NIC or T0 switch.
        which = failure.nic if failure.part in ("port", "transceiver") else 0
        if failure.part in ("link", "t0_switch"):
            which = failure.t0
        key = (failure.part, failure.plane, which)
        self._down[key] += by
        if not self._down[key]:
            del self._down[key]

    @property
    def speed(self) -> float:
        """Return the speed of the slowest NIC. If a plane has no path, the other planes share its load equally, so the
        plane with the fewest working links limits the speed."""
        whole = {plane for part, plane, _ in self._down if part == "plane"}
        missing: dict[int, set[int]] = {}
        for part, plane, which in self._down:
            if part == "port":
                missing.setdefault(which, set()).add(plane)
        cut = {(plane, t0) for part, plane, t0 in self._down if part == "t0_switch"}
        slowest = self._of_nic(whole, None)
        for t0 in {t0 for _, t0 in cut} | {t0 for part, _, t0 in self._down if part == "link"}:
            slowest = min(slowest, self._of_nic(whole | {plane for plane, of in cut if of == t0}, t0))
        for nic, planes in missing.items():
            t0 = nic // self.nics_per_t0
            slowest = min(slowest, self._of_nic(whole | planes | {plane for plane, of in cut if of == t0}, t0))
        return slowest

    def _of_nic(self, missing: set[int], t0: int | None) -> float:
        usable = [plane for plane in range(self.spec.planes) if plane not in missing]
        narrowest = 1.0 if usable else 0.0
        for plane in usable:
            # Uplinks to failed T1 switches cannot be used.
            down = sum(times for (part, of, _), times in self._down.items() if part == "t1_switch" and of == plane)
            lost = self.uplinks / self.t1s * down
            if t0 is not None:
                lost += self._down.get(("link", plane, t0), 0)
            narrowest = min(narrowest, max(0.0, 1 - lost / self.uplinks))
        return len(usable) / self.spec.planes * narrowest

    # Queue pairs and paths that a failure affects

    @property
    def paths_per_plane(self) -> float:
        """Return the number of entropy values of a queue pair in each plane."""
        return self.spec.entropy_values / self.spec.planes

    def paths_through(self, part: Part) -> int:
        """Return the expected number of entropy values, over all queue pairs, whose paths pass through a part of this
        kind."""
        ends = {"port": ENDS, "transceiver": ENDS * self.spec.planes, "t0_switch": ENDS * self.nics_per_t0}
        if part in ends:
            return round(ends[part] * self.paths_per_plane)
        shared = {"link": ENDS * self.nics_per_t0 / self.uplinks, "t1_switch": self.nics / self.t1s}
        return round(shared.get(part, float(self.nics)) * self.paths_per_plane)

    def touched(self, part: Part) -> float:
        """Return the fraction of queue pairs that have a path through a part of this kind."""
        some = 1 - math.pow(1 - 1 / self.t1s, self.paths_per_plane)
        own = min(1.0, ENDS / self.nics)
        below = min(1.0, ENDS * self.nics_per_t0 / self.nics)
        one_link = 1 - math.pow(1 - 1 / self.uplinks, self.paths_per_plane)
        return {"t1_switch": some, "link": below * one_link, "t0_switch": below, "plane": 1.0}.get(part, own)


def simulate(spec: PlanesSpec, nics: int, failures: Sequence[Failure], name: str = "") -> SprayedEvent:
    """Simulate the failures for a job with `nics` NICs. A failed transceiver ends the job.

    A path's losses are recognised as a failure after `DETECT_S`; data lost until then is retransmitted. The paths
    through a repaired part are used after the next probe."""
    fabric = SprayedFabric(spec, nics)
    # Paths (of all queue pairs together) that lost a packet, or whose port is known by the NIC to be down. They are not
    # used until a probe is answered (arXiv:2606.18170).
    paths = round(nics * fabric.paths_per_plane * spec.planes)
    bad = 0
    now_s = 0.0
    slow_s = 0.0
    lost_s = 0.0
    lowest = 1.0
    most_bad = 0
    speed = 1.0
    heap: list[tuple[float, int, str, Failure]] = []
    numbers = count()
    for failure in failures:
        back_s = failure.at_s + max(failure.for_s, DETECT_S)
        moments = {"fails": failure.at_s, "noticed": failure.at_s + DETECT_S, "probed": back_s + PROBE_S}
        for change, at_s in moments.items():
            heapq.heappush(heap, (at_s, next(numbers), change, failure))
    while heap:
        at_s, _, change, failure = heapq.heappop(heap)
        lost_s += (1 - speed) * (at_s - now_s)
        slow_s += (at_s - now_s) * (speed < 1)
        now_s = at_s
        if failure.part == "transceiver":
            break
        resent = 0.0
        if change == "fails":
            fabric.change(failure, 1)
            # Before the failure is detected, a queue pair loses the packets on its paths through the failed part.
            part = 1.0 if failure.part in ("port", "t0_switch", "plane") else 2 / radix_of(spec)
            resent = 1 / spec.planes * part
        elif change == "noticed":
            bad = min(paths, bad + fabric.paths_through(failure.part))
        else:
            bad = max(0, bad - fabric.paths_through(failure.part))
            fabric.change(failure, -1)
        speed = fabric.speed * (1 - resent)
        if change != "fails":
            lowest = min(lowest, speed)
        most_bad = max(most_bad, bad)
    return SprayedEvent(
        name=name,
        lowest_speed=lowest,
        slow_s=slow_s,
        lost_s=lost_s,
        touched=max((fabric.touched(failure.part) for failure in failures), default=0.0),
        most_bad_paths=most_bad,
        ends_job=any(failure.part == "transceiver" for failure in failures),
    )


def flaps_by_chance(spec: PlanesSpec, nics: int, per_hour: float, hours: float, seed: int) -> list[Failure]:
    """Draw flapping ports, at a rate per hour for the entire job, each at a random NIC and plane."""
    chance = random.Random(seed)
    now_s = 0.0
    flaps = []
    while (now_s := now_s + chance.expovariate(per_hour / 3600)) < hours * 3600:
        flaps.append(
            Failure("port", now_s, spec.flap_s, plane=chance.randrange(spec.planes), nic=chance.randrange(nics))
        )
    return flaps


# A multi-plane fabric for a job: its dimensions, the cost of each failure, and the cost of network failures over a run.


REBOOT_S = 300.0
"""Assumed downtime while a switch reboots."""
DAY_S = 86_400.0
MONTH_HOURS = 720.0
MOST_FLAPS = 300.0
"""Maximum expected number of flaps in the random simulation."""


def plan_planes(cluster: ClusterSpec, nics: int) -> PlanesPlan | None:
    """Return the cluster's fabric for a job with `nics` NICs; None if it has only one plane."""
    spec = cluster.fabric.planes
    if spec is None:
        return None
    reliability = cluster.reliability
    events = [*_events(spec, nics)]
    dips_s = dips_per_s(spec, reliability, nics)
    if dips_s:  # one month, or less if that is enough for `MOST_FLAPS` flaps
        hours = min(MONTH_HOURS, MOST_FLAPS / (dips_s * 3600))
        flaps = flaps_by_chance(spec, nics, dips_s * 3600, hours, seed=0)
        name = f"{hours / 24:.3g} days, in which {len(flaps):,} ports flap at random"
        events.append(simulate(spec, nics, flaps, name))
    return PlanesPlan(
        nics=nics,
        figures=size_planes(spec),
        single=size_planes(single_plane(spec)),
        t1_switches=t1_switches(spec, nics),
        events=tuple(events),
        dips_per_day=dips_s * DAY_S,
        dip_share=dip_share(spec, reliability, nics),
    )


def _events(spec: PlanesSpec, nics: int) -> Iterator[SprayedEvent]:
    """Yield one failure of each kind of part, and a flap of four ports at once, two of them on the same NIC."""
    down_s = spec.flap_s
    other = min(nics - 1, nics // 2)
    planes = range(spec.planes)

    def ports(nic: int, number: int) -> list[Failure]:
        return [Failure("port", 0.0, down_s, plane=plane, nic=nic) for plane in planes[:number]]

    yield simulate(spec, nics, [Failure("link", 0.0, down_s)], "a link between T0 and T1 flaps")
    yield simulate(spec, nics, ports(0, 1), "a NIC's port flaps")
    if spec.planes > 1:
        flaps = [*ports(0, 2), *ports(other, 1), *ports(nics - 1, 1)]
        yield simulate(spec, nics, flaps, "four ports flap, two of them on one NIC")
    yield simulate(spec, nics, [Failure("t1_switch", 0.0, REBOOT_S)], "a T1 switch reboots")
    yield simulate(spec, nics, [Failure("t0_switch", 0.0, REBOOT_S)], "a T0 switch reboots")
    if spec.planes > 1:
        yield simulate(spec, nics, [Failure("plane", 0.0, down_s)], "an entire plane fails")
    yield simulate(spec, nics, [Failure("transceiver", 0.0, down_s)], "a NIC's transceiver flaps")


def dips_per_s(spec: PlanesSpec, reliability: ReliabilitySpec, nics: int) -> float:
    """Return the rate, over the entire job, of network failures that a multi-plane fabric survives."""
    fraction = spec.network_fraction * (1 - spec.fatal_fraction) * (spec.planes > 1)
    return fraction * nics / (reliability.mtbf_device_hours * 3600)


def dip_share(spec: PlanesSpec, reliability: ReliabilitySpec, nics: int) -> float:
    """Return the fraction of a run's time that these failures cost. During each one, the slowest NIC is without one
    plane until the link is repaired and probed.

    Overlapping dips are counted separately, which overestimates their cost."""
    one_s = simulate(spec, nics, [Failure("port", 0.0, spec.flap_s)]).lost_s
    return min(1.0, dips_per_s(spec, reliability, nics) * one_s)


def ending_failures(spec: PlanesSpec, reliability: ReliabilitySpec) -> ReliabilitySpec:
    """Return the rates of failures that still end a job if network failures only cause a dip in speed."""
    if spec.planes == 1:
        return reliability
    left = 1 - spec.network_fraction * (1 - spec.fatal_fraction)
    return replace(reliability, mtbf_device_hours=reliability.mtbf_device_hours / left)
