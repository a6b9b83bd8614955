"""Workers that torchrun forks after it has imported the engine once, instead of starting Python for each of them.

Importing torch and the engine takes some three seconds of CPU in every process, and as many reads of a shared file
system. A forked worker begins in milliseconds, and the ranks of a node share the memory of what was imported. Nothing
may start a thread or touch a GPU before the fork: the parent imports, and does no more.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.numa.binding import NumaOptions

from trainspec_cli.engine.comm.forked_process import ForkedProcess

ENGINE, TOOLS = "trainspec_cli.engine", "trainspec_cli.engine.tools"
WITHOUT_CUDA_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The variable with which a query for a GPU leaves CUDA alone, which does not survive a fork once it has begun."""


def fork_workers(module: str, arguments: Sequence[str]) -> None:
    """Let torchrun fork its workers where `module` is the engine's own; any other program is started as ever.

    Only on Linux: elsewhere system libraries do not survive a fork.
    """
    if sys.platform != "linux" or module not in (ENGINE, TOOLS):
        return
    os.environ.setdefault(WITHOUT_CUDA_CONTEXT, "1")
    with contextlib.suppress(Exception):  # the workers meet the same error, and say so where a worker's errors belong
        import_module(f"{ENGINE}.run.worker" if module == ENGINE else f"{TOOLS}.{arguments[0]}")
    gc.freeze()  # the workers' collections leave alone what they all share
    api.get_subprocess_handler = _forking_handler


class _ForkingHandler(SubprocessHandler):
    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> ForkedProcess:  # type: ignore[override]
        assert self._stdout and self._stderr, "torchrun is asked to write both outputs to files"
        module = args.index("-m") + 1
        return ForkedProcess(
            lambda: _run_module(args[module], args[module + 1 :]), env, self._stdout.fileno(), self._stderr.fileno()
        )


def _forking_handler(
    entrypoint: str,
    args: tuple[str, ...],
    env: dict[str, str],
    stdout: str,
    stderr: str,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    return _ForkingHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)


def _run_module(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
