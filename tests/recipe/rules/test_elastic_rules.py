"""What replica groups must agree with, told with the key it concerns and what to type."""

import pytest

from trainspec_cli.recipe.rules.check import check

ELASTIC = {"resilience.mode": "elastic", "resilience.replica_groups": 2}


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"resilience.replica_groups": 4}, "resilience.replica_groups", "which has no groups"),
        (ELASTIC | {"resilience.replica_groups": 1}, "resilience.replica_groups", "no other to heal from"),
        (ELASTIC | {"resilience.min_groups": 3}, "resilience.min_groups", "there are 2 replica groups"),
        (ELASTIC | {"resilience.replica_groups": 3}, "resilience.replica_groups", "do not divide over 3"),
        (ELASTIC | {"checkpoint.memory_interval_steps": 4}, "checkpoint.memory_interval_steps", "already"),
        (ELASTIC | {"fault": "kill(group=2,step=4)"}, "fault", "numbered 0 to 1"),
        ({"fault": "bitflip(step=4)"}, "fault", "felt by replica groups alone"),
        ({"fault": "kil(step=4)"}, "fault", "there is no fault `kil`"),
    ],
)
def test_what_does_not_fit_is_refused(make_spec, changes, path, says) -> None:
    (problem,) = check(make_spec({"cluster.devices_per_node": 2} | changes))
    assert (problem.path, says in problem.message) == (path, True), problem
    assert problem.hint


def test_groups_divide_the_processes_beside_the_axes(make_spec) -> None:
    layout = {"layout.dp_shard": 2, "layout.dp_replicate": 1, "cluster.devices_per_node": 4}
    assert check(make_spec(ELASTIC | layout)) == []
    (problem,) = check(make_spec(ELASTIC | layout | {"layout.dp_shard": 4}))
    assert "for each of 2 replica groups" in problem.message


@pytest.mark.parametrize(
    ("nodes", "devices", "groups", "refused"),
    [(2, 3, 2, False), (2, 3, 6, False), (2, 3, 4, True), (3, 2, 4, True), (1, "auto", 5, False)],
)
def test_groups_divide_the_processes_of_all_nodes(make_spec, nodes, devices, groups, refused) -> None:
    sizes = {"cluster.num_nodes": nodes, "cluster.devices_per_node": devices, "resilience.replica_groups": groups}
    found = check(make_spec(ELASTIC | sizes))
    assert [problem.code for problem in found] == ["not_divisible"] * refused
    assert all(f"{nodes * devices} processes do not divide over {groups}" in problem.message for problem in found)
