"""What is published of multi-plane fabrics, beside what the planner says: within 2%, or the same at the printed digits.

Sources: arXiv:2605.04333 and arXiv:2606.18170. A figure such as 12% stands for all that rounds to it.
"""

from __future__ import annotations

import pytest

from trainspec_cli.planner.planes import Failure, SprayedFabric, simulate, single_plane, size_planes
from trainspec_cli.recipe.keys.cluster import PlanesSpec

MRC = PlanesSpec(planes=8, nic_gbit_per_s=800, switch_tbit_per_s=51.2)
EIGHT, ONE = size_planes(MRC), size_planes(single_plane(MRC))


def agrees(planned: float, published: str) -> bool:
    digits = len(published.partition(".")[2])
    return abs(planned - float(published)) <= 0.02 * float(published) or f"{planned:.{digits}f}" == published


@pytest.mark.parametrize(
    ("what", "planned", "published"),
    [
        ("NICs on two tiers of 8 x 100G", EIGHT.most_nics, "131072"),
        ("thousands of NICs on three tiers of 800G (64K)", ONE.most_nics / 1024, "64"),
        ("optics over those of one plane (2/3)", EIGHT.optics_per_nic / ONE.optics_per_nic, "0.667"),
        ("switches over those of one plane (3/5)", EIGHT.switches_per_nic / ONE.switches_per_nic, "0.600"),
        ("per cent lost with a link between T0 and T1", 100 * EIGHT.lost_speed["link"], "0.4"),
        ("the same on one plane", 100 * ONE.lost_speed["link"], "3"),
        ("per cent lost with a NIC's port", 100 * EIGHT.lost_speed["port"], "12"),
        ("ports of a switch", EIGHT.radix, "512"),
    ],
)
def test_a_published_figure(what: str, planned: float, published: str) -> None:
    assert agrees(planned, published), f"{what}: {planned} and not {published}"


def test_figures_beyond_two_per_cent_do_not_agree() -> None:
    assert not agrees(0.45, "0.4") and not agrees(13.0, "12") and not agrees(0.64, "0.600") and agrees(12.5, "12")


def test_four_flapping_ports_cost_a_job_of_50_000_a_quarter_for_a_minute_and_no_restart() -> None:
    """Two of them have to be of one NIC: four ports of four NICs would cost an eighth."""
    places = ((0, 0), (0, 1), (20_000, 2), (40_000, 3))
    flaps = [Failure("port", 0.0, 60.0, plane=plane, nic=nic) for nic, plane in places]
    event = simulate(MRC, 50_000, flaps)
    assert agrees(100 * (1 - event.lowest_speed), "25")
    assert (event.slow_s, event.ends_job) == (pytest.approx(60, rel=0.02), False)
    apart = [Failure("port", 0.0, 60.0, plane=flap.plane, nic=1000 * number) for number, flap in enumerate(flaps)]
    assert simulate(MRC, 50_000, apart).lowest_speed == 1 - 1 / 8


def test_a_rebooting_t1_switch_touches_about_a_quarter_of_the_queue_pairs() -> None:
    """Neither the size of that job nor its paths a queue pair are published: 128 and 256 of them, at 50,000 NICs, have
    the published quarter between them."""
    few, many = (
        SprayedFabric(PlanesSpec(8, 800, 51.2, entropy_values=paths), 50_000).touched("t1_switch")
        for paths in (128, 256)
    )
    assert few < 0.25 < many


def test_a_transceiver_of_a_nic_has_all_of_its_ports_and_ends_the_job() -> None:
    event = simulate(MRC, 1_000, [Failure("transceiver", 5.0, 1.0)])
    assert event.ends_job
