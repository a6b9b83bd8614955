"""Hold another engine's answers against the clauses: the same bounds and the same reference as for trainspec's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainspec_cli.certify.cases import SAVE_AT
from trainspec_cli.certify.engine.cases import EngineCheck, ProtocolRun
from trainspec_cli.certify.engine.exchange import Answered
from trainspec_cli.certify.engine.model import EXACT, OWN_BF16, REFERENCE, to_hugging_face
from trainspec_cli.certify.judge import format_figures
from trainspec_cli.certify.runs import Measured, Run, gradient_errors, loss_error
from trainspec_cli.certify.standing import stand
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
    return stand(check.clause, check.run.name, _figures(check, answers, own), of_engine=True)


def _figures(check: EngineCheck, answers: Mapping[ProtocolRun, Answered], own: References) -> dict[str, float | str]:
    found = answers[check.run]
    if check.clause in ("NUM-1", "NUM-4", "NUM-5"):
        errors = gradient_errors(found, own.gradients)
        worst = max(errors, key=lambda name: errors[name])
        return {"worst_gradient_error": errors[worst], "parameter": worst}
    if check.clause == "NUM-2":
        return {"worst_loss_error": loss_error(found.losses, own.losses)}
    if check.clause == "NUM-3":
        return format_figures(found, own.own_bf16, own.exact)
    assert check.beside is not None, "the others compare the engine with itself"
    beside = answers[check.beside]
    others = beside.losses[SAVE_AT:] if check.run.resumes else beside.losses
    error = loss_error(found.losses, others)
    if check.clause == "CKPT-2":
        return {"worst_loss_error": error}
    digests = [weights_sha256(one.weights) for one in (found, beside)]
    return {"sha256": digests[0], "beside": digests[1], "worst_loss_error": error}


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the tensors in name order, each as its name and its little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}\n".encode() + weights[name].astype("<f4", copy=False).tobytes())
    return digest.hexdigest()
