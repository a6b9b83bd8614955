"""Ranks without torch: how a process finds its rank, and how all ranks stop after the same step."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from trainspec_cli.wings.own_script.attachment.stopping import FlagFiles, find_rank

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch) -> None:
    for name in ("jax", "tensorflow", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("task", "expected"),
    [(("chief", 0), (0, 3)), (("worker", 0), (1, 3)), (("worker", "1"), (2, 3)), (("ps", 0), (0, 1))],
)
def test_the_rank_in_tensorflows_cluster(monkeypatch, task, expected) -> None:
    text = json.dumps({"cluster": CLUSTER, "task": {"type": task[0], "index": task[1]}})
    monkeypatch.setenv("TF_CONFIG", text)
    assert find_rank() == (0, 1), "the script does not use TensorFlow"
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert find_rank() == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cluster": {"worker": ["a"]}, "task": 3}'])
def test_an_unreadable_cluster_is_ignored(monkeypatch, text) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setitem(sys.modules, "tensorflow", types.ModuleType("tensorflow"))
    assert find_rank() == (0, 1)


@pytest.mark.parametrize("initialised", [True, False])
def test_the_rank_among_jaxs_processes(monkeypatch, initialised) -> None:
    jax = types.SimpleNamespace(
        distributed=types.SimpleNamespace(is_initialized=lambda: initialised),
        process_index=lambda: 3,
        process_count=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert find_rank() == ((3, 4) if initialised else (0, 1))


def test_a_launchers_environment_counts_only_without_torch(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert find_rank() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_rank() == (1, 2)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert find_rank() == (0, 1)


@pytest.mark.parametrize(("requests", "ends"), [({0: 4}, 5), ({2: 7}, 8), ({0: 6, 1: 3, 2: 5}, 4)])
def test_all_ranks_end_after_the_same_step(tmp_path: Path, requests, ends) -> None:
    """`requests`: the step at which a rank gets the request, by rank. Ranks have steps of different lengths and wait
    for no exchange, so that one may be a step ahead."""
    made: dict[int, int] = {}

    def train(rank: int) -> None:
        flags = FlagFiles(tmp_path, rank, 3)
        for step in range(1, 20):
            time.sleep(0.004 * rank)
            if flags.agree(step >= requests.get(rank, 99)):
                made[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {0: ends, 1: ends, 2: ends}


def test_a_rank_waits_for_incomplete_and_missing_records(tmp_path) -> None:
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
