"""Hold another engine's answers against the clauses: the same bounds and the same reference as for trainspec's own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainspec_cli.certify.cases import SAVE_AT
from trainspec_cli.certify.engine.cases import EngineCheck, ProtocolRun
from trainspec_cli.certify.engine.exchange import Answered
from trainspec_cli.certify.engine.model import EXACT, OWN_BF16, REFERENCE, to_hugging_face
from trainspec_cli.certify.judge import FORMAT_FACTOR, GRADIENT_BOUND, LOSS_BOUND
from trainspec_cli.certify.runs import Measured, Run, gradient_errors, loss_error
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.results.certificate import Finding, NotOffered


@dataclass(frozen=True)
class Gradients:
    gradients: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class References:
    """The runs of trainspec's own engine, in Hugging Face's names."""

    gradients: Gradients
    losses: list[float]
    own_bf16: Gradients
    exact: Gradients


def references(results: Mapping[Run, Measured], model: DecoderModel) -> References:
    def gradients(run: Run) -> Gradients:
        return Gradients(to_hugging_face(results[run].gradients, model))

    return References(gradients(REFERENCE), results[REFERENCE].losses, gradients(OWN_BF16), gradients(EXACT))


def judge_answers(check: EngineCheck, answers: Mapping[ProtocolRun, Answered], own: References) -> Finding | NotOffered:
    """Return what was found; what the engine has declined is no finding, whatever else was."""
    declined = [answers[run].declined for run in check.runs if answers[run].declined]
    if declined:
        return NotOffered(check.clause, check.run.name, declined[0])
    found = answers[check.run]
    if check.clause in ("NUM-1", "NUM-4", "NUM-5"):
        return _gradients(check, found, own.gradients)
    if check.clause == "NUM-2":
        return _bounded(check, "worst_loss_error", loss_error(found.losses, own.losses), LOSS_BOUND)
    if check.clause == "NUM-3":
        return _format(check, found, own)
    assert check.beside is not None, "the others hold the engine against itself"
    return _itself(check, found, answers[check.beside])


def _gradients(check: EngineCheck, found: Answered, reference: Gradients) -> Finding:
    errors = gradient_errors(found, reference)
    worst = max(errors, key=lambda name: errors[name])
    return _bounded(check, "worst_gradient_error", errors[worst], GRADIENT_BOUND, {"parameter": worst})


def _format(check: EngineCheck, found: Answered, own: References) -> Finding:
    """The worst ratio of a parameter's error to what the format itself costs it."""
    ours, usual_errors = (gradient_errors(one, own.exact) for one in (found, own.own_bf16))
    usual = sorted(usual_errors.values())[len(usual_errors) // 2]
    ratios = {name: error / max(usual_errors[name], usual) for name, error in ours.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    return _bounded(check, "worst_ratio", ratios[worst], FORMAT_FACTOR, {"parameter": worst})


def _itself(check: EngineCheck, found: Answered, beside: Answered) -> Finding:
    """NUM-6 and CKPT-1: to the bit; CKPT-2: within the bound of losses."""
    others = beside.losses[SAVE_AT:] if check.run.resumes else beside.losses
    error = loss_error(found.losses, others)
    if check.clause == "CKPT-2":
        return _bounded(check, "worst_loss_error", error, LOSS_BOUND)
    digests = [weights_sha256(one.weights) for one in (found, beside)]
    figures: dict[str, float | str] = {"sha256": digests[0], "beside": digests[1], "worst_loss_error": error}
    return Finding(check.clause, check.run.name, digests[0] == digests[1] and found.losses == others, figures)


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the tensors in name order, each as its name and its little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\n".encode() + weights[name].astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def _bounded(
    check: EngineCheck, figure: str, error: float, bound: float, more: Mapping[str, float | str] | None = None
) -> Finding:
    passed = math.isfinite(error) and error <= bound
    return Finding(check.clause, check.run.name, passed, {figure: error, **(more or {})}, bound)
