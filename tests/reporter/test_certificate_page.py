"""A certificate as a page."""

from __future__ import annotations

from trainspec_cli.certify.certificate import Terms, write_certificate
from trainspec_cli.certify.standing import stand
from trainspec_cli.reporter.certificate import describe_declined, describe_verdict
from trainspec_cli.reporter.certificate_page import render_certificate_page
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, Finding, NotOffered

MACHINE = Machine("box", 2, 2**34)
KEPT = stand("NUM-1", "dense-fp32-tp2", {"worst_gradient_error": 5e-7})
SLOW = stand("PERF-2", "2-processes", {"together_per_s": 120.0, "alone_per_s": 100.0})


def certificate(*findings: Finding, **terms: object) -> Certificate:
    return write_certificate(findings, MACHINE, date="2026-01-01", whole=True, terms=Terms(**terms))  # type: ignore[arg-type]


def test_a_page_shows_the_clauses_and_escapes_what_it_shows() -> None:
    evil = stand("NUM-1", "<script>", {"worst_gradient_error": 0.5, "reason": "<b>\x1b[2J"})
    page = render_certificate_page(certificate(evil, SLOW, not_offered=(NotOffered("NUM-4", "x", "<i>no"),)))
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page and "<b>\\x1b" not in page
    assert "broken" in page and "kept (C)" in page and "&lt;i&gt;no" in page
    assert "unsigned" in page


def test_another_engine_is_named_and_what_it_declined_is_told() -> None:
    found = certificate(KEPT, engine="python mine.py", not_offered=(NotOffered("NUM-4", "fp32-one", "it cannot"),))
    assert ": kept by python mine.py, 1 cases" in describe_verdict(found)
    assert list(describe_declined(found)) == ["NUM-4 not offered in fp32-one: it cannot"]
    assert certificate(engine="e", not_offered=found.not_offered).verdict == "not offered"
