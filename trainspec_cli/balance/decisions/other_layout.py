"""Decide when a run changes to another layout: what the other one would win, against what the change costs.

Which layout is best at the ranks' measured speeds is the planner's to find; this says when it has paid to wait.
"""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.balance.decisions.balance import expected_pause_s
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import LayoutProposal


class LayoutScheduler:
    """Follows the layout that is expected to be fastest, from one change of the speeds to the next."""

    def __init__(self, patience_s: float = 0.0) -> None:
        """`patience_s`: as of a SkiRental."""
        self._wanted: LayoutProposal | None = None
        self._refused: set[Layout] = set()
        self._rental = SkiRental[Layout](patience_s)

    def want(self, proposal: LayoutProposal | None) -> None:
        """Take in which layout is worth a change as the speeds are now; None: none is."""
        self._wanted = None if proposal is None or proposal.layout in self._refused else proposal
        if self._wanted is None:
            self._rental.forget()

    def refuse(self, layout: Layout) -> None:
        """Note that a change to this layout has failed, or was no gain: it is not proposed again."""
        self._refused.add(layout)
        if self._wanted is not None and self._wanted.layout == layout:
            self.want(None)

    def note_steps(
        self, steps: int, step_s: float, remaining_steps: int, pause_s: float | None = None
    ) -> LayoutProposal | None:
        """Take in that so many steps of `step_s` seconds were made, and that `remaining_steps` are left; `pause_s` is
        what the last change of layout took.

        Return the layout that is to be changed to, with the seconds of a step as measured and as expected then: once
        what was lost without it has come to what the change costs (as in the ski-rental problem), and where the
        remaining steps win that back.
        """
        wanted = self._wanted
        if wanted is None:
            return None
        expected_s = step_s * wanted.expected_s / wanted.before_s
        saved_s = step_s - expected_s
        cost_s = expected_pause_s(step_s) if pause_s is None else pause_s
        pays = self._rental.note_steps(wanted.layout, saved_s, cost_s, steps, remaining_steps, step_s=step_s)
        return replace(wanted, before_s=step_s, expected_s=expected_s) if pays else None
