"""Join the process group at a worker's start, and leave it at the end."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from trainspec_cli.core.environment_names import STORE_FILE
from trainspec_cli.engine.accelerators import enter, process_group_backends

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_stores: list[dist.Store] = []
"""References that keep stores alive: process groups hold only their C++ half."""


def join_processes(device_type: str) -> torch.device:
    """Join the other ranks of this generation, and return this rank's device."""
    device = enter(device_type)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _stores.append(_open_store(world_size))
    backends = process_group_backends(device_type)
    dist.init_process_group(backends, store=_stores[-1], rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return device


def _open_store(world_size: int) -> dist.Store:
    """Return a store: a private file on a single node, else a client of the rendezvous server (torchrun.py)."""
    if STORE_FILE in os.environ:
        file_store = dist.FileStore(os.environ[STORE_FILE], world_size)
        file_store.set_timeout(COLLECTIVE_TIMEOUT)
        return file_store
    from trainspec_cli.engine.comm.rendezvous import RendezvousStore

    store = RendezvousStore(COLLECTIVE_TIMEOUT)
    _stores.append(store)
    return dist.PrefixStore(f"workers/{os.environ['TORCHELASTIC_RUN_ID']}", store)


def leave_processes() -> NoReturn:
    """Leave the process group and exit with 0; exit handlers run, but the interpreter is not finalised.

    Gloo's threads need its lock to drop the tensors of finished work. A thread that asks for it during finalisation
    aborts the process (pytorch/pytorch#179291), and the run would look failed at its very end. Destroying the groups
    stops only the threads of groups without references.
    """
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
