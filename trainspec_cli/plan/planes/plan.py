"""A multi-plane fabric for a job: its figures, what each failure costs, and what failures of the network cost a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.plan.planes.sizes import single_plane, size_planes, t1_switches
from trainspec_cli.plan.planes.spray import Failure, flaps_by_chance, simulate
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.keys.fabric import PlanesSpec
from trainspec_cli.recipe.results.planes import PlanesPlan, SprayedEvent

REBOOT_S = 300.0
"""A switch that reboots is down so long: an example."""
DAY_S, MONTH_HOURS = 86_400.0, 720.0
MOST_FLAPS = 300.0
"""Expected of a simulation by chance, which ends there."""


def plan_planes(cluster: ClusterSpec, nics: int) -> PlanesPlan | None:
    """Return the figures of the cluster's fabric for a job of so many NICs; None where it has one plane."""
    spec = cluster.fabric.planes
    if spec is None:
        return None
    return PlanesPlan(
        nics=nics,
        figures=size_planes(spec),
        single=size_planes(single_plane(spec)),
        t1_switches=t1_switches(spec, nics),
        events=(*_events(spec, nics), *_by_chance(spec, cluster.reliability, nics)),
        dips_per_day=dips_per_s(spec, cluster.reliability, nics) * DAY_S,
        dip_share=dip_share(spec, cluster.reliability, nics),
    )


def _events(spec: PlanesSpec, nics: int) -> Iterator[SprayedEvent]:
    """One failure of each part, and four ports that flap at once, two of them of one NIC."""
    down_s, other = spec.flap_s, min(nics - 1, nics // 2)
    planes = range(spec.planes)

    def ports(nic: int, number: int) -> list[Failure]:
        return [Failure("port", 0.0, down_s, plane=plane, nic=nic) for plane in planes[:number]]

    yield simulate(spec, nics, [Failure("link", 0.0, down_s)], "a link between T0 and T1 flaps")
    yield simulate(spec, nics, ports(0, 1), "a NIC's port flaps")
    if spec.planes > 1:
        flaps = [*ports(0, 2), *ports(other, 1), *ports(nics - 1, 1)]
        yield simulate(spec, nics, flaps, "four ports flap, two of them of one NIC")
    yield simulate(spec, nics, [Failure("t1_switch", 0.0, REBOOT_S)], "a T1 switch reboots")
    yield simulate(spec, nics, [Failure("t0_switch", 0.0, REBOOT_S)], "a T0 switch reboots")
    if spec.planes > 1:
        yield simulate(spec, nics, [Failure("plane", 0.0, down_s)], "a whole plane is cut")
    yield simulate(spec, nics, [Failure("transceiver", 0.0, down_s)], "a NIC's transceiver flaps")


def _by_chance(spec: PlanesSpec, reliability: ReliabilitySpec, nics: int) -> Iterator[SprayedEvent]:
    """A month of the network's failures, where planes survive them; less where they come more often than is of use."""
    per_hour = dips_per_s(spec, reliability, nics) * 3600
    if per_hour:
        hours = min(MONTH_HOURS, MOST_FLAPS / per_hour)
        flaps = flaps_by_chance(spec, nics, per_hour, hours, seed=0)
        yield simulate(spec, nics, flaps, f"{hours / 24:.3g} days, in which {len(flaps):,} ports flap by chance")


def dips_per_s(spec: PlanesSpec, reliability: ReliabilitySpec, nics: int) -> float:
    """Failures of the network that planes survive, of the whole job."""
    fraction = spec.network_fraction * (1 - spec.fatal_fraction) * (spec.planes > 1)
    return fraction * nics / (reliability.mtbf_device_hours * 3600)


def dip_share(spec: PlanesSpec, reliability: ReliabilitySpec, nics: int) -> float:
    """Part of a run's time that these cost: each takes a plane from the slowest NIC until the link is back and probed.

    Dips that overlap are counted one by one, which is more than they cost.
    """
    one_s = simulate(spec, nics, [Failure("port", 0.0, spec.flap_s)]).lost_s
    return min(1.0, dips_per_s(spec, reliability, nics) * one_s)


def ending_failures(spec: PlanesSpec | None, reliability: ReliabilitySpec) -> ReliabilitySpec:
    """Return the failures that still end a job where those of the network cost a dip."""
    if spec is None or spec.planes == 1:
        return reliability
    left = 1 - spec.network_fraction * (1 - spec.fatal_fraction)
    return replace(reliability, mtbf_device_hours=reliability.mtbf_device_hours / left)
