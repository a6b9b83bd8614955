"""Change the layout of a run that goes on: the same processes, other groups, other parts of the state.

The order is: meet in the new groups; build the new stages without values (nothing that a rank does alone has happened
to the old state yet); move the state, bucket by bucket; let go of the old modules. Whatever fails on a rank before the
last bucket has arrived takes all of them back to the state before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.checkpoint.reshard import ReshardError, agree_on_failure, reshard
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.spec.recipe.layout import MESH_AXES, Layout
from trainspec_cli.spec.results.plan import Plan

Prepare = Callable[[int, int], None]


class RelayoutError(Exception):
    """The layout could not be changed; the message says why, the same on every rank. The old state is as it was."""


@dataclass(frozen=True)
class Relayout:
    """A change that was made."""

    state: TrainState
    pause_s: float
    moved_bytes: int
    """Of parameters, moments and buffers, sent from rank to rank."""
    peak_bytes: int
    """The most of them that one rank held meanwhile, messages included."""


class Meshes:
    """The process groups of the layouts that a run has had. They are kept: a run goes back to a layout, and each group
    has connections and threads, which torch does not give back while anything refers to it."""

    def __init__(self, first: Mesh):
        self._known = {_shape(first.layout): first}

    def of(self, layout: Layout, device_type: str) -> Mesh:
        """Return the groups of `layout`, made now where they are new. Called by every rank together."""
        shape = _shape(layout)
        if shape not in self._known:
            self._known[shape] = build_mesh(layout, device_type)
        return replace(self._known[shape], layout=layout)


def _shape(layout: Layout) -> tuple[int, ...]:
    """What the groups depend on: the axes, and the rank of the last stage."""
    axes = (getattr(layout, axis) for axis in (*MESH_AXES, "ep"))
    return (*axes, layout.rank_of_stage(layout.num_stages - 1))


def change_layout(
    state: TrainState, plan: Plan, meshes: Meshes, prepare: Prepare = lambda bucket, buckets: None
) -> Relayout:
    """Return the state in the layout of `plan`; that of `state` is gone then. Called by every rank together.

    `prepare`: as of `reshard`. Raises RelayoutError, and leaves `state` as it was, where a rank could not go on.
    """
    started = time.perf_counter()
    new = _build(state, plan, meshes.of(plan.layout, state.device.type))
    try:
        moved = reshard(state.held, new.held, prepare)
    except ReshardError as error:
        raise RelayoutError(str(error)) from error
    _forget(state)
    dist.barrier()
    return Relayout(new, time.perf_counter() - started, moved.moved_bytes, moved.peak_bytes)


def _build(state: TrainState, plan: Plan, mesh: Mesh) -> TrainState:
    """Build the new stages, which no rank waits for; agree that all of them stand."""
    new, failure = None, ""
    try:
        new = build_train_state(plan, state.device, mesh, state.clock, fill=False)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if reason := agree_on_failure(failure):
        raise RelayoutError(reason)
    assert new is not None, "all ranks have built theirs"
    return new


def _forget(state: TrainState) -> None:
    """Let go of modules that refer to one another in circles, before the next step needs the memory."""
    state.stages.parts.clear()
    state.shares.clear()
    state.optimizer.state.clear()
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
