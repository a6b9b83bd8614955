"""A job over several planes while parts of them fail: speeds, times and counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trainspec_cli.planner.planes import (
    DETECT_S,
    PROBE_S,
    Failure,
    SprayedFabric,
    dip_share,
    dips_per_s,
    ending_failures,
    flaps_by_chance,
    plan_planes,
    simulate,
    single_plane,
    size_planes,
)
from trainspec_cli.recipe.keys.cluster import ClusterSpec, FabricSpec, PlanesSpec, ReliabilitySpec

# A job over several planes while parts of them fail: speeds, times and counts


SPEC = PlanesSpec(planes=4, nic_gbit_per_s=400, switch_tbit_per_s=1.6, entropy_values=64)
"""Switches of 16 ports: 8 NICs below each T0."""


def down(*failures: Failure, spec: PlanesSpec = SPEC, nics: int = 64) -> float:
    fabric = SprayedFabric(spec, nics)
    for failure in failures:
        fabric.change(failure, 1)
    return fabric.speed


def port(nic: int, plane: int, at_s: float = 0.0, for_s: float = 10.0) -> Failure:
    return Failure("port", at_s, for_s, plane=plane, nic=nic)


def link(t0: int, plane: int) -> Failure:
    return Failure("link", 0.0, 10.0, plane=plane, t0=t0)


def test_speeds_follow_from_what_is_up() -> None:
    assert down() == 1
    assert down(port(0, 0)) == down(port(0, 0), port(1, 1), port(9, 2)) == 3 / 4
    assert down(port(0, 0), port(0, 1)) == 2 / 4
    assert down(*(port(0, plane) for plane in range(4))) == 0
    assert down(link(0, 0)) == down(link(0, 0), link(0, 1)) == down(link(0, 0), link(1, 0)) == 1 - 1 / 8
    assert down(link(0, 0), link(0, 0)) == 1 - 2 / 8
    assert down(port(3, 1), link(0, 0)) == 3 / 4 * (1 - 1 / 8), "planes that are left share the load alike"
    assert down(port(3, 0), link(0, 0)) == 3 / 4, "the narrow plane is the one that is not used"
    assert down(port(9, 0), link(0, 0)) == 3 / 4, "another T0 switch's"
    assert down(Failure("t1_switch", 0, 1, plane=2)) == 1 - 1 / 4, "one of four T1 switches that 64 NICs need"
    assert down(Failure("t0_switch", 0, 1, plane=2, t0=1), port(8, 0)) == 2 / 4
    assert down(Failure("plane", 0, 1, plane=2), port(8, 2)) == 3 / 4


def brute_force_speed(failures: list[Failure], spec: PlanesSpec, nics: int) -> float:
    """Every NIC and every plane one by one."""
    slowest = 1.0
    for nic in range(nics):
        t0, widths = nic // 8, []
        for plane in range(spec.planes):
            here = [one for one in failures if one.plane == plane]
            if any(one.part == "plane" for one in here):
                continue
            if any(one.part == "port" and one.nic == nic for one in here):
                continue
            if any(one.part == "t0_switch" and one.t0 == t0 for one in here):
                continue
            links = sum(one.part == "link" and one.t0 == t0 for one in here)
            switches = sum(one.part == "t1_switch" for one in here)
            widths.append(max(0.0, 1 - links / 8 - switches / 4))
        slowest = min(slowest, len(widths) / spec.planes * min(widths, default=0.0))
    return slowest


@pytest.mark.parametrize("seed", range(40))
def test_the_speed_is_that_of_the_slowest_of_all_nics(seed: int) -> None:
    chance = random.Random(seed)
    failures = [
        Failure(
            chance.choice(["port", "port", "link", "link", "t0_switch", "t1_switch", "plane"]), 0.0, 1.0,  # type: ignore[arg-type]
            plane=chance.randrange(4), nic=chance.randrange(64), t0=chance.randrange(8),
        )
        for _ in range(chance.randrange(1, 8))
    ]  # fmt: skip
    assert down(*failures) == pytest.approx(brute_force_speed(failures, SPEC, 64))


def test_a_dip_lasts_until_the_part_is_back_and_probed() -> None:
    event = simulate(SPEC, 64, [port(0, 0, at_s=5.0, for_s=20.0)])
    assert (event.lowest_speed, event.slow_s) == (3 / 4, pytest.approx(20 + PROBE_S))
    resent_s = (1 - 3 / 4 * 3 / 4) * DETECT_S
    lost_s = resent_s + (20 - DETECT_S + PROBE_S) / 4
    assert event.lost_s == pytest.approx(lost_s, rel=1e-9), "what was lost unnoticed is sent again"


def test_dips_that_overlap_are_those_of_the_slowest_nic() -> None:
    apart = simulate(SPEC, 64, [port(0, 0), port(1, 1, at_s=5.0)])
    same = simulate(SPEC, 64, [port(0, 0), port(0, 1, at_s=5.0)])
    assert (apart.lowest_speed, same.lowest_speed) == (3 / 4, 2 / 4)
    assert apart.slow_s == same.slow_s == pytest.approx(15 + PROBE_S)
    assert apart.lost_s == pytest.approx((15 + PROBE_S) / 4, abs=DETECT_S)
    assert same.lost_s == pytest.approx(5 / 4 + (5 + PROBE_S) / 2 + 5 / 4, abs=DETECT_S)


def test_paths_are_given_up_and_come_back() -> None:
    """A port has 16 of each of two queue pairs' 64 paths; afterwards as many are good as before."""
    event = simulate(SPEC, 64, [port(0, 0)])
    assert event.most_bad_paths == 2 * 16
    both = simulate(SPEC, 64, [port(0, 0), port(5, 1)])
    assert both.most_bad_paths == 4 * 16
    after = simulate(SPEC, 64, [port(0, 0), port(5, 1, at_s=20.0)])
    assert after.most_bad_paths == 2 * 16


def test_shares_of_the_queue_pairs_that_a_failure_touches() -> None:
    fabric = SprayedFabric(SPEC, 64)
    assert fabric.touched("port") == 2 / 64
    assert fabric.touched("t0_switch") == 2 * 8 / 64
    assert fabric.touched("plane") == 1
    assert fabric.touched("t1_switch") == 1 - (3 / 4) ** 16


def test_flaps_come_as_often_as_they_are_said_to() -> None:
    flaps = flaps_by_chance(SPEC, 64, per_hour=30.0, hours=100.0, seed=1)
    assert len(flaps) == pytest.approx(3000, rel=0.06)
    assert {flap.plane for flap in flaps} == set(range(4)) and len({flap.nic for flap in flaps}) == 64
    assert flaps == flaps_by_chance(SPEC, 64, 30.0, 100.0, seed=1) != flaps_by_chance(SPEC, 64, 30.0, 100.0, seed=2)


def test_the_share_that_a_forecast_counts_is_what_the_simulation_loses() -> None:
    """A year and more of flaps at 75,000 devices."""
    spec, reliability = PlanesSpec(8, 800, 51.2), ReliabilitySpec()
    hours = 20_000.0
    flaps = flaps_by_chance(spec, 75_000, dips_per_s(spec, reliability, 75_000) * 3600, hours, seed=3)
    lost = simulate(spec, 75_000, flaps).lost_s / (hours * 3600)
    assert lost == pytest.approx(dip_share(spec, reliability, 75_000), rel=0.05)


def test_only_failures_that_planes_do_not_survive_end_the_job() -> None:
    reliability = ReliabilitySpec(mtbf_device_hours=1000.0)
    spec = PlanesSpec(8, 800, 51.2, network_fraction=0.5, fatal_fraction=0.2)
    left = ending_failures(spec, reliability)
    assert 1 / left.mtbf_device_hours == pytest.approx((1 - 0.5 * 0.8) / 1000)
    assert dips_per_s(spec, reliability, 10) == pytest.approx(10 * 0.5 * 0.8 / 1000 / 3600)
    assert ending_failures(replace(spec, planes=1), reliability) == reliability
    assert dip_share(replace(spec, planes=1), reliability, 10) == 0


def test_a_plan_shows_one_failure_of_each_kind() -> None:
    cluster = ClusterSpec(fabric=FabricSpec(planes=PlanesSpec(8, 800, 51.2)))
    plan = plan_planes(cluster, 75_000)
    assert plan is not None
    assert [(event.lowest_speed, event.ends_job) for event in plan.events[:3]] == [
        (1 - 2 / 512, False), (7 / 8, False), (6 / 8, False),
    ]  # fmt: skip
    assert [event.ends_job for event in plan.events] == [False] * 6 + [True, False]
    assert plan.t1_switches == 147 and plan.single.switch_tiers == 3
    assert plan_planes(ClusterSpec(), 75_000) is None


@pytest.mark.slow
def test_a_network_that_always_fails_is_simulated_for_a_shorter_while() -> None:
    reliability = ReliabilitySpec(mtbf_device_hours=1e-6)
    plan = plan_planes(ClusterSpec(reliability=reliability, fabric=FabricSpec(planes=PlanesSpec(8, 800, 51.2))), 64)
    assert plan is not None
    assert 250 < int(plan.events[-1].name.split("which ")[1].split(" ")[0].replace(",", "")) < 350
    assert plan.dip_share == 1


# What is published of multi-plane fabrics, beside what the planner says: within 2%, or the same at the printed digits


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
