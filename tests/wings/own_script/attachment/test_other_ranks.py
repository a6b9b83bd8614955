"""Ranks without torch: where a process stands among them, and a stop on which all act after the same step."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from trainspec_cli.wings.own_script.attachment.stopping import FlagFiles, find_place

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch) -> None:
    for name in ("jax", "tensorflow", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("task", "place"),
    [(("chief", 0), (0, 3)), (("worker", 0), (1, 3)), (("worker", "1"), (2, 3)), (("ps", 0), (0, 1))],
)
def test_a_place_in_tensorflows_cluster(monkeypatch, task, place) -> None:
    text = json.dumps({"cluster": CLUSTER, "task": {"type": task[0], "index": task[1]}})
    monkeypatch.setenv("TF_CONFIG", text)
    assert find_place() == (0, 1), "what trains is not TensorFlow"
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert find_place() == place


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cluster": {"worker": ["a"]}, "task": 3}'])
def test_a_cluster_that_cannot_be_read_is_none(monkeypatch, text) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert find_place() == (0, 1)


@pytest.mark.parametrize("initialised", [True, False])
def test_a_place_among_jaxs_processes(monkeypatch, initialised) -> None:
    jax = types.SimpleNamespace(
        distributed=types.SimpleNamespace(is_initialized=lambda: initialised),
        process_index=lambda: 3,
        process_count=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert find_place() == ((3, 4) if initialised else (0, 1))


def test_a_launchers_environment_counts_where_there_is_no_torch(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert find_place() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_place() == (1, 2)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert find_place() == (0, 1)


@pytest.mark.parametrize(("heard", "ends"), [({0: 4}, 5), ({2: 7}, 8), ({0: 6, 1: 3, 2: 5}, 4)])
def test_all_ranks_end_after_the_same_step_whoever_is_ahead(tmp_path: Path, heard, ends) -> None:
    """`heard`: the step at which a rank hears the request, by rank. Ranks take steps of different lengths, and none
    waits for an exchange, so that one may be a step ahead."""
    made: dict[int, int] = {}

    def train(rank: int) -> None:
        flags = FlagFiles(tmp_path, rank, 3)
        for step in range(1, 20):
            time.sleep(0.004 * rank)
            if flags.agree(step >= heard.get(rank, 99)):
                made[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {0: ends, 1: ends, 2: ends}


def test_a_rank_that_has_written_half_a_record_or_none_is_waited_for(tmp_path) -> None:
    flags = FlagFiles(tmp_path, 1, 2)
    assert not flags.agree(True)

    def write() -> None:
        for content in (b"\1", struct.pack("<QQ", 1, 1)):
            time.sleep(0.02)
            (tmp_path / "0.flag").write_bytes(content)

    writer = threading.Thread(target=write)
    writer.start()
    assert flags.agree(False)
    writer.join()
