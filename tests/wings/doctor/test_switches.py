"""Switches and blocks in the output of Slurm."""

from __future__ import annotations

import pytest

from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor.switches import check_switches, expand_hosts, read_levels

TOPOLOGY = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-016]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[017-030],login
SwitchName=row1 Level=1 LinkSpeed=1 Nodes=gpu[001-030],login Switches=leaf[1-2]
SwitchName=row2 Level=1 LinkSpeed=1 Nodes=gpu[031-090] Switches=leaf[3-6]
SwitchName=top Level=2 LinkSpeed=1 Nodes=gpu[001-090],login Switches=row[1-2]
"""


BLOCKS = """\
BlockName=gb300_b0 BlockIndex=0 Nodes=10.140.71.103,10.140.88.115 BlockSize=2
BlockName=gb300_b1 BlockIndex=1 Nodes=10.140.79.152,10.140.93.120 BlockSize=2
AggregatedBlock=gb300_b[0-1] BlockIndex=2 Nodes=10.140.71.103,10.140.79.152,10.140.88.115,10.140.93.120 BlockSize=4
"""
"""Output of `scontrol show topology` with topology/block, published by the owner of some GB300."""
TREE_CONF = """\
# topology.conf, after its manual page
SwitchName=s0 Nodes=dev[0-5]   # a leaf
SwitchName=s1 Nodes=dev[6-11] LinkSpeed=900
SwitchName=s2 Nodes=dev[12-17]
SwitchName=s3 \\
    Switches=s[0-2]
switchname=s4 switches=s3,s5
SwitchName=s5 Nodes=dev[18-19]
"""


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("gpu[001-003,7],login", "gpu001 gpu002 gpu003 gpu7 login"),
        ("a", "a"),
        ("a,b", "a b"),
        ("n[1-2],m[5]", "n1 n2 m5"),
        ("rack[1-2]-gpu", "rack1-gpu rack2-gpu"),
        ("n[09-11]", "n09 n10 n11"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("(null)", ""),
    ],
)
def test_a_host_list_is_expanded_as_slurm_does(hosts: str, names: str) -> None:
    assert expand_hosts(hosts) == names.split()


def test_a_mistyped_range_does_not_fill_the_memory() -> None:
    assert len(expand_hosts("n[0-99999999999]")) == 1_000_000


def test_switches_become_tiers_for_plans() -> None:
    assert [level.most_nodes for level in read_levels(TOPOLOGY)] == [16, 60, 91]
    [check] = check_switches(TOPOLOGY, 8)
    key = check.found.partition(": ")[2]
    assert key.startswith("cluster.fabric.tiers=[{name: domain},{name: level0,devices: 128},")
    spec = load_for_planning(["recipe=llama3_70b", "cluster=h100", "cluster.num_nodes=90", key]).spec
    assert [tier.devices for tier in spec.cluster.fabric.tiers] == [None, 128, 480, None]


@pytest.mark.parametrize(
    "topology", ["", "No topology information available\n", "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node[1-4]\n"]
)
def test_a_single_switch_is_not_a_tier(topology: str) -> None:
    assert list(check_switches(topology, 8)) == []


def test_a_level_that_connects_no_more_nodes_is_omitted() -> None:
    text = "SwitchName=a Level=0 Nodes=n[1-4]\nSwitchName=b Level=1 Nodes=n[1-4]\nSwitchName=c Level=2 Nodes=n[1-8]\n"
    [check] = check_switches(text, 1)
    assert "up to 4, 8 nodes" in check.found and "level1" not in check.found


def test_blocks_and_groups_of_blocks_are_levels() -> None:
    blocks, together = read_levels(BLOCKS)
    assert (blocks.name, blocks.elements[1]) == ("block", ("10.140.79.152", "10.140.93.120"))
    assert (together.name, together.most_nodes) == ("blocks4", 4)
    conf = "".join(f"BlockName=b{n} Nodes=dev[{18 * n:02d}-{18 * n + 17:02d}]\n" for n in range(4))
    levels = read_levels(f"{conf}BlockSizes=18,36\n")
    assert [(level.name, level.most_nodes, len(level.elements)) for level in levels] == [
        ("block", 18, 4),
        ("blocks36", 36, 2),
    ]


def test_levels_follow_from_the_children_in_topology_conf() -> None:
    levels = read_levels(TREE_CONF)
    assert [(level.name, level.most_nodes, len(level.elements)) for level in levels] == [
        ("level0", 6, 4),
        ("level1", 18, 1),
        ("level2", 20, 1),
    ]
    assert levels[2].elements[0][-1] == "dev19"


def test_switches_in_a_cycle_have_no_nodes() -> None:
    assert read_levels("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1\n") == []
