"""Which nodes a run may use, and what is said where there are none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lab.ports import free_port

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec

pytest.importorskip("ray")

from trainspec_cli.wings.ray.cluster import connect, usable

NODE = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}


@pytest.mark.parametrize(
    ("resources", "device", "devices", "bundle"),
    [
        (NODE, AUTO, AUTO, {"CPU": 8, "GPU": 4}),
        (NODE, "cuda", 2, {"CPU": 8, "GPU": 2}),
        (NODE, "cuda", 8, {}),
        (NODE, "cpu", 8, {"CPU": 8}),
        ({"CPU": 2.0}, AUTO, AUTO, {"CPU": 2}),
        ({"CPU": 2.0}, "cuda", AUTO, {}),
        ({"memory": 1e9}, "cpu", AUTO, {}),  # a head that takes no work
    ],
)
def test_the_part_of_a_node_that_a_run_takes(resources, device, devices, bundle):
    assert usable(resources, ClusterSpec(device=device, devices_per_node=devices)) == bundle


@pytest.mark.parametrize(("address", "code"), [("ray://10.0.0.1:10001", "ray_address"), ("127.0.0.1:PORT", "no_ray")])
def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch, address, code):
    address = address.replace("PORT", str(free_port()))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(MachineError) as raised:
        connect()
    assert raised.value.problems[0].code == code
    assert address in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("cluster.manager=rays",), "ray"),
        (("cluster.manager=ray", "--node-rank", "1"), "--node-rank"),
        (("cluster.manager=ray", "--rdzv-endpoint", "a:1"), "--rdzv-endpoint"),
    ],
)
def test_slips_are_refused_with_what_to_type(arguments, code, tmp_path):
    command = [sys.executable, "-m", "trainspec_cli", "launch", "recipe=tiny", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert ended.returncode == 2
    assert code in ended.stderr
    assert not (tmp_path / "run").exists()
