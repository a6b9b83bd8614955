"""A run's directives: new ones, and those of its earlier starts, which a resumed run follows. They are numbered across
all starts. Rank 0 records each one before the step that first uses it. Sample shares apply only to the layout for which
they were decided.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from trainspec_cli.core.reading.files import UnreadableFileError, unreadable
from trainspec_cli.engine.comm.json_collectives import broadcast_json, errors_together
from trainspec_cli.engine.observe.journal import DirectiveLog
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import ABSENT, Absent, read_record, to_plain
from trainspec_cli.recipe.results.plan import Plan, PlannedLayout
from trainspec_cli.run.folder.event_types.events import AchievedEvent, BucketsEvent, DirectiveEvent
from trainspec_cli.run.folder.events import read_log

OF_LAYOUT = ("layers", "layout")


class Directives:
    """A run's directives. All methods are called collectively by all ranks of the replica group."""

    def __init__(self, run: TrainingRun, *, recalls: bool):
        """If `recalls` is false, directives of earlier starts are not followed.

        Raises MachineError on every rank if a directive cannot be followed.
        """
        self._log = DirectiveLog(run.run_dir, run.journal)
        self._earlier = list[DirectiveEvent]()
        """Directives of earlier starts, by number."""
        self.buckets = dict[str, int]()
        """Bucket sizes that earlier starts have found, by layout."""
        if recalls:
            self._recall(run.run_dir.directives)
        # Follow only layout changes that form a chain from the plan's layout. A run resumed in another layout follows
        # none.
        self._layouts = list[DirectiveEvent]()
        layout = run.plan.layout
        for one in self._earlier:
            if one.kind in OF_LAYOUT and one.before == layout:
                self._layouts.append(one)
                layout = _layout_of(one) if one.applied else layout
        self._number = len(self._earlier)
        self.layout_number = 0
        """The number of the directive that set the current layout; 0 for the plan's layout."""
        self.last_pause_s: float | None = None
        """Duration of the last change of layout in this start, in seconds."""

    def write(self, event: DirectiveEvent) -> DirectiveEvent:
        """Assign a number to a directive, record it, and return it."""
        self._number += 1
        numbered = replace(event, number=self._number)
        if event.kind in OF_LAYOUT and event.applied:
            self.layout_number = self._number
            self.last_pause_s = event.pause_s or None
        self.note(numbered)
        return numbered

    def note(self, event: DirectiveEvent | AchievedEvent | BucketsEvent) -> None:
        """Record an event about directives; only rank 0 does so."""
        if dist.get_rank() == 0:
            self._log.write(event)

    def close(self) -> None:
        self._log.close()

    # Directives that a resumed run follows

    def _recall(self, path: Path) -> None:
        """Load the directives of earlier starts; rank 0 reads them for all ranks."""
        plain: list[object] = []
        with errors_together():
            if dist.get_rank() == 0:
                plain = [to_plain(directive) for directive in read_directives(path)]
        self._earlier = broadcast_json(plain, lambda lines: [read_record(DirectiveEvent, line) for line in lines])
        found: dict[str, object] = {}
        with errors_together():
            if dist.get_rank() == 0:
                events = (event for event in read_log(path) if isinstance(event, BucketsEvent))
                found = {event.layout: event.bucket_bytes for event in events}
        self.buckets = broadcast_json(found, lambda plain: dict(plain))

    def shares_of_layout(self, ranks: int, *, applied: bool) -> list[DirectiveEvent]:
        """Return the sample shares of `ranks` data-parallel ranks, from directives for the current layout."""
        given = []
        layout_number = 0
        for one in self._earlier:
            if one.kind in OF_LAYOUT:
                layout_number = one.number if one.applied else layout_number
            elif layout_number == self.layout_number and len(one.counts) == ranks and one.applied == applied:
                given.append(one)
        return given

    def due_layout(self, step: int) -> DirectiveEvent | None:
        """Return the newest layout change that is due after `step` updates but not in effect yet."""
        return next((one for one in reversed(self.layouts_ahead) if one.step <= step), None)

    @property
    def layouts_ahead(self) -> list[DirectiveEvent]:
        """Return the layout changes that are not in effect yet."""
        return [one for one in self._layouts if one.applied and one.number > self.layout_number]

    def has_changed_layout(self, step: int) -> bool:
        """Return whether an earlier start changed the layout, or tried to, at or after update `step`."""
        return any(one.step >= step for one in self._layouts)


def follows_earlier(plan: Plan, group: int | None) -> bool:
    """Return whether a start of `plan` follows the directives of earlier starts. Runs with replica groups are not
    resumed bit-exactly."""
    return group is None and (watches_speeds(plan, group) or bool(plan.changes))


def watches_speeds(plan: Plan, group: int | None) -> bool:
    """Return whether there is anything that the scheduler could change: the sample shares of several ranks or groups,
    the layer split of a pipeline, the layout of several ranks, or the participating nodes."""
    scheduler = plan.spec.scheduler
    divided = plan.layout.data_parallel_size > 1 or group is not None
    could_change = {
        "shares": divided,
        "layers": largest_stage_layers(plan) is not None,
        "layout": plan.group_size > 1 and group is None,
        "nodes": plan.num_nodes > 1,
    }
    return scheduler.mode != "off" and any(could_change[what] for what in scheduler.may_change)


def largest_stage_layers(plan: Plan) -> int | None:
    """Return the maximum number of layers per pipeline rank, as limited by memory or, if memory was not predicted, by
    the recipe; None if layers are not moved."""
    wanted = plan.spec.scheduler.max_stage_layers
    if plan.layout.pp == 1 or not plan.layer_flops:
        return None
    if plan.largest_stage_layers is not None:
        return plan.largest_stage_layers
    return None if wanted == AUTO else int(wanted)


def planned_by(directive: DirectiveEvent, plan: Plan) -> PlannedLayout:
    """Return the layout that a directive changed to, with its memory limits: from the directive itself, or from the
    layout in `plan` with the same axes."""
    assert isinstance(directive.micro_batch_size, int) and isinstance(directive.micro_batches, int)
    layout = _layout_of(directive)
    sizes = (directive.micro_batch_size, directive.micro_batches)
    most = directive.largest_micro_batch_size
    most_layers = directive.largest_stage_layers
    if not isinstance(most, Absent) and not isinstance(most_layers, Absent):
        return PlannedLayout(directive.step, layout, *sizes, most, most_layers)
    ways: list[Plan | PlannedLayout] = [plan, *plan.changes]
    alike = (one for one in ways if replace(one.layout, stage_layers=layout.stage_layers) == layout)
    known = next(alike, None)
    return PlannedLayout(
        directive.step,
        layout,
        *sizes,
        None if known is None else known.largest_micro_batch_size,
        None if known is None else known.largest_stage_layers,
    )


def _layout_of(directive: DirectiveEvent) -> Layout:
    assert isinstance(directive.layout, Layout), "this kind of directive has a layout"
    return directive.layout


def read_directives(path: Path) -> list[DirectiveEvent]:
    """Return a run's directives, without those for replica groups. Raises UnreadableFileError if a line is damaged,
    missing or from a later version: ignoring it would silently change the run's results."""
    events = [event for event in read_log(path) if isinstance(event, DirectiveEvent)]
    found = [event for event in events if not isinstance(event.group, int) and event.kind != "group_shares"]
    for number, directive in enumerate(found, 1):
        if directive.number != number:
            raise _unfollowed(path, f"has directive {directive.number} where {number} should be: lines are missing")
        if directive.kind not in ("shares", *OF_LAYOUT):
            raise _unfollowed(path, f"has a directive of the kind `{directive.kind}`, which this version does not know")
        sizes = (directive.micro_batch_size, directive.micro_batches)
        if not (sum(directive.counts) and all(isinstance(size, int) and size for size in sizes)):
            raise _unfollowed(path, f"has a directive without a division (number {number})")
        if directive.kind in OF_LAYOUT and ABSENT in (directive.before, directive.layout):
            raise _unfollowed(path, f"has a directive without a layout (number {number})")
    return found


def _unfollowed(path: Path, why: str) -> UnreadableFileError:
    return unreadable(path, why, f"to continue without the recorded directives, remove {path.name} from the run folder")
