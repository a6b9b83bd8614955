"""`python -m trainspec_cli.engine.comm.torchrun OPTIONS -m MODULE ARGUMENTS`: torchrun with a private rendezvous.

torchrun's own rendezvous unpickles data from a store that anyone who reaches the port can write, and hands that store
to the workers. Here a single node opens no port: its workers use a file that only their user can read. Several nodes
use the job's rendezvous server, which requires the job's secret.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from trainspec_cli.core.environment_names import STORE_FILE
from trainspec_cli.engine.comm.forking import fork_workers
from trainspec_cli.engine.comm.joining import COLLECTIVE_TIMEOUT
from trainspec_cli.engine.comm.rendezvous import RendezvousStore

BACKEND = "trainspec"
NOWHERE = RendezvousStoreInfo("127.0.0.1", 0)
"""A dummy: torchrun passes the workers the address of a TCP store, and there is none."""


class PrivateRendezvous(RendezvousHandler):
    """A rendezvous with known members: each node's number, and how many there are, are given."""

    def __init__(self, parameters: RendezvousParameters):
        self._node, self._num_nodes = parameters.get_as_int("node", 0) or 0, parameters.max_nodes
        self._store = dist.HashStore() if self._num_nodes == 1 else RendezvousStore(COLLECTIVE_TIMEOUT)
        self._name = parameters.run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.PrefixStore(self._name, self._store), self._node, self._num_nodes, NOWHERE)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no second rendezvous."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


def main() -> None:
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, PrivateRendezvous)
    asked = run.parse_args(sys.argv[1:])
    if asked.module:
        fork_workers(asked.training_script, asked.training_script_args)
    folder = tempfile.mkdtemp(prefix="trainspec-")
    try:
        os.environ.pop(STORE_FILE, None)
        if asked.nnodes == "1":
            os.environ[STORE_FILE] = str(Path(folder, "store"))
        run.main()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
