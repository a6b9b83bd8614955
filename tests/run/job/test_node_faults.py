"""What a node's kernel, GPUs and NICs say about a failure."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from lab.gpus.machines import play
from lab.sysfs import write

from trainspec_cli.run.job.node_faults import (
    FaultWatch,
    increased,
    kernel_lines,
    read_counters,
    read_kernel_faults,
)

LINES = {
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.": (
        ("xid", "GPU 0000:3b:00"),
        True,
    ),
    "NVRM: Xid (PCI:0000:b3:00): 74, pid=4711, name=python3, NVLink: fatal error detected on link 7(0x10000, 0x0)": (
        ("nvlink", "GPU 0000:b3:00"),
        True,
    ),
    "NVRM: Xid (PCI:0000:1a:00): 63, pid=4711, Row Remapper: New row marked for remapping, reset gpu to activate.": (
        ("row_remap", "GPU 0000:1a:00"),
        True,
    ),
    "NVRM: Xid (PCI:0000:1a:00): 94, pid=4711, name=python3, Contained: SM (0x1). RST: No, D-RST: No": (
        ("ecc", "GPU 0000:1a:00"),
        True,
    ),
    "NVRM: Xid (PCI:0000:1a:00): 31, pid=4711, name=python3, Ch 00000008, MMU Fault: ENGINE GRAPHICS faulted @ 0x7f": (
        ("program", "GPU 0000:1a:00"),
        False,
    ),
    "NVRM: Xid (PCI:0000:1a:00): 999, pid=4711, something new": (("xid", "GPU 0000:1a:00"), True),
    "Out of memory: Killed process 4242 (python3) total-vm:81GB, anon-rss:62GB, file-rss:0kB, shmem-rss:0kB": (
        ("out_of_memory", "4242 (python3)"),
        False,
    ),
    "Memory cgroup out of memory: Killed process 77 (pt_data_worker) total-vm:8GB": (
        ("out_of_memory", "77 (pt_data_worker)"),
        False,
    ),
    "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: 8c00004000010091": (("machine_check", "CPU 12"), True),
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1)": (
        ("machine_check", "MC0"),
        True,
    ),
    "mlx5_core 0000:17:00.0 ens1f0np0: Link down": (("link_down", "ens1f0np0"), True),
    "e1000e 0000:00:1f.6 eno1: NIC Link is Down": (("link_down", "eno1"), True),
    "CPU3: Package temperature is above threshold, cpu clock is throttled (total events = 12)": (
        ("thermal", "CPU3"),
        True,
    ),
    "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x0": (("storage", "nvme0n1"), True),
    "nfs: server files-3 not responding, still trying": (("storage", "files-3"), True),
    "amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!": (("xid", "0000:c1:00.0"), True),
}


@pytest.mark.parametrize("line", LINES)
def test_the_kernels_words_are_understood(line):
    place, is_of_machine = LINES[line]
    (fault,) = read_kernel_faults(["systemd[1]: Started session.", line])
    assert (fault.cause, fault.where) == place
    assert fault.is_of_machine == is_of_machine
    assert line in fault.text


@pytest.mark.parametrize(
    "line",
    [
        "mlx5_core 0000:17:00.0 ens1f0np0: Link up",
        "e1000e 0000:00:1f.6 eno1: NIC Link is Up 1000 Mbps Full Duplex",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        "mce: CPU supports 20 MCE banks",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "CPU3: Package temperature/speed normal",
        "nfs: server files-3 OK",
    ],
)
def test_ordinary_words_are_no_fault(line):
    assert list(read_kernel_faults([line])) == []


def test_only_messages_since_the_start_count(tmp_path):
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("6,1,2000000,-;before\n4,2,9000000,-;after\n SUBSYSTEM=pci\n3,3,9500000,-;later\n")
    assert kernel_lines(5.0, kmsg) == ["after", "later"]


GPU = {"card": "h100_sxm", "ecc": 0, "rows": [0, 0, 0, 0], "nvlink_errors": 0, "throttle": 0, "celsius": 60}


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *changes: dict[str, object]) -> dict:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"gpus": [{**GPU, **one} for one in changes]}))
    play(str(path), monkeypatch)
    return read_counters(tmp_path / "sys")


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        ({"ecc": 2}, "ecc", "uncorrected memory errors increased by 2"),
        ({"rows": [0, 1, 0, 0]}, "row_remap", "remapped after uncorrectable errors"),
        ({"rows": [0, 0, 1, 0]}, "row_remap", "waiting for a reset"),
        ({"rows": [0, 0, 0, 1]}, "row_remap", "could not be remapped"),
        ({"nvlink_errors": 5}, "nvlink", "increased by 5"),
        ({"nvlinks_up": 0}, "nvlink", "link 0 down"),
        ({"throttle": 0x40}, "thermal", "thermal slowdown"),
        ({"throttle": 0x80}, "thermal", "power brake"),
        ({"handle_error": 15}, "xid", "is lost"),
    ],
)
def test_a_counter_that_has_increased_names_the_gpu(tmp_path, monkeypatch, change, cause, words):
    before = machine(tmp_path, monkeypatch, {}, {})
    after = machine(tmp_path, monkeypatch, {}, change)
    found = list(increased(before, after))
    assert {(fault.cause, fault.where) for fault in found} == {(cause, "GPU 1")}
    assert any(words in fault.text for fault in found)
    assert list(increased(after, after)) == []


def test_a_gpu_that_throttles_for_power_as_usual_has_no_fault(tmp_path, monkeypatch):
    before = machine(tmp_path, monkeypatch, {})
    assert list(increased(before, machine(tmp_path, monkeypatch, {"throttle": 0x4 | 0x1, "celsius": 83}))) == []


def test_the_counters_of_nics_are_read(tmp_path, monkeypatch):
    sys = tmp_path / "sys"
    port = sys / "class/infiniband/mlx5_0/ports/1"
    write(port / "counters", symbol_error="0", link_downed="0")
    write(sys / "class/net/ens1", carrier_down_count="1")
    (sys / "class/net/ens1/device").mkdir()
    write(sys / "class/net/veth0", carrier_down_count="1")
    before = machine(tmp_path, monkeypatch)
    write(port / "counters", symbol_error="0", link_downed="1")
    write(sys / "class/net/ens1", carrier_down_count="2")
    write(sys / "class/net/veth0", carrier_down_count="2")
    found = [(fault.cause, fault.where) for fault in increased(before, read_counters(sys))]
    assert found == [("nic", "mlx5_0 port 1"), ("nic", "ens1")]


def test_the_machines_faults_come_first_and_each_once():
    lines = [line for line in LINES for _ in range(3)]
    began = time.monotonic()
    asked = []
    watch = FaultWatch(counters=dict, lines=lambda since: asked.append(since) or lines)
    found = watch.find()
    assert began - 1 < asked[0] <= time.monotonic()
    places = [(fault.cause, fault.where) for fault in found]
    assert len(places) == len(set(places)) == 8
    assert all(fault.is_of_machine for fault in found)
