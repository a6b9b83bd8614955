"""How the clauses judge the answers of another engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.data.huggingface.safetensors import parameters
from trainspec_cli.recipe.results.certificate import Finding, NotOffered
from trainspec_cli.wings.certify.families import PLAIN_DECODER
from trainspec_cli.wings.certify.other_engine import (
    SCHEMA,
    Answered,
    EngineAnswer,
    EngineCheck,
    ProtocolRun,
    References,
    engine_checks,
    judge_answers,
    to_hugging_face,
    weights_sha256,
)

A, B = np.linspace(1, 2, 6, dtype=np.float32), np.linspace(3, 4, 4, dtype=np.float32)
LOSSES = [5.0 - step / 10 for step in range(20)]
OWN = References(
    {"a": A, "b": B},
    LOSSES,
    {"a": A * 1.01, "b": B * 1.01},
    {"a": A, "b": B},
)
TRAINED = ProtocolRun(asks=("gradients", "losses"))
WHOLE = ProtocolRun(optimizer="adamw", asks=("losses", "weights"), saves=True)
RESUMED = replace(WHOLE, saves=False, resumes=WHOLE)


class Given(Answered):
    """An answer whose tensors are in memory."""

    def __init__(self, scale: float = 1.0, losses: list[float] = LOSSES, declined: str = ""):
        super().__init__(Path(), EngineAnswer(SCHEMA, declined, tuple(losses)), {})
        self.__dict__["gradients"] = self.__dict__["weights"] = {"a": A * np.float32(scale), "b": B}


def judged(clause: str, run: ProtocolRun, found: Given, baseline: tuple[ProtocolRun, Given] | None = None) -> Finding:
    check = EngineCheck(clause, run, baseline[0] if baseline else None)
    finding = judge_answers(check, {run: found, **(dict([baseline]) if baseline else {})}, OWN)
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.parametrize("clause", ["NUM-1", "NUM-4", "NUM-5"])
def test_gradients_within_the_bound_are_kept(clause: str) -> None:
    assert judged(clause, TRAINED, Given(1 + 5e-6)).passed
    broken = judged(clause, TRAINED, Given(1 + 5e-5))
    assert not broken.passed and broken.bound == 1e-5
    assert broken.figures["parameter"] == "a" and broken.measured == pytest.approx(5e-5, rel=0.01)


def test_losses_of_every_step_count() -> None:
    assert judged("NUM-2", TRAINED, Given()).passed
    assert not judged("NUM-2", TRAINED, Given(losses=[*LOSSES[:-1], LOSSES[-1] * 1.0001])).passed


def test_an_error_may_be_twice_that_of_the_format() -> None:
    run = ProtocolRun(compute="bf16")
    assert judged("NUM-3", run, Given(1.019)).measured == pytest.approx(1.9, rel=0.01)
    assert not judged("NUM-3", run, Given(1.021)).passed


def test_repeated_and_resumed_runs_must_match_to_the_bit() -> None:
    again = replace(WHOLE, repetition=1)
    assert judged("NUM-6", again, Given(), (WHOLE, Given())).passed
    assert not judged("NUM-6", again, Given(1 + 2e-7), (WHOLE, Given())).passed
    assert judged("CKPT-1", RESUMED, Given(losses=LOSSES[10:]), (WHOLE, Given())).passed
    other = [LOSSES[10] * (1 + 1e-15), *LOSSES[11:]]
    assert other != LOSSES[10:]
    assert not judged("CKPT-1", RESUMED, Given(losses=other), (WHOLE, Given())).passed


def test_a_checkpoint_of_another_layout_must_give_the_same_losses() -> None:
    near = [loss * (1 + 1e-6) for loss in LOSSES[10:]]
    assert judged("CKPT-2", RESUMED, Given(3.0, near), (WHOLE, Given())).passed
    assert not judged("CKPT-2", RESUMED, Given(losses=LOSSES[:10]), (WHOLE, Given())).passed


def test_a_declined_run_is_neither_kept_nor_broken() -> None:
    check = EngineCheck("CKPT-1", RESUMED, WHOLE)
    outcome = judge_answers(check, {WHOLE: Given(), RESUMED: Given(declined="it cannot resume")}, OWN)
    assert outcome == NotOffered("CKPT-1", RESUMED.name, "it cannot resume")


def test_the_clauses_of_another_engine() -> None:
    clauses = {check.clause for check in engine_checks(2)}
    assert clauses == {"NUM-1", "NUM-2", "NUM-3", "NUM-4", "NUM-5", "NUM-6", "CKPT-1", "CKPT-2"}


def test_a_digest_depends_on_names_and_bits() -> None:
    assert weights_sha256({"a": A, "b": B}) == weights_sha256({"b": B, "a": A.copy()})
    assert len({weights_sha256({"a": A}), weights_sha256({"b": A}), weights_sha256({"a": -A})}) == 3


def test_parameters_have_hugging_faces_names_and_shapes() -> None:
    model = PLAIN_DECODER
    arrays = {one.name: np.zeros(one.shape, np.float32) for one in parameters(model)}
    found = to_hugging_face(arrays, model)
    assert found["model.layers.3.mlp.down_proj.weight"].shape == (64, 128)
    assert found["model.embed_tokens.weight"].shape == (256, 64) and len(found) == len(arrays)
