"""How large a fabric of several planes is, what it is built of, and what the loss of a part costs (arXiv:2605.04333).

A switch of C bits a second has k = C p / R ports at the speed R/p of a NIC's port on one of p planes. Two tiers join
k^2/2 NICs with 3 k/2 switches a plane (k of them T0, k/2 T1), three tiers k^3/4 with 5 k^2/4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trainspec_cli.recipe.keys.fabric import PlanesSpec
from trainspec_cli.recipe.results.planes import Part, PlanesFigures


def radix_of(spec: PlanesSpec) -> int:
    """Ports of a switch at a plane's speed. The rules of a recipe see to it that it is a whole, even number."""
    return round(spec.switch_tbit_per_s * 1e3 * spec.planes / spec.nic_gbit_per_s)


def size_planes(spec: PlanesSpec) -> PlanesFigures:
    radix, tiers = radix_of(spec), spec.switch_tiers
    switches = (3 if tiers == 2 else 5) * spec.planes / radix
    return PlanesFigures(
        planes=spec.planes,
        radix=radix,
        switch_tiers=tiers,
        port_gbit_per_s=spec.nic_gbit_per_s / spec.planes,
        most_nics=radix**2 // 2 if tiers == 2 else radix**3 // 4,
        switches_per_nic=switches,
        optics_per_nic=2.0 * tiers,
        one_hop_nics=radix // 2,
        lost_speed=lost_speeds(spec.planes, radix),
    )


def lost_speeds(planes: int, radix: int) -> dict[Part, float]:
    """Part of a synchronous job's speed that each loss costs.

    A T0 switch has k/2 links up: one less takes 2/k of what its NICs send beyond it in that plane, and sprayed traffic
    loads all planes alike. A NIC's port, its T0 switch or a plane take one plane from it, its transceiver all of them.
    """
    link, plane = 2 / radix, 1 / planes
    return {"link": link, "port": plane, "t1_switch": link, "t0_switch": plane, "plane": plane, "transceiver": 1.0}


def single_plane(spec: PlanesSpec) -> PlanesSpec:
    """Return the ordinary fabric of the same switches and NICs: on two tiers if these join as many, else on three."""
    most = size_planes(spec).most_nics
    alone = replace(spec, planes=1, switch_tiers=2)
    return alone if size_planes(alone).most_nics >= most else replace(alone, switch_tiers=3)


def t0_switches(spec: PlanesSpec, nics: int) -> int:
    """The switches of a plane's lowest tier, for a job of so many NICs."""
    return max(1, math.ceil(nics / (radix_of(spec) // 2)))


def t1_switches(spec: PlanesSpec, nics: int) -> int:
    """The next tier's: half as many as T0, whose ports half go up; one where a single T0 switch joins all."""
    return max(1, math.ceil(t0_switches(spec, nics) / 2))
