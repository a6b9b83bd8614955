"""Traces of the engine's step in forked processes: torch is imported once, not once a traced rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from trainspec_cli.launch.tracing import traced_ranks
from trainspec_cli.spec.results.plan import Plan

TRACER = "trainspec_cli.engine.tools.trace"


class Trace(Protocol):
    def __call__(self, plan: Plan) -> dict[str, Any]: ...


@contextmanager
def open_tracer() -> Iterator[Trace]:
    """`trace(plan)` returns what `trace_plan(plan)` does. Each rank has a process of its own: a world leaves caches."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([TRACER])
    with ProcessPoolExecutor(max_workers=2, mp_context=context, max_tasks_per_child=1) as pool:
        yield partial(_trace_plan, pool)


def _trace_plan(pool: ProcessPoolExecutor, plan: Plan) -> dict[str, Any]:
    ranks = pool.map(_trace_rank, [(plan, rank) for rank in traced_ranks(plan)])
    return max(ranks, key=lambda traced: traced["peak_memory_bytes"])


def _trace_rank(asked: tuple[Plan, int]) -> dict[str, Any]:
    import torch

    from trainspec_cli.engine.tools.trace import trace_rank

    torch.set_num_threads(1)
    return trace_rank(*asked)
