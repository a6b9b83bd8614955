"""`trainspec fabric` writes what it finds as an option of the group `fabric`, for plans."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lab.sysfs import Sysfs

from trainspec_cli.__main__ import run
from trainspec_cli.recipe.keys.cluster import TierSpec
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor import discover
from trainspec_cli.wings.doctor.commands import fabric
from trainspec_cli.wings.doctor.discover import NodeLinks, SourceText, links_here

DATA = Path(__file__).parents[1] / "data" / "topology"
PLAN = ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=8")
TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[5-8]
SwitchName=top Level=1 LinkSpeed=1 Nodes=gpu[1-8] Switches=leaf[1-2]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and a node of eight GPUs with a NIC each, whose nvidia-smi prints a published matrix."""
    monkeypatch.chdir(tmp_path)
    made = Sysfs(tmp_path / "sys")
    for number in range(8):
        switch = f"pci0000:{number + 16:x}/0000:{number + 16:x}:01.0"
        made.gpu(f"{switch}/0000:{number + 32:x}:00.0", numa=number // 4)
        made.rdma(f"{switch}/0000:{number + 64:x}:00.0", f"mlx5_{number}", numa=number // 4)
    made.rdma("pci0000:60/0000:60:01.0/0000:61:00.0", "mlx5_8", "100 Gb/sec (4X EDR)", layer="Ethernet")
    made.numa(0, "0-47,96-143")
    made.numa(1, "48-95,144-191")
    write_program(tmp_path / "bin/nvidia-smi", f"cat {DATA / 'hgx_h100.txt'}")
    write_program(tmp_path / "bin/scontrol", f"cat {tmp_path / 'topology.txt'}")
    (tmp_path / "topology.txt").write_text(TREE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(fabric, "links_here", lambda: links_here(tmp_path / "sys"))
    return tmp_path


def write_program(file: Path, line: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def measured(folder: Path, near: float = 40e9, far: float = 20e9) -> Path:
    ping = [{"bytes": 4096, "seconds": 12e-6, "bytes_per_s": 4096 / 12e-6}]
    rates = {("gpu1", "gpu2"): near, ("gpu1", "gpu5"): far}
    pairs = [{"hosts": list(hosts), "bytes_per_s": rate, "sizes": ping} for hosts, rate in rates.items()]
    file = folder / "doctor.json"
    file.write_text(json.dumps({"status": "ok", "hosts": [], "links": {"all_reduce": [], "pairs": pairs}}))
    return file


def test_a_node_in_slurm_becomes_a_fabric_for_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fabric", "--write", "conf/fabric/mine.yaml"]) == 0
    output = capsys.readouterr().out
    assert "8: NV18 between 28 pairs" in output and "plan ... fabric=mine" in output
    text = (here / "conf/fabric/mine.yaml").read_text()
    assert "# oversubscription: ..." in text and "# latency_us: ..." in text and "$schema" not in text
    spec = load_for_planning([*PLAN, "fabric=mine"]).spec
    assert (spec.cluster.fabric.name, spec.cluster.fabric.nic_wiring) == ("mine", None)
    assert spec.cluster.fabric.tiers == (
        TierSpec("nvlink"),
        TierSpec("level0", 32, 400.0, kind="infiniband"),
        TierSpec("network", None, 400.0, kind="infiniband"),
    )
    assert spec.cluster.fabric.sources["tiers.0"] == "nvidia-smi topo -m"


def test_json_has_each_fact_with_its_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fabric", "--json", "--measured", str(measured(here))]) == 0
    found = json.loads(capsys.readouterr().out)
    sources = {fact["about"]: fact["source"] for fact in found["facts"]}
    assert sources == {
        "gpus": "nvidia-smi topo -m",
        "rails": "nvidia-smi topo -m",
        "nics": "/sys/class/infiniband",
        "numa": "/sys/devices/system/node",
        "switches": "scontrol show topology",
        "measured": str(here / "doctor.json"),
    }
    assert found["gpus"][5] | {"links": {}} == {
        "name": "GPU5",
        "links": {},
        "nics": {f"mlx5_{n}": "PIX" if n == 5 else "NODE" if n > 3 else "SYS" for n in range(8)},
        "cores": "48-95,144-191",
        "numa_node": 1,
        "pcie_gbit_per_s": 504.1,
    }
    rates = [(tier["spec"]["name"], tier["spec"]["gbit_per_s"], tier["spec"]["latency_us"]) for tier in found["tiers"]]
    assert rates == [("nvlink", None, None), ("level0", 320.0, 12.0), ("network", 160.0, 12.0)]
    assert [nic["name"] for nic in found["nics"]][-1] == "mlx5_8", "it is listed but not used"


def test_a_missing_driver_and_slurm_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(here / "bin/nvidia-smi", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate"; exit 9')
    write_program(here / "bin/scontrol", 'echo "slurm_load_topo: Unable to contact slurm controller" >&2; exit 1')
    assert run(["fabric"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "nvidia-smi topo -m failed: NVIDIA-SMI has failed" in output and "so NVLink" in output
    assert "8: SYS between 16, NODE" in output and "GPU0 mlx5_0" in output
    assert "Unable to contact" in output


def test_files_of_another_cluster_are_read_without_gpu_and_slurm(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_nvidia_smi", "slurm"):
        monkeypatch.setattr(discover, name, None)
    (here / "topology.conf").write_text(
        "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=s3 Switches=s[1-2]\n"
    )
    files = ["--gpus", str(DATA / "a100_pcie.txt"), "--topology", "topology.conf"]
    assert run(["fabric", *files, "--write", "conf/fabric/mine.yaml"]) == 0
    tiers = load_for_planning([*PLAN, "fabric=mine"]).spec.cluster.fabric.tiers
    assert [(tier.name, tier.devices) for tier in tiers] == [
        ("nvlink", 2),
        ("pcie", 8),
        ("level0", 16),
        ("network", None),
    ]
    capsys.readouterr()
    assert run(["fabric", *files, "cluster.devices_per_node=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["devices_per_node"], found["tiers"][2]["spec"]["devices"]) == (4, 8)
    assert any("cluster.devices_per_node is 4" in remark for remark in found["remarks"])


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--gpus", "nothing.txt"], 4, "file: nothing.txt"),
        (["--gpus", "topology.txt"], 4, "no GPU matrix"),
        (["--topology", "bin/nvidia-smi"], 4, "no BlockName=..."),
        (["--measured", "topology.txt"], 4, "is not JSON"),
        (["--measured", "alone.json"], 4, "alone.json contains no"),
        (["--measured", "odd.json"], 4, "odd.json contains no"),
        (["--write", "conf/fabric/flat.yaml"], 2, "a fabric flat"),
        (["--write", "topology.txt"], 2, "NAME.yaml"),
        (["--write", "there.yaml"], 2, "there.yaml already"),
        (["--write", "/proc/mine.yaml"], 2, "cannot be written"),
        (["cluster.devices_per_nod=8"], 2, "cluster.devices_per_node"),
        (["--gpu", "x"], 2, "--gpus"),
    ],
)
def test_unreadable_and_unwritable_files_are_refused(
    here: Path, arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "alone.json").write_text(json.dumps({"links": None}))
    (here / "odd.json").write_text(json.dumps({"links": {"pairs": [{"hosts": 3}], "all_reduce": []}}))
    (here / "there.yaml").write_text("name: mine\n")
    assert run(["fabric", *arguments]) == code
    assert part in " ".join(capsys.readouterr().err.split())


def test_measured_nodes_that_slurm_does_not_have_are_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "topology.txt").write_text(TREE.replace("gpu", "node"))
    assert run(["fabric", "--measured", str(measured(here))]) == 0
    assert "gpu1, gpu2, gpu5" in " ".join(capsys.readouterr().out.split())


def test_switches_within_a_scale_up_domain_are_not_tiers() -> None:
    """Four nodes of 4 devices below a leaf switch, in a rack whose NVLink connects 16 devices or more."""
    node = NodeLinks("node", (), "nothing")
    tiers = {
        domain: [tier.spec.name for tier in discover.discover(node, SourceText(TREE, ""), None, 4, domain).tiers]
        for domain in (None, 8, 16, 72)
    }
    leaf, alone = ["node", "level0", "network"], ["node", "network"]
    assert tiers == {None: leaf, 8: leaf, 16: alone, 72: alone}


def test_a_missing_command_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert discover.run_nvidia_smi() is None
    topology = discover.topology_here()
    assert (topology.text, topology.source) == ("", "scontrol show topology") and "not installed" in topology.problem
