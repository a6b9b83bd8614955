"""Deeper looks: which verdicts ask for one, at which rank, and what a look adds to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.recipe.results.verdict import Cause, Look, LookOrder, RunVerdict

MOST_LOOKS = 8
"""Looks of a run, over all of its starts."""
SAY_ALL: tuple[Cause, ...] = ("as_planned", "noise", "checkpoint_writing", "memory_leak", "memory_pressure")
"""Causes that a look says nothing more of: they are no work of the steps, or a look takes what is short."""
LINE_SHARE = 0.2
"""A line is the place where so much of a rank's own time stands at it, outside of torch's operations."""


def next_look(verdict: RunVerdict, nodes: Sequence[int], known: Sequence[LookOrder]) -> LookOrder | None:
    """Return the look that a new verdict asks for; None where it asks for none, its place was looked at, or there were
    enough of them. `nodes`: of each rank."""
    # A look slows its rank for some steps, so a run makes few of them.
    if verdict.cause in SAY_ALL or len(known) >= MOST_LOOKS or any(one.place == verdict.place for one in known):
        return None
    # The suspected rank looks at itself, or the first one of a node or a link, or of the run.
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
    """Return a verdict with what the newest look at its place has found."""
    look = next((one for one in reversed(looks) if one.order.place == verdict.place), None)
    if look is None:
        return verdict
    # A line with a small share of the time is only where the sampling happened to land.
    code = look.lines[0].position if look.lines and look.lines[0].share >= LINE_SHARE else None
    return replace(verdict, code=code, evidence=(*verdict.evidence, *_sentences(look, names_line=code is not None)))


def _sentences(look: Look, *, names_line: bool) -> list[str]:
    rank = look.order.looker
    made = look.last_step >= look.first_step
    where = f"in steps {look.first_step} to {look.last_step}" if made else f"in step {look.first_step}"
    said = []
    if names_line:
        top = look.lines[0]
        code = f": {top.text}" if top.text else ""
        said.append(f"rank {rank} {where}: {top.share:.0%} of its own time at {top.position}{code}")
    if look.operations and (not names_line or look.operations_share > 0.5):
        named = ", ".join(f"{one.name} {one.self_s * 1e3:.3g} ms" for one in look.operations)
        place = "on the GPU " if look.operations[0].on_device else ""
        said.append(f"rank {rank} {where}: the operations that take most {place}of a step are {named}")
    if look.file is not None and made:
        said.append(f"trace of these steps: {look.file}")
    return [*said, *look.notes]
