"""Decide when a run switches to another layout, by weighing the time saved against the cost of the change. (The planner
finds the best layout for the ranks' measured speeds.)"""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.balance.decisions.balance import expected_pause_s
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import LayoutProposal


class LayoutScheduler:
    """Tracks the layout that is expected to be the fastest at the current speeds."""

    def __init__(self, patience_s: float = 0.0) -> None:
        """`patience_s`: see SkiRental."""
        self._wanted: LayoutProposal | None = None
        self._refused: set[Layout] = set()
        self._rental = SkiRental[Layout](patience_s)

    def want(self, proposal: LayoutProposal | None) -> None:
        """Set the layout that is worth switching to at the current speeds, or None."""
        self._wanted = None if proposal is None or proposal.layout in self._refused else proposal
        if self._wanted is None:
            self._rental.forget()

    def refuse(self, layout: Layout) -> None:
        """Never propose this layout again, because the change to it failed or was not an improvement."""
        self._refused.add(layout)
        if self._wanted is not None and self._wanted.layout == layout:
            self.want(None)

    def note_steps(
        self, steps: int, step_s: float, remaining_steps: int, pause_s: float | None = None
    ) -> LayoutProposal | None:
        """Record `steps` steps of `step_s` seconds. Return the layout to switch to, with the measured and the expected
        step time in seconds, once a SkiRental decides that the change pays off. `remaining_steps`: steps left in the
        run. `pause_s`: duration of the last layout change."""
        wanted = self._wanted
        if wanted is None:
            return None
        expected_s = step_s * wanted.expected_s / wanted.before_s
        saved_s = step_s - expected_s
        cost_s = expected_pause_s(step_s) if pause_s is None else pause_s
        pays = self._rental.note_steps(wanted.layout, saved_s, cost_s, steps, remaining_steps, step_s=step_s)
        return replace(wanted, before_s=step_s, expected_s=expected_s) if pays else None
