"""Choose the backend of an operation: correct, and clearly faster than torch's default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, quantiles

from trainspec_cli.recipe.json_text import finite_or_none
from trainspec_cli.recipe.keys.kernels import TORCH, KernelFigure, KernelTrial, KernelTrials

MARGIN = 0.03
"""A backend must be faster by this fraction; less is within the measurement's noise."""


def judge(ranks: Sequence[KernelTrials]) -> dict[str, dict[str, KernelFigure]]:
    """Turn the processes' trials into a verdict per operation and backend.

    Processes need not use the same operations (stages of a pipeline): those that do decide.
    """
    ops = dict.fromkeys(op for rank in ranks for op in rank.trials)
    return {op: judge_operation([rank.trials[op] for rank in ranks if op in rank.trials]) for op in ops}


def judge_operation(ranks: Sequence[dict[str, KernelTrial]]) -> dict[str, KernelFigure]:
    figures = {backend: _judge(backend, [rank[backend] for rank in ranks]) for backend in ranks[0]}
    chosen = {backend: figure for backend, figure in figures.items() if figure.verdict == "chosen"}
    faster = {backend: figure.ratio for backend, figure in chosen.items() if figure.ratio}
    best = min(faster, key=lambda backend: faster[backend], default=TORCH)
    beaten = {backend for backend in faster if backend != best}
    return {
        backend: replace(figure, verdict="not faster", reason=best) if backend in beaten else figure
        for backend, figure in figures.items()
    }


def _judge(backend: str, trials: Sequence[KernelTrial]) -> KernelFigure:
    for trial in trials:
        if trial.untried:
            return KernelFigure("not tried", trial.untried)
        if trial.failure:
            return KernelFigure("failed", trial.failure)
    error = max(math.inf if trial.error is None else trial.error for trial in trials)
    allowed = min(trial.allowed_error or 0.0 for trial in trials)
    if not error <= allowed:  # also if it is NaN
        reason = f"its error against fp64 is {error:.2g}; {allowed:.2g} is allowed for the format"
        return KernelFigure("wrong", reason, error=finite_or_none(error), allowed_error=allowed)
    ratios = [ratio for trial in trials for ratio in trial.ratios]
    ratio, spread = median(ratios), quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    quartiles = (spread[0], spread[2])
    if backend == TORCH:
        return KernelFigure("default", "", ratio, quartiles, error, allowed)
    if ratio > 1 - MARGIN or quartiles[1] >= 1:
        return KernelFigure("not faster", TORCH, ratio, quartiles, error, allowed)
    return KernelFigure("chosen", "", ratio, quartiles, error, allowed)
