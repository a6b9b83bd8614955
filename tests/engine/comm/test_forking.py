"""torchrun forks the engine's own workers, and starts any other program as usual."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing import api

from trainspec_cli.engine.comm import forking
from trainspec_cli.engine.comm.forking import fork_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")


@pytest.mark.parametrize(
    ("module", "arguments", "imported"),
    [
        ("trainspec_cli.engine", ["run"], "trainspec_cli.engine.run.worker"),
        ("trainspec_cli.engine.tools", ["links", "folder"], "trainspec_cli.engine.tools.links"),
        ("another.module", ["run"], None),
    ],
)
def test_the_engines_own_workers_are_forked_from_what_is_imported_already(
    module: str, arguments: list[str], imported: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    usual = api.get_subprocess_handler
    monkeypatch.setattr(api, "get_subprocess_handler", usual)
    monkeypatch.setattr(forking, "import_module", seen.append)
    monkeypatch.setattr(forking.gc, "freeze", lambda: None)
    monkeypatch.delenv(forking.WITHOUT_CUDA_CONTEXT, raising=False)
    fork_workers(module, arguments)
    assert seen == [imported] * bool(imported)
    assert (api.get_subprocess_handler is usual) == (imported is None)
    assert (os.environ.get(forking.WITHOUT_CUDA_CONTEXT) == "1") == bool(imported)


@pytest.mark.slow
def test_what_is_imported_starts_no_thread_and_asks_for_no_gpu() -> None:
    """Neither would survive the fork; the threads of the libraries for numbers stop by themselves."""
    text = """
import threading, torch
torch.cuda.is_available = torch.cuda.device_count = lambda: asked.append(1) or 0
asked = []
from trainspec_cli.engine.comm.forking import fork_workers
fork_workers("trainspec_cli.engine", ["run"])
import trainspec_cli.engine.run.worker
print(threading.active_count(), torch.cuda.is_initialized(), torch.get_num_threads() > 0)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False True\n"
