"""Measure the effect of directives in the steps after them, and write it down beside what was expected."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from trainspec_cli.balance.decisions.speeds import SKIPPED_STEPS
from trainspec_cli.engine.run.scheduling.directives import Directives
from trainspec_cli.run.folder.event_types.decisions import AchievedEvent, DirectiveEvent

MEASURED_STEPS = 5
"""The effect of a directive is the median over so many steps."""
SETTLED_STEPS = 10
"""The number of steps after which shares have followed the speeds of another layout, once these are known."""


@dataclass
class Watched:
    """A directive whose effect is being measured."""

    directive: DirectiveEvent
    before_s: float
    skipped: int
    """The first steps still bring what was measured before it."""
    seen_s: list[float] = field(default_factory=list)

    @property
    def is_of_layout(self) -> bool:
        return self.directive.kind == "layout"


class Effects:
    """The effects of the directives that were given in one layout, and of the one that led to it."""

    def __init__(self, directives: Directives):
        self._directives = directives
        self._slowest_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._watched: list[Watched] = []

    def watch(self, directive: DirectiveEvent) -> None:
        """Measure what a directive comes to, which is in force from the next step on. Another layout has come to what
        it can once its speeds are learnt and shares have followed them."""
        if directive.kind == "shares":
            before_s, skipped = median(self._slowest_s), SKIPPED_STEPS
        else:
            before_s = directive.before_s
            skipped = SKIPPED_STEPS + (SETTLED_STEPS if directive.kind == "layout" else 0)
        self._watched = [one for one in self._watched if one.is_of_layout]
        self._watched.append(Watched(directive, before_s, skipped))

    def note_step(self, step: int, slowest_s: float, whole_s: float, *, knows_speeds: bool) -> None:
        """Take in what the slowest rank computed in the step before, and what the step itself took: layouts differ in
        exchanges and waiting too. `knows_speeds`: of all ranks."""
        self._slowest_s.append(slowest_s)
        for watched in list(self._watched):
            if knows_speeds or not watched.is_of_layout:
                watched.seen_s.append(whole_s if watched.is_of_layout else slowest_s)
            if len(watched.seen_s) == watched.skipped + MEASURED_STEPS:
                self._watched.remove(watched)
                self._write(step, watched)

    def _write(self, step: int, watched: Watched) -> None:
        given = watched.directive
        self._directives.note_effect(
            AchievedEvent(
                step=step,
                number=given.number,
                before_s=watched.before_s,
                expected_s=given.expected_s,
                achieved_s=median(watched.seen_s[watched.skipped :]),
                group=given.group,
            )
        )
