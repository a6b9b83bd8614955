"""`store_worker.py RANK WORLD`: a rank whose process groups are built through the job's rendezvous server."""

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from lab.waiting import PATIENCE_S
from torch.distributed.fsdp import fully_shard

from trainspec_cli.engine.comm.joining import RendezvousStore, leave_processes

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])


def check_store(store: dist.Store) -> None:
    """What torch's own stores do."""
    store.set(f"bytes/{RANK}", bytes(range(256)))
    assert store.multi_get([f"bytes/{rank}" for rank in range(WORLD)]) == [bytes(range(256))] * WORLD
    store.add("counter", RANK + 1)
    store.set(f"added/{RANK}", "yes")
    store.wait([f"added/{rank}" for rank in range(WORLD)], timedelta(seconds=60))
    assert store.get("counter") == str(WORLD * (WORLD + 1) // 2).encode()
    assert not store.check(["nobody sets it"])
    assert store.compare_set(f"own/{RANK}", "", "first") == b"first"
    assert store.delete_key(f"own/{RANK}")
    try:
        store.wait(["nobody sets it"], timedelta(seconds=0.1))
    except dist.DistStoreError as error:
        assert "`nobody sets it` within 0.1 s" in str(error)
    else:
        raise AssertionError("it came")


def check_two_threads(store: dist.Store) -> None:
    """One waits for what the other sets: they do not share a connection."""
    waiting = threading.Thread(target=lambda: store.get(f"late/{RANK}"))
    waiting.start()
    store.set(f"late/{RANK}", "now")
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def train() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.full((4, 8), float(step + RANK))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


own_store = RendezvousStore(timedelta(seconds=60))
check_store(own_store)
check_two_threads(own_store)
dist.init_process_group("gloo", store=dist.PrefixStore("workers", own_store), rank=RANK, world_size=WORLD)
pair = dist.new_group([0, 1])
if RANK < 2:
    summed = torch.ones(3)
    dist.all_reduce(summed, group=pair)
    assert summed.tolist() == [2.0] * 3
print(train())
leave_processes()
