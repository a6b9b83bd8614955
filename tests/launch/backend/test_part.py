"""What a host's part of a replica group is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.launch.backend.part import devices_of


@pytest.mark.parametrize(
    ("shown", "of_groups"),
    [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"])],
)
def test_groups_of_one_host_divide_the_gpus_that_they_are_shown(
    shown: str | None, of_groups: list[str], make_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    plan = replace(make_plan(), device="cuda", num_nodes=2, devices_per_node=4, replica_groups=4)
    for group in range(4):
        assert devices_of(plan, group) == {"CUDA_VISIBLE_DEVICES": of_groups[group % 2]}


def test_a_group_with_hosts_of_its_own_takes_all_their_gpus(make_plan) -> None:
    plan = replace(make_plan(), device="cuda", num_nodes=2, devices_per_node=4, replica_groups=2)
    assert devices_of(plan, 1) == {}
