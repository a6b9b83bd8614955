"""Four emulated nodes, each with a disk of its own: the same path leads to another folder on each of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import hosts as lab_hosts
from lab.disks import Disks
from lab.groups import losses, run_events
from lab.hosts import Hosts
from lab.waiting import wait_for

from trainspec_cli.run.folder.paths import RunDir

pytestmark = pytest.mark.slow

RECIPE = (
    *("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=12"),
    *("precision.compute=fp32", "run.preflight=false", "optim.schedule.kind=constant"),
    *("checkpoint.interval_steps=5", "run.node_timeout_s=10", "scheduler=off"),
)


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Hosts]:
    if why := lab_hosts.lacking():
        pytest.skip(why)
    hosts = Hosts(4)
    yield hosts
    assert (hosts.remove(), lab_hosts.namespaces()) == ([], []), "nothing is left of the hosts"


@pytest.fixture
def disks(four_hosts: Hosts, tmp_path: Path, environment: dict[str, str]) -> Iterator[Disks]:
    disks = Disks(four_hosts, tmp_path, environment | {"TRAINSPEC_PROBE": "off", "OMP_NUM_THREADS": "1"})
    yield disks
    for number in four_hosts.numbers:
        disks.switch_off(number)
        four_hosts.make_good(number)


def run_on(disks: Disks, number: int) -> RunDir:
    return RunDir(disks.of(number) / "run")


def start(disks: Disks, numbers: tuple[int, ...], *arguments: object, room_of_last: str = ""):
    """Start the same command on several hosts, of which the first supervises; return their processes."""
    nodes = ("--nnodes", len(numbers), "--rdzv-endpoint", f"{disks.hosts.address(numbers[0])}:29500")
    rooms = {numbers[-1]: room_of_last}
    return [
        disks.start(number, *arguments, *nodes, "--node-rank", rank, room=rooms.get(number, ""))
        for rank, number in enumerate(numbers)
    ]


def launch(disks: Disks, *values: str, **options: str):
    return start(
        disks, (1, 2, 3, 4), "launch", *RECIPE, "layout=fsdp", *values, f"run.dir={disks.place}/run", **options
    )


def end(processes, code: int = 0) -> list[str]:
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


def wait_for_step(run: RunDir, step: int, process) -> None:
    wait_for(lambda: max(losses(run), default=0) >= step, process, 0.1)


def worlds(run: RunDir) -> list[int]:
    return [event["world_size"] for event in run_events(run, "start")]


def weights(run: RunDir) -> str:
    return str(json.loads(run.result_json.read_text())["weights_sha256"])


def files_of(run: RunDir, step: int) -> set[str]:
    return {path.name for path in run.checkpoint(step).glob("rank*.safetensors")}


def check_losses(run: RunDir, trainspec) -> None:
    """The losses are those of a run on one host with one disk, up to the rounding of another number of ranks."""
    alone = run.root.parent / "alone"
    ended = trainspec("launch", *RECIPE, f"train.max_steps={max(losses(run))}", f"run.dir={alone}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = losses(RunDir(alone))
    assert losses(run).keys() == expected.keys()
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], rel=1e-3), step


def test_a_node_dies_and_the_run_continues_from_the_copies(disks, trainspec, record_property):
    processes = launch(disks, "train.max_steps=40")
    run = run_on(disks, 1)
    wait_for_step(run, 12, processes[0])
    disks.switch_off(3)
    processes[2].wait()
    end([processes[number] for number in (0, 1, 3)])
    assert worlds(run) == [4, 3]
    begun = run_events(run, "start")[1]["step"]
    assert begun in (5, 10, 15)
    checkpoints = run_events(run, "checkpoint")
    record_property("written_s", [event["written_s"] for event in checkpoints])
    check_losses(run, trainspec)
    disks.hosts.heal(3)


def test_the_other_nodes_continue_by_hand_without_the_first_one_and_with_a_damaged_copy(disks, trainspec):
    """Each file is on two disks. The first node's are gone; of rank 1's, one copy is damaged."""
    end(launch(disks, "train.max_steps=10"))
    damaged = run_on(disks, 2).checkpoint(10) / "rank00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    end(
        start(
            disks,
            (2, 3, 4),
            "resume",
            f"{disks.place}/run",
            "train.max_steps=20",
            "layout.dp_replicate=3",
            "layout.dp_shard=1",
        )
    )
    run = run_on(disks, 2)
    assert worlds(run) == [4, 3]
    assert run_events(run, "start")[1]["step"] == 10
    check_losses(run, trainspec)
    # Without an intact copy, nothing is trained.
    for number in (2, 3, 4):
        for path in run_on(disks, number).checkpoint(20).glob("rank00001.safetensors"):
            path.write_bytes(bytes(path.stat().st_size))
    again = ("resume", f"{disks.place}/run", "train.max_steps=30", "layout.dp_replicate=2")
    said = end(start(disks, (2, 3), *again), 4)
    assert "checkpoint refused" in said[0]
    assert max(losses(run)) == 20


def test_every_file_is_on_two_nodes_and_the_weights_are_those_of_a_shared_folder(disks, trainspec, tmp_path):
    said = end(launch(disks, "train.max_steps=10"))
    assert all("copied the run's data" in one for one in said[1:])
    run = run_on(disks, 1)
    for step, of_first in ((5, (0, 3)), (10, (0, 1, 2, 3))):  # the last one is collected for `export`
        assert [files_of(run_on(disks, number), step) for number in (1, 2, 3, 4)] == [
            {f"rank{rank:05d}.safetensors" for rank in ranks} for ranks in (of_first, (0, 1), (1, 2), (2, 3))
        ]
    for number in (2, 3, 4):
        other = run_on(disks, number)
        assert other.result_json.read_text() == run.result_json.read_text()
        assert losses(other) == losses(run)
        node = f"node{number - 1:05d}"
        assert list((run.logs / "launch_01" / node).rglob("stdout.log")), "its log is on the first node, too"
    end(
        start(disks, (1, 2, 3, 4), "launch", *RECIPE, "layout=fsdp", "train.max_steps=10", f"run.dir={tmp_path}/shared")
    )
    shared = RunDir(tmp_path / "shared")
    assert (losses(run), weights(run)) == (losses(shared), weights(shared))
    assert len(files_of(shared, 10)) == 4


def test_a_full_disk_on_one_node_costs_no_earlier_checkpoint(disks):
    """The last node has room for the data and for two checkpoints."""
    processes = launch(disks, "train.max_steps=1000000", room_of_last="3300k")
    run = run_on(disks, 1)
    wait_for(lambda: run_events(run, "warning"), processes[0], 0.2)
    processes[0].send_signal(signal.SIGINT)
    said = processes[0].communicate()[0]
    assert processes[0].returncode == 4, said
    assert "No space left on device" in " ".join(event["message"] for event in run_events(run, "warning"))
    newest = run.newest_step
    held = set().union(*(files_of(run_on(disks, number), newest) for number in (1, 2, 3)))
    assert newest and len(held) == 4, "the other three nodes have all files of the newest checkpoint"
