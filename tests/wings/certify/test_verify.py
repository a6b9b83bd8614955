"""Verification of certificates: which are accepted, and why others are refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.keys import make_key

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Certificate, Figure, Finding, NotOffered
from trainspec_cli.wings.certify.cases import refused
from trainspec_cli.wings.certify.certificate import (
    derive,
    digest,
    is_whole,
    read_fingerprint,
    read_key,
    sign_certificate,
    verify,
    write_certificate,
)
from trainspec_cli.wings.certify.clauses import AS_THEY_MUST_BE, FACTS, make_finding, read_clauses
from trainspec_cli.wings.certify.judge import checks
from trainspec_cli.wings.certify.other_engine import engine_checks

MACHINE = Machine("box", 2, 2**34)
FINDING = make_finding("NUM-1", "dense-fp32-tp2", {"worst_gradient_error": 5e-7, "parameter": "p"})
STATED: dict[str, Any] = {
    "measured_since": "2026-01-01",
    "machine_id": "ab" * 16,
    "processes": 2,
    "features": ("attention.math", "fp8"),
}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


def made(findings: tuple[Finding, ...] = (FINDING,), **stated: Any) -> Certificate:
    """Return a certificate of few packages, so that it has few leaves to alter."""
    machine = replace(MACHINE, gpu_names=("NVIDIA H100",), gpu_memory_bytes=2**36)
    full = write_certificate(findings, machine, date="2026-01-02", **{**STATED, **stated})
    short = derive(replace(full, versions={"trainspec": "1.0", "torch": "2.13.0"}))
    return replace(short, digest=digest(to_plain(short)))


def written(folder: Path, certificate: Certificate | JsonObject) -> Path:
    file = folder / "certificate.json"
    file.write_text(json.dumps(certificate if isinstance(certificate, dict) else to_plain(certificate)))
    return file


def refusal(file: Path, signed_by: str = "") -> str:
    with pytest.raises(RecipeError) as error:
        verify(file, signed_by)
    (problem,) = error.value.problems
    assert problem.code == "bad_certificate" and problem.file == str(file)
    return problem.message


def test_a_signed_certificate_is_read_as_it_was_written(tmp_path: Path, key_file: Path) -> None:
    signed = sign_certificate(made(), read_key(key_file))
    fingerprint = read_fingerprint(f"{key_file}.pub")
    found = verify(written(tmp_path, signed), fingerprint)
    assert found == signed
    assert found.signer and found.signer.fingerprint == fingerprint


CHANGES: dict[str, Callable[[JsonObject], object]] = {
    "a finding": lambda body: body["findings"][0].update(passed=False),  # type: ignore[index, union-attr, call-overload]
    "the date": lambda body: body.update(date="2026-01-03"),
    "the machine": lambda body: body.update(machine_id="cd" * 16),
    "an unknown field": lambda body: body.update(note="x"),
    "the signature": lambda body: body.update(signature="AAAA"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_certificate_is_refused_under_a_valid_digest(tmp_path: Path, key_file: Path, change: str) -> None:
    body = to_plain(sign_certificate(made(), read_key(key_file)))
    CHANGES[change](body)
    body["digest"] = digest(body)
    assert "signature" in refusal(written(tmp_path, body))


def test_another_key_cannot_replace_the_signer(tmp_path: Path, key_file: Path) -> None:
    other = make_key(tmp_path / "other")
    body = to_plain(sign_certificate(made(), read_key(key_file)))
    signed = sign_certificate(made(), read_key(tmp_path / "other"))
    swapped = body | {"signer": to_plain(signed)["signer"]}
    swapped["digest"] = digest(swapped)
    assert "signature" in refusal(written(tmp_path, swapped))
    asked = read_fingerprint(f"{key_file}.pub")
    message = refusal(written(tmp_path, signed), asked)
    assert other in message and asked in message


def test_a_certificate_without_its_signature_is_unsigned(tmp_path: Path, key_file: Path) -> None:
    body = to_plain(sign_certificate(made(), read_key(key_file)))
    fingerprint = read_fingerprint(f"{key_file}.pub")
    bare = {**body, "signer": None}
    bare["digest"] = digest(bare)
    assert "no signer" in refusal(written(tmp_path, bare))
    bare["signature"] = ""
    assert verify(written(tmp_path, bare)).signer is None
    assert fingerprint in refusal(written(tmp_path, bare), fingerprint)
    assert "signature" in refusal(written(tmp_path, body | {"signature": ""}))


def test_dates_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, made(measured_since="2026-01-03"))
    assert "2026-01-03" in refusal(file)


# Forgeries: verification computes everything that follows from the findings

ERRORS = {"worst_loss_error": 1e-7, "gradient_error": 1e-7, "weight_error": 2e-7}
SAME = {"sha256": "ab", "worst_loss_error": 0.0}
FIGURES: dict[str, dict[str, Figure]] = {
    **{clause: {"worst_gradient_error": 5e-7, "parameter": "p"} for clause in ("NUM-1", "NUM-4", "NUM-5", "KERN-1")},
    "NUM-2": {"worst_loss_error": 1e-6, "least_clipped_norm": 0.4},
    "NUM-3": {"parameter": "p", "error": 3e-3, "error_of_the_format": 2e-3},
    "NUM-6": {"sha256": "ab", "again": "ab"},
    "NUM-7": dict(ERRORS),
    "NUM-8": {**ERRORS, "samples": "each once"},
    "KERN-2": dict(ERRORS),
    **{clause: {"gradient_error": 1e-3} for clause in ("COMM-1", "COMM-2")},
    **{clause: {**SAME, "resumed": "ab"} for clause in ("COMM-3", "CKPT-1")},
    "CKPT-2": {"worst_loss_error": 1e-6},
    **{
        clause: {**ERRORS, **dict.fromkeys(FACTS[clause], AS_THEY_MUST_BE)} for clause in ("LIVE-1", "LIVE-2", "LIVE-5")
    },
    **{
        clause: {**SAME, "undisturbed": "ab", **dict.fromkeys(FACTS[clause], AS_THEY_MUST_BE)}
        for clause in ("LIVE-3", "LIVE-4")
    },
    "LEGAL-1": {"reason": "it has no experts", "hint": "set layout.ep=1"},
    "SEC-1": {"listening": 2.0, "beyond": "none"},
    "SEC-2": {"ports": 2.0, "sha256": "ab", "left_alone": "ab", "ended": "well", "their_code": "was not run"},
    "SEC-3": {"files": 9.0, "open": 0.0},
    "SEC-4": {"certificate": "refused", "checkpoint": "refused", "plan": "refused"},
    "PERF-1": {"step_s": 1.2, "planned_s": 1.0},
    "PERF-2": {"alone_per_s": 100.0, "together_per_s": 180.0},
    "PERF-3": {"all_reduce_gb_per_s": 12.0, "at_bytes": 1e6, "small_message_us": 20.0},
    "PERF-4": {"recovery_s": 40.0, "lost_steps": 6.0, "kind": "restart"},
    "PERF-5": {"write_gb_per_s": 0.7, "read_gb_per_s": 0.9},
}
"""Figures that keep each clause."""
CASES = {"COMM-1": "dense-fp32-dp_shard2-int8_gradients-one-step"}
CASES["COMM-2"] = f"{CASES['COMM-1']}-64-exchanges"


def finding_of(clause: str, case: str = "") -> Finding:
    usual = "2-processes" if clause.startswith(("SEC", "PERF")) else "dense-fp32-tp2"
    return make_finding(clause, case or CASES.get(clause, usual), FIGURES[clause])


def test_every_clause_is_kept_by_sound_figures_and_broken_without_figures() -> None:
    assert set(FIGURES) == set(read_clauses())
    for clause in FIGURES:
        finding = finding_of(clause)
        assert finding.passed, clause
        broken = make_finding(clause, finding.case, {})
        assert not broken.passed and broken.bound == finding.bound, clause


def leaves(value: JsonValue, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], JsonValue]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


def other_values(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 + 1, type(value)(0) if value else 1]
    return [f"{value}x", "A"] if isinstance(value, str) else ["x", 1.0]


MANNERS = ("NUM-2", "NUM-3", "NUM-7", "COMM-2", "CKPT-1", "LIVE-1", "LEGAL-1", "SEC-2", "PERF-2")


def forgeries(body: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """Yield a copy for each leaf and each other value of it, under a valid digest, with the path of the leaf."""
    for path, value in leaves(body):
        if path[0] in ("digest", "signature", "signer"):
            continue
        if path[0] == "clauses" and body["clauses"][path[1]]["id"] not in ("NUM-8", *MANNERS):  # type: ignore[index, call-overload]
            continue
        for other in other_values(value):
            if other == value:
                continue
            forged = copy.deepcopy(body)
            parent: JsonValue = forged
            for step in path[:-1]:
                parent = parent[step]  # type: ignore[index, call-overload]
            parent[path[-1]] = other  # type: ignore[index, call-overload]
            forged["digest"] = digest(forged)
            yield ".".join(map(str, path)), forged


DERIVED = re.compile(
    r"(schema|spec_version|spec_sha256|whole|verdict|clauses\..*|machine\..*|machine_id|versions\..*|features\..*"
    r"|findings\.\d+\.(clause|passed|bound|grade|machine_sha256"
    r"|figures\.(worst_ratio|worst_of_bound|worst_error|ratio_to_plan|efficiency|slower_gb_per_s)))"
)
"""Fields that follow from other statements, or that every finding depends on."""


def outcome(file: Path, forged: JsonObject, signed_by: str = "") -> Certificate | None:
    """Return the accepted certificate; None if it is refused."""
    file.write_text(json.dumps(forged))
    try:
        return verify(file, signed_by)
    except RecipeError as error:
        assert error.problems[0].code == "bad_certificate"
        return None


@pytest.mark.slow
def test_altering_an_unsigned_certificate_is_refused_except_for_measurements(tmp_path: Path) -> None:
    """The findings cover each way to judge figures, and one is broken."""
    findings = [finding_of(clause) for clause in MANNERS]
    findings.append(make_finding("NUM-4", "moe-fp32-tp2", {"worst_gradient_error": 2e-5, "parameter": "p"}))
    body = to_plain(made(findings=tuple(findings)))
    assert outcome(tmp_path / "c.json", body) is not None
    accepted = set()
    tried = set()
    for path, forged in forgeries(body):
        tried.add(path)
        found = outcome(tmp_path / "c.json", forged)
        if found is not None:
            accepted.add(path)
            assert found.signer is None and found.verdict == "broken" and not found.whole
    assert [path for path in sorted(accepted) if DERIVED.fullmatch(path)] == []
    assert {path for path in tried if DERIVED.fullmatch(path)} >= {"whole", "verdict", "machine.gpu_names.0"}
    left = {re.sub(r"findings\.\d+\.(figures\.)?.*", r"findings.\1", path) for path in accepted}
    assert left <= {"date", "measured_since", "engine", "processes", "findings.", "findings.figures."}


def test_any_alteration_of_a_signed_certificate_is_refused(tmp_path: Path, key_file: Path) -> None:
    signed = sign_certificate(made(), read_key(key_file))
    asked = read_fingerprint(f"{key_file}.pub")
    assert outcome(tmp_path / "c.json", to_plain(signed), asked) == signed
    for path, forged in forgeries(to_plain(signed)):
        assert outcome(tmp_path / "c.json", forged, asked) is None, path


def test_a_signature_does_not_excuse_a_contradiction(tmp_path: Path, key_file: Path) -> None:
    forged = sign_certificate(replace(made(), whole=True), read_key(key_file))
    assert "whole is True" in refusal(written(tmp_path, forged))


def whole() -> Certificate:
    """Return a certificate with a finding for every case of the spec."""
    wanted = [(check.clause, check.run.name) for check in checks(2, features=STATED["features"])]
    wanted += [("LEGAL-1", name) for name in refused(2)]
    wanted += [(clause, "2-processes") for clause in FIGURES if clause.startswith(("SEC", "PERF"))]
    findings = [finding_of(clause, case) for clause, case in wanted]
    return write_certificate(findings, MACHINE, date="2026-01-02", **STATED)


def test_a_certificate_is_whole_with_exactly_one_finding_for_each_case(tmp_path: Path) -> None:
    full = whole()
    assert verify(written(tmp_path, full)) == full
    first, *others = full.findings
    without = {
        "a case": replace(full, findings=tuple(others)),
        "another case": replace(full, findings=(replace(first, case="dense-fp32-tp3"), *others)),
        "a case twice": replace(full, findings=(*full.findings, first)),
        "security": replace(full, findings=tuple(one for one in full.findings if one.clause != "SEC-3")),
        "as many processes": replace(full, processes=4),
        "a kernel": replace(full, features=("fp8",)),
        "fp8": replace(full, features=("attention.math",)),
        "the families": replace(full, recipe=("recipe=tiny",)),
        "nothing declined": replace(full, not_offered=(NotOffered("NUM-4", "x", "no"),)),
    }
    assert [name for name, one in without.items() if is_whole(one)] == []
    assert is_whole(replace(full, findings=tuple(one for one in full.findings if one.clause != "PERF-1")))


def test_a_certificate_of_another_engine_is_whole_if_it_declined_nothing() -> None:
    found = [make_finding(one.clause, one.run.name, {}, of_engine=True) for one in engine_checks(2)]
    made_whole = write_certificate(found, MACHINE, date="2026-01-02", engine="python mine.py", processes=2)
    assert is_whole(made_whole) and made_whole.verdict == "broken"
    assert not is_whole(replace(made_whole, findings=made_whole.findings[1:]))


def test_a_certificate_for_another_spec_names_the_version_that_verifies_it(tmp_path: Path) -> None:
    body = to_plain(made()) | {"spec_version": "9.0"}
    body["versions"] = {"trainspec": "7.1"}
    body["digest"] = digest(body)
    assert "trainspec 7.1" in refusal(written(tmp_path, body))


def test_the_first_schema_has_no_signer_and_its_figures_are_checked(tmp_path: Path) -> None:
    """Fields that the first schema lacks are ignored; everything that its figures determine is computed again."""
    body = to_plain(made()) | {"schema": "trainspec.certificate/1"}
    body["signer"], body["signature"] = {"public_key": "ssh-ed25519 x", "fingerprint": "SHA256:x"}, "AAAA"
    body["digest"] = digest(body)
    found = verify(written(tmp_path, body))
    assert (found.signer, found.signature, found.machine_id) == (None, "", "")
    assert found.findings == made().findings
    assert "is not signed" in refusal(written(tmp_path, body), "SHA256:x")
    for change, path in (
        (lambda body: body.update(whole=True), "whole"),
        (lambda body: body.update(verdict="broken"), "verdict"),
        (lambda body: body["clauses"][0].update(failed=1), "clauses[0].failed"),
        (lambda body: body["clauses"][0].update(level="SHOULD"), "clauses[0].level"),
        (lambda body: body["findings"][0].update(bound=1.0), "findings[0].bound"),
        (lambda body: body["findings"][0]["figures"].update(worst_gradient_error=1.0), "findings[0].passed"),
        (lambda body: body["findings"][0].update(clause="NUM-0"), "findings[0].clause"),
    ):
        forged = copy.deepcopy(body)
        change(forged)
        forged["digest"] = digest(forged)
        assert f" {path} is " in refusal(written(tmp_path, forged))
