"""Clause by clause: which runs it needs, what they measured, and whether that keeps the clause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from trainspec_cli.certify.cases import CLIP_NORM, COMM_CLAUSES, LIVE_CLAUSES, RAMP_SIZES, SAVE_AT, Case, cases, refused
from trainspec_cli.certify.families import FAMILIES
from trainspec_cli.certify.judge_live import LIVE_JUDGES, beside
from trainspec_cli.certify.kernel_cases import kernel_cases, update_cases
from trainspec_cli.certify.runs import Measured, Run, gradient_errors, loss_error, whole_error
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.certificate import REFUSALS, Finding

GRADIENT_BOUND = 1e-5
LOSS_BOUND = 1e-5
WHOLE_GRADIENT_BOUND = 1e-6
WEIGHT_BOUND = 1e-4
"""Bounds of NUM-7 and NUM-8 on all parameters together."""
FORMAT_FACTOR = 2.0
"""Bound of NUM-3, as a multiple of the format's own error."""
EXCHANGE_BOUNDS = {"bf16": 4e-3, "int8": 2e-2, "int4": 2e-1}
"""Bounds of COMM-1 on all parameters together, by the format."""
EXCHANGES, WAITING = 64, 8
"""The exchanges of COMM-2, and the exchanges whose losses may still wait after them."""

Results = Mapping[Run, Measured]


@dataclass(frozen=True)
class ClauseCheck:
    """A clause on a case, and the runs that it takes."""

    clause: str
    run: Run

    @property
    def runs(self) -> tuple[Run, ...]:
        if self.clause == "NUM-3":
            return (self.run, _own_format(self.run.case), _in_fp64(self.run.case))
        if self.clause == "NUM-6":
            return (self.run, replace(self.run, take=1))
        if self.run.resume:
            return (self.run,)
        if self.run.case.live:
            return (self.run, replace(self.run, case=beside(self.run.case), take=0))
        reference = Run(self.run.case.reference, gradients=not (self.run.case.ramp or self.clause == "KERN-2"))
        return (self.run, *([self.run.continues] if self.run.continues else []), reference)


def checks(max_processes: int, only: Sequence[str] = (), *, on_gpu: bool = False) -> list[ClauseCheck]:
    """Return the checks of the matrix, or those whose clause or case is named by a pattern of `only`."""
    wanted = [
        check
        for check in _all_checks(max_processes, on_gpu=on_gpu)
        if check.run.case.layout.world_size <= max_processes
    ]
    return [check for check in wanted if not only or any(_named(check, pattern) for pattern in only)]


def _named(check: ClauseCheck, pattern: str) -> bool:
    return any(fnmatchcase(text, pattern) for text in (check.clause, check.run.name, check.run.case.family))


def _all_checks(max_processes: int, *, on_gpu: bool) -> Iterator[ClauseCheck]:
    by_clause = cases(max_processes)
    for clause, found in by_clause.items():
        for case in found:
            if clause in COMM_CLAUSES:
                yield ClauseCheck(clause, _compressed_run(clause, case))
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
    for case in kernel_cases(max_processes, on_gpu=on_gpu):
        yield ClauseCheck("KERN-1", Run(case, losses=False))
    for case in update_cases(max_processes, on_gpu=on_gpu):
        yield ClauseCheck("KERN-2", Run(case, gradients=False))


KEPT = (Layout(dp_shard=2), Layout(tp=2), Layout(pp=2, pipeline_schedule="zbv"), Layout(dp_shard=2, ep=2))
"""Repeated, and stopped and resumed."""
MOVES = (
    (Layout(dp_shard=2), Layout(tp=2)),
    (Layout(tp=2), Layout(pp=2, pipeline_schedule="zbv")),
    (Layout(pp=2), Layout(dp_replicate=2)),
    (Layout(dp_replicate=2, dp_shard=2), Layout(tp=2, pp=2)),
    (Layout(tp=2, pp=2), Layout()),
    (Layout(dp_shard=2, ep=2), Layout()),
    (Layout(cp=2), Layout(dp_shard=2, ep=2)),
)
"""Saved in the first layout, continued in the second."""


def _compressed_run(clause: str, case: Case) -> Run:
    if clause == "COMM-3":
        return Run(case, gradients=False, resume=True)
    return Run(case, losses=False, exchanges=EXCHANGES if clause == "COMM-2" else 1)


def _in_fp64(case: Case) -> Run:
    return Run(Case(case.family, compute="fp64", micro_batch_size=case.micro_batch_size), losses=False)


def _own_format(case: Case) -> Run:
    """Return the run that shows what the format costs one process."""
    return Run(case.reference, losses=False)


def judge(check: ClauseCheck, results: Results) -> Finding:
    return _JUDGES[check.clause](check, results)


def _judge_gradients(check: ClauseCheck, results: Results) -> Finding:
    errors = gradient_errors(results[check.run], results[Run(check.run.case.reference)])
    worst = max(errors, key=lambda name: errors[name])
    figures: dict[str, float | str] = {"worst_gradient_error": errors[worst], "parameter": worst}
    return _finding(check, errors[worst], GRADIENT_BOUND, figures)


def _judge_losses(check: ClauseCheck, results: Results) -> Finding:
    """Clipping counts where it bound in each step: what is clipped by the norm of a part differs from there on."""
    found, reference = results[check.run], results[Run(check.run.case.reference)]
    error = loss_error(found.losses, reference.losses)
    norms = [measured.result.trained.least_clipped_norm for measured in (found, reference)]
    least = min((0.0 if norm is None else norm) for norm in norms)
    finding = _finding(check, error, LOSS_BOUND, {"worst_loss_error": error, "least_clipped_norm": least})
    return replace(finding, passed=finding.passed and least > CLIP_NORM)


def _judge_format(check: ClauseCheck, results: Results) -> Finding:
    """The worst ratio of a parameter's error to what the format itself costs it."""
    exact = results[_in_fp64(check.run.case)]
    ours, own = (gradient_errors(results[run], exact) for run in (check.run, _own_format(check.run.case)))
    usual = sorted(own.values())[len(own) // 2]
    ratios = {name: error / max(own[name], usual) for name, error in ours.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    figures: dict[str, float | str] = {
        "worst_ratio": ratios[worst],
        "parameter": worst,
        "error": ours[worst],
        "error_of_the_format": max(own[worst], usual),
    }
    return _finding(check, ratios[worst], FORMAT_FACTOR, figures)


def _judge_shares(check: ClauseCheck, results: Results) -> Finding:
    """The sums of a few parameters, such as norms before a convolution, cancel: the whole gradient is judged."""
    found, reference = results[check.run], results[check.runs[-1]]
    gradient_error = whole_error(found.gradients, reference.gradients)
    return _judge_training(check, results, {"gradient_error": (gradient_error, WHOLE_GRADIENT_BOUND)})


def _judge_ramp(check: ClauseCheck, results: Results) -> Finding:
    """Every sample is taken once, in steps of the sizes that the ramp has."""
    finding, steps = _judge_training(check, results, {}), results[check.run].result.trained.taken
    in_order = [position for step in steps for position in step] == list(range(sum(RAMP_SIZES)))
    once = in_order and tuple(map(len, steps)) == RAMP_SIZES
    figures = finding.figures | {"samples": "each once" if once else "not each once"}
    return replace(finding, passed=finding.passed and once, figures=figures)


def _judge_exchanges(check: ClauseCheck, results: Results) -> Finding:
    """The whole gradient is judged: what a block loses is spread over the parameters in it."""
    found, reference = (results[run].gradients for run in check.runs)
    bound = EXCHANGE_BOUNDS[check.run.case.gradients] * min(1.0, WAITING / check.run.exchanges)
    error = whole_error(found, reference)
    return _finding(check, error / bound, 1.0, {"worst_of_bound": error / bound, "gradient_error": error})


def _judge_training(check: ClauseCheck, results: Results, errors: dict[str, tuple[float, float]]) -> Finding:
    """Hold losses and weights, and `errors` with their bounds, against the reference's."""
    found, reference = results[check.run], results[check.runs[-1]]
    errors = errors | {
        "worst_loss_error": (loss_error(found.losses, reference.losses), LOSS_BOUND),
        "weight_error": (whole_error(found.weights, reference.weights), WEIGHT_BOUND),
    }
    worst = max(error / bound for error, bound in errors.values())
    figures: dict[str, float | str] = {"worst_of_bound": worst}
    figures |= {name: error for name, (error, _) in errors.items()}
    return _finding(check, worst, 1.0, figures)


def _judge_repetition(check: ClauseCheck, results: Results) -> Finding:
    first, second = (results[run].result.trained.weights_sha256 for run in check.runs)
    return Finding(check.clause, check.run.name, first == second, {"sha256": first, "again": second})


def _judge_resume(check: ClauseCheck, results: Results) -> Finding:
    measured = results[check.run]
    trained, resumed = measured.result.trained, measured.result.resumed
    again_sha256 = resumed.weights_sha256 if resumed else ""
    whole = measured.losses[SAVE_AT:]
    figures: dict[str, float | str] = {
        "sha256": trained.weights_sha256,
        "resumed": again_sha256,
        "worst_loss_error": loss_error(measured.resumed_losses, whole),
    }
    kept = trained.weights_sha256 == again_sha256 and measured.resumed_losses == whole
    return Finding(check.clause, check.run.name, kept, figures)


def _judge_move(check: ClauseCheck, results: Results) -> Finding:
    alone = results[Run(check.run.case.reference)].losses
    error = loss_error(results[check.run].losses, alone[SAVE_AT:])
    return _finding(check, error, LOSS_BOUND, {"worst_loss_error": error})


def _judge_live(check: ClauseCheck, results: Results) -> Finding:
    case, (found, reference) = check.run.case, (results[run] for run in check.runs)
    kept = LIVE_JUDGES[check.clause](case, found, reference)
    return Finding(check.clause, check.run.name, kept.passed, kept.figures, kept.bound)


_JUDGES: dict[str, Callable[[ClauseCheck, Results], Finding]] = {
    "NUM-1": _judge_gradients,
    "NUM-2": _judge_losses,
    "NUM-3": _judge_format,
    "NUM-4": _judge_gradients,
    "NUM-5": _judge_gradients,
    "NUM-6": _judge_repetition,
    "NUM-7": _judge_shares,
    "NUM-8": _judge_ramp,
    "COMM-1": _judge_exchanges,
    "COMM-2": _judge_exchanges,
    "COMM-3": _judge_resume,
    "KERN-1": _judge_gradients,
    "KERN-2": partial(_judge_training, errors={}),
    "CKPT-1": _judge_resume,
    "CKPT-2": _judge_move,
    **dict.fromkeys(LIVE_CLAUSES, _judge_live),
}


def _finding(check: ClauseCheck, error: float, bound: float, figures: Mapping[str, float | str]) -> Finding:
    passed = math.isfinite(error) and error <= bound
    return Finding(check.clause, check.run.name, passed, dict(figures), bound)


def judge_refusals(max_processes: int) -> list[Finding]:
    """LEGAL-1: every layout of the matrix either runs (above) or is refused with a reason and what to type."""
    return [
        Finding(REFUSALS, name, all(p.message and p.hint for p in problems), {"reason": problems[0].message})
        for name, problems in refused(max_processes).items()
    ]
