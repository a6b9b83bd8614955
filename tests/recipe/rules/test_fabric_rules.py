"""Networks that cannot be are refused, with the place and what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab.problems import assert_problems

from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.check import check

DOMAIN, LEAF, SPINE = {"name": "nvlink"}, {"name": "leaf", "devices": 16}, {"name": "spine"}


def refusals(make_spec: Callable[..., RunSpec], tiers: list[dict[str, Any]], nodes: int = 8) -> list[tuple[str, str]]:
    spec = make_spec({"cluster.num_nodes": nodes, "cluster.devices_per_node": 8, "cluster.fabric.tiers": tiers})
    return [(found.path, found.message) for found in check(spec) if found.path.startswith("cluster.fabric")]


def test_whole_elements_inside_one_another_are_taken(make_spec: Callable[..., RunSpec]) -> None:
    assert refusals(make_spec, []) == []
    assert refusals(make_spec, [DOMAIN, SPINE]) == []
    assert refusals(make_spec, [DOMAIN, LEAF, SPINE]) == []
    assert refusals(make_spec, [{"name": "rack", "devices": 16}, {"name": "spine", "devices": 64}]) == []


@pytest.mark.parametrize(
    ("tiers", "path", "message"),
    [
        ([DOMAIN], "", "one tier, `nvlink`"),
        ([DOMAIN, {"name": "leaf"}, SPINE], ".1.devices", "first and the last tier"),
        (
            [DOMAIN, {"name": "leaf", "devices": 20}, SPINE],
            ".1.devices",
            "is 20; a `leaf` ",
        ),
        ([DOMAIN, {"name": "leaf", "devices": 64}, {"name": "spine", "devices": 64}], ".2.devices", "several `leaf`"),
        ([DOMAIN, {"name": "leaf", "devices": 8}, SPINE], ".1.devices", "several `nvlink` "),
        ([DOMAIN, LEAF, {"name": "spine", "devices": 32}], ".2.devices", "cluster has 64 devices"),
        ([{"name": "nvlink", "kind": "roce"}, SPINE], ".0.kind", "the first tier"),
        ([DOMAIN, {"name": "spine", "oversubscription": 0.5}], ".1.oversubscription", "at least 1"),
    ],
)
def test_what_is_refused(
    make_spec: Callable[..., RunSpec], tiers: list[dict[str, Any]], path: str, message: str
) -> None:
    [(found, text)] = refusals(make_spec, tiers)
    assert found == f"cluster.fabric.tiers{path}"
    assert message in text


def test_a_size_that_fits_is_named(make_spec: Callable[..., RunSpec]) -> None:
    tiers = [DOMAIN, {"name": "leaf", "devices": 20}, SPINE]
    [problem] = check(make_spec({"cluster.devices_per_node": 8, "cluster.fabric.tiers": tiers}))
    assert "multiple of 8, such as 16" in problem.hint


@pytest.mark.parametrize(
    ("planes", "path", "message"),
    [
        ({"planes": 8, "nic_gbit_per_s": 800, "switch_tbit_per_s": 51.2}, None, ""),
        (
            {"planes": 3, "nic_gbit_per_s": 800, "switch_tbit_per_s": 51.3},
            "planes",
            "51.3 Tbit/s would have 192.375 ports of 266.667 Gbit/s",
        ),
        (
            {"planes": 1, "nic_gbit_per_s": 800, "switch_tbit_per_s": 6.4},
            "switch_tiers",
            "is 2, which connect 32 NICs,",
        ),
        ({"planes": 1, "nic_gbit_per_s": 800, "switch_tbit_per_s": 6.4, "switch_tiers": 3}, None, ""),
    ],
)
def test_planes_join_every_nic_by_whole_ports(
    make_spec: Callable[..., RunSpec], planes: dict[str, Any], path: str | None, message: str
) -> None:
    spec = make_spec({"cluster.num_nodes": 8, "cluster.devices_per_node": 8, "cluster.fabric.planes": planes})
    found = [(one.path, one.message) for one in check(spec) if one.path.startswith("cluster.fabric")]
    assert [at for at, _ in found] == ([f"cluster.fabric.planes.{path}"] if path else [])
    assert all(message in text for _, text in found)


def test_nodes_that_nothing_joins_are_refused(make_spec: Callable[..., RunSpec]) -> None:
    alone = {"cluster.nic_gbit_per_s": 0, "cluster.num_nodes": 1, "cluster.devices_per_node": 8}
    expected = ("out_of_range", "cluster.nic_gbit_per_s", "8 nodes", "cluster.nic_gbit_per_s=400")
    assert_problems(check(make_spec({**alone, "cluster.num_nodes": 8})), expected)
    assert check(make_spec(alone)) == []
    assert check(make_spec({**alone, "cluster.num_nodes": 8, "cluster.nic_gbit_per_s": None})) == []
    tiers = [{"name": "node", "devices": 8}, {"name": "network", "gbit_per_s": 200}]
    assert check(make_spec({**alone, "cluster.num_nodes": 8, "cluster.fabric.tiers": tiers})) == []
