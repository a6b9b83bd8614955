"""The engine's code on a rank that is not there, in forked processes: torch is imported once, not once a rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Protocol

from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import TraceResult
from trainspec_cli.run.tools import traced_ranks

TRACER = "trainspec_cli.engine.tools.trace"


class Trace(Protocol):
    def __call__(self, plan: Plan) -> TraceResult: ...


@contextmanager
def open_forks() -> Iterator[ProcessPoolExecutor]:
    """Each call has a process of its own, where no process group was made before: a world leaves caches behind."""
    with ProcessPoolExecutor(max_workers=2, mp_context=fork_context(), max_tasks_per_child=1) as forks:
        yield forks


def fork_context() -> ForkServerContext:
    """Return a context whose forked processes have the engine imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TRACER])
    return context


def tracer(forks: ProcessPoolExecutor) -> Trace:
    """`trace(plan)` returns what `trace_plan(plan)` does."""
    return partial(_trace_plan, forks)


def _trace_plan(forks: ProcessPoolExecutor, plan: Plan) -> TraceResult:
    ranks = forks.map(_trace_rank, [(plan, rank) for rank in traced_ranks(plan)])
    return max(ranks, key=lambda traced: traced.peak_memory_bytes)


def _trace_rank(asked: tuple[Plan, int]) -> TraceResult:
    import torch

    from trainspec_cli.engine.tools.trace import trace_rank

    torch.set_num_threads(1)
    return trace_rank(*asked)
