"""Change the layout of a running job: the processes continue, but form different groups and hold different parts of the
state.

A change has four steps: create the new groups; build the new stages without values (the old state is still unchanged);
move the state, bucket by bucket; release the old modules. If a rank fails before the last bucket has arrived, all ranks
return to the old state."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.balance.decisions.balance import LayerChange, with_stages
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.accelerators import release_unused
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.lost_gradients import has_other_losses, lost_parts, parts_to_fill, take_lost
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.reshard import BUCKET_BYTES, ReshardError, agree_on_failure, reshard
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.observe.counters import free_bytes
from trainspec_cli.engine.run.scheduling.directives import Directives, planned_by
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.run.channel.messages import Proposal
from trainspec_cli.run.folder.event_types.events import ADVICE, DirectiveEvent

Prepare = Callable[[int, int], None]
DROPS_LOST = (
    "some compression errors do not belong to any exchange of this layout: their error feedback starts from zero"
)


class RelayoutError(Exception):
    """The layout could not be changed. The message is the same on every rank, and the state is unchanged."""


@dataclass(frozen=True)
class Relayout:
    """A completed change of layout."""

    state: TrainState
    pause_s: float
    moved_bytes: int
    """Bytes of parameters, moments and buffers sent between ranks."""
    peak_bytes: int
    """Maximum size of this state on any rank during the change, in bytes, including messages."""
    drops_lost: bool = False
    """True if some stored errors of compressed gradients belong to exchanges that do not exist or are not compressed in
    this layout."""


@dataclass(frozen=True)
class DueLayout:
    """The new layout."""

    planned: PlannedLayout
    reason: str
    followed: DirectiveEvent | None = None
    """The directive of an earlier start that requested this change."""
    before_s: float = 0.0
    expected_s: float = 0.0
    """Compute time per step of the slowest rank, in seconds: before the change, and expected after it. If more than the
    layer split changes, the time of the complete step instead. 0 if unmeasured."""


class LayoutChanges:
    """Decides about layout changes: those of earlier starts, and those planned in the recipe or proposed during the
    run."""

    def __init__(self, run: TrainingRun, directives: Directives):
        self._run = run
        self._planned = list(run.plan.changes)
        self._directives = directives
        self.meshes = Meshes(run.state.mesh)
        self.bucket_bytes = BUCKET_BYTES

    def due(self, step: int, decided: LayerChange | None = None, proposed: Proposal | None = None) -> DueLayout | None:
        """Return the layout that the run changes to after `step` updates, if any. If several are due, which can happen
        after a resume, return the last one. `decided` comes from the scheduler, `proposed` from the supervisor."""
        plan = self._run.plan
        if followed := self._directives.due_layout(step):
            return DueLayout(planned_by(followed, plan), followed.reason, followed)
        due = [planned for planned in self._planned if planned.step <= step]
        self._planned = [planned for planned in self._planned if planned.step > step]
        # If an earlier start has changed the layout at or after that step, or tried to, it has handled the plan's
        # change.
        if due and not self._directives.has_changed_layout(due[-1].step) and due[-1].layout != plan.layout:
            return DueLayout(due[-1], "the recipe plans it")
        wanted = list[DueLayout]()
        if proposed is not None and proposed.before == plan.layout:
            asked = proposed.proposal
            wanted.append(DueLayout(asked.planned_from(step), asked.reason, None, asked.before_s, asked.expected_s))
        if decided is not None:  # keep the current layout, with a different layer split
            cut = with_stages(plan.layout, decided.stage_layers)
            sizes = (plan.micro_batch_size, plan.grad_accum_steps)
            planned = PlannedLayout(step, cut, *sizes, plan.largest_micro_batch_size, plan.largest_stage_layers)
            wanted.append(DueLayout(planned, decided.reason, None, decided.before_s, decided.after_s))
        if plan.spec.scheduler.mode == "auto":
            return wanted[0] if wanted else None
        for advised in wanted:
            self._directives.write(_directive(step, advised, plan, ADVICE + advised.reason))
        return None

    def change(
        self, step: int, due: DueLayout, after: Plan, prepare: Prepare
    ) -> tuple[Relayout, DirectiveEvent] | None:
        """Change to the layout of `after`, and record the change. Return None if a rank failed; the layout is then
        unchanged."""
        before = self._run.plan
        try:
            done = change_layout(self._run.state, after, self.meshes, prepare, self.bucket_bytes)
        except RelayoutError as error:
            if due.followed is not None:
                number = due.followed.number
                message = f"the layout of directive {number}, which this run followed earlier, cannot be built: {error}"
                hint = "give the run more memory, or start it again from its recipe"
                raise WorkerError(message, code="cannot_move", hint=hint) from error
            self._directives.write(_directive(step, due, before, f"the layout is unchanged: {error}"))
            return None
        if due.followed is not None:
            self._directives.layout_number = due.followed.number
            return done, due.followed
        return done, self._directives.write(_directive(step, due, before, due.reason, done))


def _directive(step: int, due: DueLayout, plan: Plan, reason: str, done: Relayout | None = None) -> DirectiveEvent:
    """Return the directive that records a change. `done`: None if the change failed."""
    planned = due.planned
    even = even_division_of(plan.with_layout(due.planned))
    return DirectiveEvent(
        step=step,
        number=0,
        kind=kind_of(plan.layout, planned.layout),
        applied=done is not None,
        counts=even.counts(plan.spec.batching.global_batch_size),
        micro_batch_size=planned.micro_batch_size,
        micro_batches=planned.grad_accum_steps,
        reason=reason,
        before_s=due.before_s,
        expected_s=due.expected_s,
        before=plan.layout,
        layout=planned.layout,
        largest_micro_batch_size=planned.largest_micro_batch_size,
        largest_stage_layers=planned.largest_stage_layers,
        pause_s=done.pause_s if done else ABSENT,
        moved_bytes=done.moved_bytes if done else ABSENT,
        peak_bytes=done.peak_bytes if done else ABSENT,
    )


def kind_of(before: Layout, after: Layout) -> Literal["layers", "layout"]:
    """Return `layers` if only the layer split changes, otherwise `layout`."""
    return "layers" if replace(before, stage_layers=after.stage_layers) == after else "layout"


class Meshes:
    """Process groups by layout, for all layouts that a run has used. They are kept because the run may return to a
    layout, and because torch cannot release a group's connections and threads while anything refers to it."""

    def __init__(self, *known: Mesh):
        self._known = {_shape(mesh.layout): mesh for mesh in known}

    def of(self, layout: Layout, device_type: str) -> Mesh:
        """Return the process groups of `layout`, and create them if necessary. Called collectively by all ranks."""
        shape = _shape(layout)
        if shape not in self._known:
            self._known[shape] = build_mesh(layout, device_type)
        return replace(self._known[shape], layout=layout)


def _shape(layout: Layout) -> tuple[int, ...]:
    """Return the properties of a layout that determine its groups: the axes and the rank of the last stage."""
    axes = (getattr(layout, axis) for axis in (*MESH_AXES, "ep"))
    return (*axes, layout.rank_of_stage(layout.num_stages - 1))


def change_layout(
    state: TrainState,
    plan: Plan,
    meshes: Meshes,
    prepare: Prepare = lambda bucket, buckets: None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Relayout:
    """Convert `state` to the layout of `plan`; the old `state` is then no longer valid. Called collectively by all
    ranks.

    `prepare` and `bucket_bytes`: see `reshard`. Raises RelayoutError and leaves `state` unchanged if a rank could not
    continue.
    """
    started = time.perf_counter()
    new = _build(state, plan, meshes.of(plan.layout, state.device.type))
    try:
        where = state.device if plan.offload == "none" else torch.device("cpu")
        before = replace(state.held, lost=lost_parts(state))
        after = replace(new.held, lost=parts_to_fill(new))
        moved = reshard(before, after, prepare, partial(free_bytes, where), bucket_bytes)
    except ReshardError as error:
        raise RelayoutError(str(error)) from error
    dropped = torch.tensor([int(take_lost(new, list(after.lost)) or has_other_losses(state))])
    _forget(state)
    dist.all_reduce(dropped, dist.ReduceOp.MAX)
    paused_s = time.perf_counter() - started
    return Relayout(new, paused_s, moved.moved_bytes, moved.peak_bytes, bool(dropped.item()))


def _build(state: TrainState, plan: Plan, mesh: Mesh) -> TrainState:
    """Build the new stages without waiting for other ranks, and then agree on whether all ranks have built theirs."""
    new = None
    failure = ""
    try:
        new = build_train_state(plan, state.device, mesh, state.clock, state.wire, fill=False)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if reason := agree_on_failure(failure):
        new = None
        _collect(state)
        raise RelayoutError(reason)
    assert new is not None, "all ranks have built theirs"
    return new


def _forget(state: TrainState) -> None:
    """Collect the old modules, which form reference cycles, before the next step needs their memory."""
    if state.sums is not None:
        state.sums.close()
    state.stages.parts.clear()
    state.shares.clear()
    state.losses.clear()
    state.optimizer.state.clear()
    _collect(state)


def _collect(state: TrainState) -> None:
    gc.collect()
    release_unused(state.device)
