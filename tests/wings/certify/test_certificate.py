"""The document, and a certificate that cannot be altered unnoticed."""

from __future__ import annotations

import json
import math

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.recipe.results.tools import CertifyRunResult, TrainedSteps
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.wings.certify import runs
from trainspec_cli.wings.certify.cases import Case, cases, refused
from trainspec_cli.wings.certify.certificate import digest, verify, write_certificate
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, read_clauses, spec_version
from trainspec_cli.wings.certify.families import FAMILIES
from trainspec_cli.wings.certify.judge import checks, judge_refusals
from trainspec_cli.wings.certify.runs import gradient_errors, loss_error

MACHINE = Machine("box", 2, 2**34)
GOOD = Finding("NUM-1", "dense-fp32-tp2", True, {"worst_gradient_error": 5e-7, "parameter": "embed.weight"}, 1e-5)
BAD = Finding("NUM-1", "dense-fp32-pp2", False, {"worst_gradient_error": math.inf, "parameter": "norm.weight"}, 1e-5)


def test_the_document_is_where_clauses_are_defined():
    clauses = read_clauses()
    assert spec_version() == "1.0"
    assert list(clauses)[:2] == ["NUM-1", "NUM-2"]
    assert clauses["NUM-1"].level == "MUST"
    assert clauses["LEGAL-1"].level == "SHOULD"
    assert {check.clause for check in checks(8)} == set(clauses) - {"LEGAL-1", *SECURITY, *LEVELS}, (
        "every clause is measured"
    )


def test_every_axis_manner_and_family_is_in_the_matrix():
    found = [case for of_clause in cases(8).values() for case in of_clause]
    assert {case.family for case in found} == set(FAMILIES)
    assert {case.layout.pipeline_schedule for case in found} == {"gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"}
    assert {case.layout.context_method for case in found} == {"ring", "ulysses"}
    assert {case.layout.ep for case in found} == {1, 2, 4, 8}
    assert max(case.layout.world_size for case in found) == 8
    assert {case.recompute for case in found} == {"none", "selective", "full"}
    assert {case.compute for case in found} == {"fp32", "bf16", "fp8"}
    assert {case.family for case in found if case.unequal_shares} == set(FAMILIES)
    assert {case.family for case in found if case.ramp} == set(FAMILIES)


@pytest.mark.clause("LEGAL-1")
def test_what_is_refused_says_why_and_what_to_type():
    reasons = refused(4)
    assert "dense-fp32-dp_shard2.ep2" in reasons
    assert "has no experts" in reasons["dense-fp32-dp_shard2.ep2"][0].message
    assert all(finding.passed for finding in judge_refusals(4))


def verdict(findings):
    return write_certificate(findings, MACHINE, date="2026-01-01").verdict


def test_a_broken_must_breaks_the_verdict():
    assert verdict([GOOD]) == "kept"
    assert verdict([GOOD, BAD]) == "broken"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["findings"][1].update(passed=True), "was altered"),
        (lambda body: body["findings"][0]["figures"].update(worst_gradient_error=1e-9), "was altered"),
        (lambda body: body.update(verdict="kept"), "was altered"),
        (lambda body: body.pop("digest"), "is no certificate"),
        (lambda body: body.update(schema="trainspec.certificate/9"), "of the schema trainspec.certificate/9"),
    ],
)
def test_an_altered_certificate_is_refused(tmp_path, change, words):
    file = tmp_path / "certificate.json"
    read = write_certificate([GOOD, BAD], MACHINE, date="2026-01-01")
    body = to_plain(read)
    file.write_text(json.dumps(body))
    assert verify(file) == read and to_plain(read) == json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    with pytest.raises(RecipeError, match=words):
        verify(file)


def test_a_certificate_tells_what_was_measured():
    body = to_plain(write_certificate([GOOD, BAD], MACHINE, date="2026-01-01"))
    (first, *_) = body["clauses"]
    assert (first["cases"], first["failed"], first["worst"], first["worst_case"]) == (2, 1, "inf", "dense-fp32-pp2")
    assert body["versions"]["torch"]


class Told:
    def __init__(self, gradients):
        self.gradients = gradients


def test_missing_and_misshapen_gradients_are_infinitely_wrong():
    import numpy as np

    reference = Told({"a": np.ones(4), "b": np.ones(2), "c": np.zeros(2)})
    errors = gradient_errors(
        Told({"a": np.full(4, 1.1), "b": np.ones(3), "c": np.zeros(2), "d": np.ones(1)}), reference
    )
    assert errors["a"] == pytest.approx(0.1)
    assert errors["b"] == errors["d"] == math.inf
    assert errors["c"] == 0


def test_a_loss_that_is_missing_or_not_finite_is_infinitely_wrong():
    assert loss_error([1.0, 2.0], [1.0, 2.1]) == pytest.approx(0.1 / 2.1)
    assert loss_error([1.0], [1.0, 2.0]) == loss_error([math.nan], [1.0]) == math.inf


def test_names_of_cases_tell_them_apart():
    names = [check.clause + check.run.name for check in checks(8)]
    assert len(names) == len(set(names))
    assert (
        Case("dense", Layout(tp=2, pp=2, pipeline_schedule="zbv"), recompute="full").name
        == "dense-fp32-tp2.pp2.zbv-full"
    )


def test_a_loss_that_was_not_finite_is_null_in_the_result(tmp_path):
    trained, resumed = TrainedSteps((1.0, math.nan), None, ""), TrainedSteps((math.inf,), None, "")
    write_json(tmp_path / "result.json", to_plain(CertifyRunResult(trained, resumed)))
    measured = runs.Measured(tmp_path)
    assert loss_error(measured.losses, [1.0, 2.0]) == loss_error(measured.resumed_losses, [1.0]) == math.inf


def test_a_clause_is_summed_up_by_its_worst_case():
    refused = Finding("LEGAL-1", "moe-fp32-tp2", False, {"reason": "why"})
    body = to_plain(write_certificate([BAD, GOOD, refused], MACHINE, date="2026-01-01"))
    by_id = {clause["id"]: clause for clause in body["clauses"]}
    assert list(by_id) == list(read_clauses())
    about = {"id": "NUM-1", "level": "MUST", "title": read_clauses()["NUM-1"].title}
    assert by_id["NUM-1"] == about | {
        "cases": 2, "failed": 1, "worst": "inf", "bound": 1e-5, "worst_case": "dense-fp32-pp2", "grade": "",
    }  # fmt: skip
    assert (by_id["LEGAL-1"]["worst"], by_id["LEGAL-1"]["bound"], by_id["LEGAL-1"]["failed"]) == (1.0, None, 1)
    unmeasured = by_id["NUM-2"]
    assert [unmeasured[key] for key in ("cases", "failed", "worst", "bound", "worst_case")] == [0, 0, None, None, None]
    assert (body["whole"], body["date"], body["verdict"], body["spec_version"]) == (
        False,
        "2026-01-01",
        "broken",
        "1.0",
    )
    assert body["findings"][0]["figures"]["worst_gradient_error"] == "inf"
    assert body["machine"] == to_plain(MACHINE) and len(body["spec_sha256"]) == len(body["digest"]) == 64


def test_a_should_that_is_broken_leaves_the_verdict():
    assert verdict([GOOD, Finding("LEGAL-1", "x", False)]) == "kept"
    assert verdict([]) == "kept"


def test_a_file_of_another_kind_is_no_certificate(tmp_path):
    for name, content in (("none.json", None), ("text.json", "hello"), ("list.json", "[]")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(RecipeError, match="is no certificate"):
            verify(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("findings"),
        lambda body: body["clauses"].append(7),
        lambda body: body["clauses"][0].update(cases="2"),
        lambda body: body["findings"][0].pop("passed"),
        lambda body: body["machine"].update(gpu_names="H200"),
        lambda body: body["machine"].pop("cpu_cores"),
        lambda body: body["clauses"][0].update(worst=None),
        lambda body: body["clauses"][0].update(worst="big"),
    ],
)
def test_what_cannot_be_printed_is_refused_whoever_signed_it(tmp_path, change):
    body = to_plain(write_certificate([GOOD, BAD], MACHINE, date="2026-01-01"))
    change(body)
    body["digest"] = digest(body)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(body))
    with pytest.raises(RecipeError) as error:
        verify(file)
    assert "was altered" not in str(error.value)
