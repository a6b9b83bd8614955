"""For each clause: the runs that it needs, the values that they produce, and the resulting finding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.certificate import REFUSALS, Finding
from trainspec_cli.wings.certify.cases import (
    COMM_CLAUSES,
    EMULATED,
    FITTING_SAMPLES,
    FP8,
    KILLED_AT,
    LIVE_CLAUSES,
    LIVE_STEPS,
    RAMP_SIZES,
    SAVE_AT,
    SAVE_EVERY_STEPS,
    SHORT_AT,
    Case,
    Live,
    build_plan,
    cases,
    features_here,
    kernel_cases,
    refused,
)
from trainspec_cli.wings.certify.clauses import AS_THEY_MUST_BE, EXCHANGES, make_finding
from trainspec_cli.wings.certify.families import FAMILIES, SAMPLES
from trainspec_cli.wings.certify.runs import Measured, Run, Tensors, gradient_errors, loss_error, whole_error

Results = Mapping[Run, Measured]
Figures = dict[str, float | str]


@dataclass(frozen=True)
class ClauseCheck:
    """A clause to check on a case, and the runs that this requires."""

    clause: str
    run: Run

    @property
    def runs(self) -> tuple[Run, ...]:
        case = self.run.case
        if self.clause == "NUM-3":
            # Two single-process runs are needed: one in the case's format, which shows the error of the format itself,
            # and one in fp64.
            exact = Case(case.family, compute="fp64", micro_batch_size=case.micro_batch_size)
            return (self.run, Run(case.reference, losses=False), Run(exact, losses=False))
        if self.clause == "NUM-6":
            return (self.run, replace(self.run, repetition=1))
        if self.run.resume:
            return (self.run,)
        if case.live:
            return (self.run, replace(self.run, case=undisturbed(case), repetition=0))
        reference = Run(case.reference, gradients=not (case.ramp or self.clause == "KERN-2"))
        return (self.run, *([self.run.continues] if self.run.continues else []), reference)


def undisturbed(case: Case) -> Case:
    """Return the case that a live run is compared with: the same changes without the kill, or a run without changes."""
    assert case.live is not None
    killed = case.live.disturbance == "killed"
    return replace(case, live=Live(case.live.changes if killed else ()))


def checks(
    max_processes: int, only: Sequence[str] = (), *, on_gpu: bool = False, features: Collection[str] | None = None
) -> list[ClauseCheck]:
    """Return all checks of the matrix, or only those whose clause, case or family matches a pattern in `only`.

    `features`: the kernels and formats listed in a machine's certificate; None: those of this machine."""
    found = []
    given = features_here(on_gpu=on_gpu) if features is None else features
    for check in _all_checks(max_processes, given):
        names = (check.clause, check.run.name, check.run.case.family)
        is_wanted = not only or any(fnmatchcase(name, pattern) for name in names for pattern in only)
        case = check.run.case
        can_run = EMULATED not in given or not case.compile
        if is_wanted and can_run and case.layout.world_size <= max_processes:
            found.append(check)
    return found


def _all_checks(max_processes: int, features: Collection[str]) -> Iterator[ClauseCheck]:
    by_clause = cases(max_processes, with_fp8=FP8 in features)
    for clause, found in by_clause.items():
        for case in found:
            if clause == "COMM-3":
                yield ClauseCheck(clause, Run(case, gradients=False, resume=True))
                continue
            if clause in COMM_CLAUSES:
                yield ClauseCheck(clause, Run(case, losses=False, exchanges=EXCHANGES if clause == "COMM-2" else 1))
                continue
            trains = clause in ("NUM-1", "NUM-7", "NUM-8", *LIVE_CLAUSES)
            yield ClauseCheck(clause, Run(case, gradients=not case.ramp, losses=trains))
            if clause == "NUM-1":
                yield ClauseCheck("NUM-2", Run(case))
    for family in FAMILIES:
        legal = [case.layout for case in by_clause["NUM-1"] if case.family == family]
        for layout in (layout for layout in KEPT if layout in legal):
            case = Case(family, layout, optimizer="adamw")
            yield ClauseCheck("NUM-6", Run(case, gradients=False))
            yield ClauseCheck("CKPT-1", Run(case, gradients=False, resume=True))
        for before, after in ((b, a) for b, a in MOVES if b in legal and (a in legal or a == Layout())):
            source = Run(Case(family, before, optimizer="adamw"), gradients=False, resume=True)
            yield ClauseCheck("CKPT-2", Run(Case(family, after, optimizer="adamw"), gradients=False, continues=source))
    for case in kernel_cases(max_processes, features):
        yield ClauseCheck("KERN-1", Run(case, losses=False))
    for case in kernel_cases(max_processes, features, of_updates=True):
        yield ClauseCheck("KERN-2", Run(case, gradients=False))


KEPT = (Layout(dp_shard=2), Layout(tp=2), Layout(pp=2, pipeline_schedule="zbv"), Layout(dp_shard=2, ep=2))
"""Layouts whose runs are repeated, and in which a run is also stopped and resumed."""
MOVES = (
    (Layout(dp_shard=2), Layout(tp=2)),
    (Layout(tp=2), Layout(pp=2, pipeline_schedule="zbv")),
    (Layout(pp=2), Layout(dp_replicate=2)),
    (Layout(dp_replicate=2, dp_shard=2), Layout(tp=2, pp=2)),
    (Layout(tp=2, pp=2), Layout()),
    (Layout(dp_shard=2, ep=2), Layout()),
    (Layout(cp=2), Layout(dp_shard=2, ep=2)),
)
"""Pairs of layouts: a run saves in the first layout and continues in the second."""


def judge(check: ClauseCheck, results: Results) -> Finding:
    """Derive the finding of a check from the measurements of its runs."""
    return make_finding(check.clause, check.run.name, _figures(check, results))


def _figures(check: ClauseCheck, results: Results) -> Figures:
    clause = check.clause
    found = results[check.run]
    reference = results[check.runs[-1]]
    trained = found.result.trained
    if clause in LIVE_CLAUSES:
        # A live run must also meet conditions other than bounds on its errors or equal digests.
        case = check.run.case
        found, reference = (results[run] for run in check.runs)
        live = found.result.live
        assert live is not None, "live clauses are measured on runs of the trainer"
        each_once = tuple(tuple(range(first, first + SAMPLES)) for first in range(0, SAMPLES * LIVE_STEPS, SAMPLES))
        plan = build_plan(case, "cpu")
        facts = {"steps": len(found.losses) == LIVE_STEPS}
        if check.clause != "LIVE-4":
            facts["samples"] = found.result.trained.taken == each_once
        if check.clause in ("LIVE-1", "LIVE-2", "LIVE-3"):
            facts["layouts"] = live.layouts == planned_layouts(case)
        if check.clause in ("LIVE-1", "LIVE-2"):
            # A change must move state directly between processes, without writing it to disk.
            facts["disk"] = live.written_bytes == 0
        elif check.clause == "LIVE-3":
            # The second start must resume from the newest checkpoint.
            newest = (KILLED_AT // SAVE_EVERY_STEPS) * SAVE_EVERY_STEPS
            facts["starts"] = live.starts == (0, newest)
        elif check.clause == "LIVE-4":
            # A failed change must leave the layout unchanged.
            facts["starts"] = live.starts == (0,)
            facts["layouts"] = set(live.layouts) == {plan.layout}
        else:
            # From the out-of-memory step on, micro-batches must fit in memory, and no step may be lost.
            sizes = (plan.micro_batch_size,) * SHORT_AT + (FITTING_SAMPLES,) * (LIVE_STEPS - SHORT_AT)
            facts["starts"] = live.starts == ((0,) if case.layout.world_size == 1 else (0, SHORT_AT))
            facts["micro-batches"] = live.largest_micro_batches == sizes
        shown = {name: AS_THEY_MUST_BE if kept else "not as required" for name, kept in facts.items()}
        if check.clause in ("LIVE-3", "LIVE-4"):
            return {
                "sha256": found.result.trained.weights_sha256,
                "undisturbed": reference.result.trained.weights_sha256,
                "worst_loss_error": loss_error(found.losses, reference.losses),
                **shown,
            }
        gradient_error = whole_error(found.gradients, reference.gradients)
        return {**_training_figures(found, reference), "gradient_error": gradient_error, **shown}
    if clause in ("NUM-1", "NUM-4", "NUM-5", "KERN-1"):
        return worst_gradient(found.gradients, reference.gradients)
    if clause == "NUM-2":
        norms = [measured.result.trained.least_clipped_norm for measured in (found, reference)]
        least = min((0.0 if norm is None else norm) for norm in norms)
        return {"worst_loss_error": loss_error(found.losses, reference.losses), "least_clipped_norm": least}
    if clause == "NUM-3":
        _, own, exact = check.runs
        return format_figures(found.gradients, results[own].gradients, results[exact].gradients)
    if clause == "NUM-6":
        return {"sha256": trained.weights_sha256, "again": reference.result.trained.weights_sha256}
    if clause in ("CKPT-1", "COMM-3"):
        resumed = found.result.resumed
        return {
            "sha256": trained.weights_sha256,
            "resumed": resumed.weights_sha256 if resumed else "",
            "worst_loss_error": loss_error(found.resumed_losses, found.losses[SAVE_AT:]),
        }
    if clause == "CKPT-2":
        return {"worst_loss_error": loss_error(found.losses, reference.losses[SAVE_AT:])}
    if clause in ("COMM-1", "COMM-2"):
        # The error of a compressed block spreads over all of the block's parameters, so only the full gradient is
        # bounded.
        return {"gradient_error": whole_error(found.gradients, reference.gradients)}
    if clause == "NUM-7":
        # Gradients of small parameters (norms before a convolution) are sums whose terms cancel, so only the full
        # gradient is judged.
        gradient_error = whole_error(found.gradients, reference.gradients)
        return {"gradient_error": gradient_error, **_training_figures(found, reference)}
    figures = _training_figures(found, reference)
    if clause == "NUM-8":
        # Every sample must be used once, and the batch sizes must follow the ramp.
        in_order = [position for step in trained.taken for position in step] == list(range(sum(RAMP_SIZES)))
        once = in_order and tuple(map(len, trained.taken)) == RAMP_SIZES
        figures["samples"] = "each once" if once else "not each once"
    return figures


def worst_gradient(found: Tensors, reference: Tensors) -> Figures:
    errors = gradient_errors(found, reference)
    worst = max(errors, key=lambda name: errors[name])
    return {"worst_gradient_error": errors[worst], "parameter": worst}


def format_figures(found: Tensors, own: Tensors, exact: Tensors) -> Figures:
    """Find the parameter with the largest error relative to that of the number format itself, and return both
    errors."""
    ours = gradient_errors(found, exact)
    of_format = gradient_errors(own, exact)
    usual = sorted(of_format.values())[len(of_format) // 2]
    worst = max(ours, key=lambda name: ours[name] / max(of_format[name], usual))
    return {"parameter": worst, "error": ours[worst], "error_of_the_format": max(of_format[worst], usual)}


def _training_figures(found: Measured, reference: Measured) -> Figures:
    """Compare losses and weights with those of the reference run."""
    return {
        "worst_loss_error": loss_error(found.losses, reference.losses),
        "weight_error": whole_error(found.weights, reference.weights),
    }


def planned_layouts(case: Case) -> tuple[Layout, ...]:
    """Return the planned layout of each step."""
    plan = build_plan(case, "cpu")
    layouts = [(0, plan.layout), *((change.step, change.layout) for change in plan.changes)]
    return tuple(next(layout for first, layout in reversed(layouts) if first <= step) for step in range(LIVE_STEPS))


def judge_refusals(max_processes: int) -> list[Finding]:
    """Return the findings for LEGAL-1: each illegal layout in the matrix must be rejected with a reason and a hint."""
    found = []
    for name, problems in refused(max_processes).items():
        shown = next((one for one in problems if not (one.message and one.hint)), problems[0])
        found.append(make_finding(REFUSALS, name, {"reason": shown.message, "hint": shown.hint}))
    return found
