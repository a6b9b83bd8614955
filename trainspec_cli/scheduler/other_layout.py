"""Find the layout in which a run with slow ranks is fastest, of all that the planner knows and the engine can change
to."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.planner import this_machine
from trainspec_cli.planner.capacity import setup_of
from trainspec_cli.planner.setup import Setup
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.plan import LayoutProposal, Plan
from trainspec_cli.spec.results.prediction import Candidate


class OtherLayouts:
    """The layouts that a run may change to. Made once for a run, it keeps what does not depend on speeds."""

    def __init__(self, spec: RunSpec, setup: Setup, recompute: str, samples: int | None = None):
        """`setup` is of the layout in force; `samples`: of a step (by default of those that train most of the run)."""
        self._spec, self._setup, self._recompute, self._samples = spec, setup, recompute, samples

    @classmethod
    def of_plan(cls, plan: Plan, machine: Machine, samples: int | None = None) -> OtherLayouts:
        """Return the layouts of a run on this machine's devices, of which `plan` has the one in force."""
        return cls(plan.spec, this_machine.setup_of(plan, machine), plan.recompute, samples)

    @classmethod
    def of_candidate(cls, spec: RunSpec, candidate: Candidate, machine: Machine | None) -> OtherLayouts:
        """Return the layouts of a planned run, of which `candidate` has the one in force."""
        return cls(spec, setup_of(candidate, spec, machine), candidate.recompute)

    def propose(self, paces: Sequence[float]) -> LayoutProposal | None:
        """Return the layout in which a step is expected to be fastest, where it beats the present one; None where none
        does, or all ranks are equally fast.

        `paces`: how many times as long as usual each global rank computes, in the order of ranks; the median counts as
        usual, and so do those within `scheduler.change` of it.
        """
        raise NotImplementedError
