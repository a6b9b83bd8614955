"""A worker's first and last act: to meet the other processes, and to part from them."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join_processes(device_type: str) -> torch.device:
    """Meet the other ranks (torchrun's environment says where); -> this rank's device."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device_type], timeout=COLLECTIVE_TIMEOUT)
    return device


def leave_processes() -> NoReturn:
    """Part from the other ranks and exit with 0; exit handlers run, but the interpreter is not taken down.

    Gloo's threads need its lock to drop the tensors of finished work. A thread that asks for it while the interpreter
    is taken down aborts the process (pytorch/pytorch#179291), and the run would look failed at its very end. Destroying
    the groups stops the threads only of those that nothing refers to any more.
    """
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
