"""Judge runs of the trainer that change while they go on, clause by clause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.certify.families import SAMPLES
from trainspec_cli.certify.live import FITTING_SAMPLES, KILLED_AT, SAVE_EVERY_STEPS, SHORT_AT, STEPS, Live
from trainspec_cli.certify.runs import Measured, loss_error, whole_error
from trainspec_cli.certify.standing import AS_THEY_MUST_BE
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.tools import LiveSteps

Figures = dict[str, float | str]


def beside(case: Case) -> Case:
    """Return the run that a live one is held against: of one that is killed, the same with no kill; else the one to
    which nothing happens."""
    assert case.live is not None
    killed = case.live.disturbance == "killed"
    return replace(case, live=Live(case.live.changes if killed else ()))


def judge_layouts(case: Case, found: Measured, reference: Measured) -> Figures:
    """LIVE-1 and LIVE-2: the layouts are those planned, each sample is taken once and the state is never on disk."""
    live = _live(found)
    facts = {
        "layouts": live.layouts == planned_layouts(case),
        "samples": takes_each_once(found),
        "disk": live.written_bytes == 0,
    }
    return _judge_errors(found, reference, facts)


def judge_killed(case: Case, found: Measured, reference: Measured) -> Figures:
    """LIVE-3: the second start begins with the newest checkpoint, and repeats the change to the bit."""
    live = _live(found)
    newest = (KILLED_AT // SAVE_EVERY_STEPS) * SAVE_EVERY_STEPS
    facts = {
        "starts": live.starts == (0, newest),
        "layouts": live.layouts == planned_layouts(case),
        "samples": takes_each_once(found),
    }
    return _judge_bits(found, reference, facts)


def judge_failed(case: Case, found: Measured, reference: Measured) -> Figures:
    """LIVE-4: the layout stays as it was, and so does every bit."""
    live = _live(found)
    facts = {"starts": live.starts == (0,), "layouts": set(live.layouts) == {build_plan(case, "cpu").layout}}
    return _judge_bits(found, reference, facts)


def judge_short(case: Case, found: Measured, reference: Measured) -> Figures:
    """LIVE-5: micro-batches fit from the step on in which memory ran out, and no step is lost."""
    live, usual = _live(found), build_plan(case, "cpu").micro_batch_size
    sizes = (usual,) * SHORT_AT + (FITTING_SAMPLES,) * (STEPS - SHORT_AT)
    facts = {
        "starts": live.starts == ((0,) if case.layout.world_size == 1 else (0, SHORT_AT)),
        "micro-batches": live.largest_micro_batches == sizes,
        "samples": takes_each_once(found),
    }
    return _judge_errors(found, reference, facts)


LIVE_JUDGES: dict[str, Callable[[Case, Measured, Measured], Figures]] = {
    "LIVE-1": judge_layouts,
    "LIVE-2": judge_layouts,
    "LIVE-3": judge_killed,
    "LIVE-4": judge_failed,
    "LIVE-5": judge_short,
}


def planned_layouts(case: Case) -> tuple[Layout, ...]:
    """Return the layout that each step is to be made in."""
    plan = build_plan(case, "cpu")
    begun = [(0, plan.layout), *((change.step, change.layout) for change in plan.changes)]
    return tuple(next(layout for first, layout in reversed(begun) if first <= step) for step in range(STEPS))


def takes_each_once(found: Measured) -> bool:
    """Return whether every step took the samples that follow those of the step before it."""
    steps = (tuple(range(first, first + SAMPLES)) for first in range(0, SAMPLES * STEPS, SAMPLES))
    return found.result.trained.taken == tuple(steps)


def _live(found: Measured) -> LiveSteps:
    assert found.result.live is not None, "the trainer made the run"
    return found.result.live


def _judge_errors(found: Measured, reference: Measured, facts: dict[str, bool]) -> Figures:
    errors = {
        "worst_loss_error": loss_error(found.losses, reference.losses),
        "gradient_error": whole_error(found.gradients, reference.gradients),
        "weight_error": whole_error(found.weights, reference.weights),
    }
    return {**errors, **_shown(found, facts)}


def _judge_bits(found: Measured, reference: Measured, facts: dict[str, bool]) -> Figures:
    return {
        "sha256": found.result.trained.weights_sha256,
        "undisturbed": reference.result.trained.weights_sha256,
        "worst_loss_error": loss_error(found.losses, reference.losses),
        **_shown(found, facts),
    }


def _shown(found: Measured, facts: dict[str, bool]) -> Figures:
    made = {"steps": len(found.losses) == STEPS, **facts}
    return {name: AS_THEY_MUST_BE if kept else "not as they must be" for name, kept in made.items()}
