"""The clauses of SPEC.md, and the certificates of findings."""

from __future__ import annotations

import json
import math

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.wings.certify.cases import refused
from trainspec_cli.wings.certify.certificate import digest, verify, write_certificate
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, read_clauses, spec_version
from trainspec_cli.wings.certify.judge import checks, judge_refusals

MACHINE = Machine("box", 2, 2**34)
GOOD = Finding("NUM-1", "dense-fp32-tp2", True, {"worst_gradient_error": 5e-7, "parameter": "embed.weight"}, 1e-5)
BAD = Finding("NUM-1", "dense-fp32-pp2", False, {"worst_gradient_error": math.inf, "parameter": "norm.weight"}, 1e-5)


def test_the_document_defines_the_clauses():
    clauses = read_clauses()
    assert spec_version() == "1.0"
    assert list(clauses)[:2] == ["NUM-1", "NUM-2"]
    assert clauses["NUM-1"].level == "MUST"
    assert clauses["LEGAL-1"].level == "SHOULD"
    assert {check.clause for check in checks(8)} == set(clauses) - {"LEGAL-1", *SECURITY, *LEVELS}, (
        "every clause is measured"
    )


@pytest.mark.clause("LEGAL-1")
def test_every_refusal_of_a_layout_has_a_reason_and_a_hint():
    reasons = refused(4)
    assert "dense-fp32-dp_shard2.ep2" in reasons
    assert "has no experts" in reasons["dense-fp32-dp_shard2.ep2"][0].message
    assert all(finding.passed for finding in judge_refusals(4))


def verdict(findings):
    return write_certificate(findings, MACHINE, date="2026-01-01").verdict


def test_a_broken_must_breaks_the_verdict():
    should = Finding("LEGAL-1", "x", False)
    assert [verdict(found) for found in ([], [GOOD], [GOOD, should])] == ["kept"] * 3
    assert verdict([should, GOOD, BAD]) == "broken"


def refusal_code(file) -> str:
    with pytest.raises(RecipeError) as error:
        verify(file)
    return error.value.problems[0].code


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["findings"][1].update(passed=True),
        lambda body: body["findings"][0]["figures"].update(worst_gradient_error=1e-9),
        lambda body: body.update(verdict="kept"),
        lambda body: body.pop("digest"),
        lambda body: body.update(schema="trainspec.certificate/9"),
    ],
)
def test_an_altered_certificate_is_refused(tmp_path, change):
    file = tmp_path / "certificate.json"
    read = write_certificate([GOOD, BAD], MACHINE, date="2026-01-01")
    body = to_plain(read)
    file.write_text(json.dumps(body))
    assert verify(file) == read and to_plain(read) == json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))
    assert refusal_code(file) == "bad_certificate"


def test_a_clause_is_summarised_by_its_worst_case():
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
    assert body["schema"] == "trainspec.certificate/3" and body["versions"]["torch"]
    assert body["machine"] == to_plain(MACHINE) and len(body["spec_sha256"]) == 64
    assert body["digest"] == digest(body) == digest({key: body[key] for key in body if key != "digest"})
    assert digest(body | {"whole": True}) != body["digest"]


def test_a_file_of_another_kind_is_refused(tmp_path):
    for name, content in (("none.json", None), ("text.json", "hello"), ("list.json", "[]")):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert refusal_code(tmp_path / name) == "bad_certificate"


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
def test_damaged_fields_are_refused_even_under_a_valid_digest(tmp_path, change):
    body = to_plain(write_certificate([GOOD, BAD], MACHINE, date="2026-01-01"))
    change(body)
    body["digest"] = digest(body)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(body))
    assert refusal_code(file) == "bad_certificate"
