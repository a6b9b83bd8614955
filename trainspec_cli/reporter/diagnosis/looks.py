"""Profiles of suspected ranks ("looks"): which verdicts request a look, which rank it profiles, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.recipe.results.verdict import Cause, Look, LookOrder, RunVerdict

MOST_LOOKS = 8
"""Maximum number of looks in a run, over all of its starts."""
SAY_ALL: tuple[Cause, ...] = ("as_planned", "noise", "checkpoint_writing", "memory_leak", "memory_pressure")
"""Causes that a look cannot explain, because they are not work within steps, or because the look would use the very
resource that is short."""
LINE_SHARE = 0.2
"""A line of code is named if it accounts for at least this fraction of the time that a rank spends outside torch
operations."""


def next_look(verdict: RunVerdict, nodes: Sequence[int], known: Sequence[LookOrder]) -> LookOrder | None:
    """Return the look that a new verdict requests. None if there is nothing to look for, if the place has already been
    profiled, or if the run has used all of its profiles. `nodes`: the node of each rank."""
    # A look slows its rank down for some steps, so a run has only a few of them.
    if verdict.cause in SAY_ALL or len(known) >= MOST_LOOKS or any(one.place == verdict.place for one in known):
        return None
    # The suspected rank profiles itself. If the verdict names no rank, it is the first rank of the node, link or run.
    looker = nodes.index(verdict.node) if verdict.node in nodes else 0
    if verdict.link:
        looker = verdict.link[0]
    if verdict.rank is not None:
        looker = verdict.rank
    return LookOrder(
        number=max((one.number for one in known), default=0) + 1,
        looker=looker,
        cause=verdict.cause,
        rank=verdict.rank,
        node=verdict.node,
        link=verdict.link,
    )


def with_look(verdict: RunVerdict, looks: Sequence[Look]) -> RunVerdict:
    """Return the verdict with the findings of the newest look at the same place."""
    look = next((one for one in reversed(looks) if one.order.place == verdict.place), None)
    if look is None:
        return verdict
    # Do not name a line that accounts for only a small fraction of the time: it may have been sampled by chance.
    code = look.lines[0].position if look.lines and look.lines[0].share >= LINE_SHARE else None
    names_line = code is not None
    rank = look.order.looker
    made = look.last_step >= look.first_step
    where = f"in steps {look.first_step} to {look.last_step}" if made else f"in step {look.first_step}"
    said = []
    if names_line:
        top = look.lines[0]
        line = f": {top.text}" if top.text else ""
        said.append(f"rank {rank} {where}: {top.share:.0%} of its own time at {top.position}{line}")
    if look.operations and (not names_line or look.operations_share > 0.5):
        named = ", ".join(f"{one.name} {one.self_s * 1e3:.3g} ms" for one in look.operations)
        place = "on the GPU " if look.operations[0].on_device else ""
        said.append(f"rank {rank} {where}: the operations that take the most time {place}in a step are {named}")
    if look.file is not None and made:
        said.append(f"trace of these steps: {look.file}")
    return replace(verdict, code=code, evidence=(*verdict.evidence, *said, *look.notes))
