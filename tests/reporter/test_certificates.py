"""Certificates side by side, and as pages."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from trainspec_cli.certify.certificate import Terms, write_certificate
from trainspec_cli.reporter.certificate import describe_declined, describe_verdict
from trainspec_cli.reporter.certificate_page import render_certificate_page, render_comparison_page
from trainspec_cli.reporter.certificates import NOT_MEASURED, compare_certificates, render_comparison
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import REFUSALS, Certificate, Finding, NotOffered

MACHINE = Machine("box", 2, 2**34)
KEPT = Finding("NUM-1", "dense-fp32-tp2", True, {"worst_gradient_error": 5e-7}, 1e-5)
BROKEN = replace(KEPT, passed=False, figures={"worst_gradient_error": 0.5})
SLOW = Finding("PERF-2", "2-processes", True, {"efficiency": 0.6, "alone_per_s": 100.0}, 0.5, "C")
FAST = replace(SLOW, figures={"efficiency": 0.9, "together_per_s": 900.0}, grade="A")


def certificate(*findings: Finding, **terms: object) -> Certificate:
    return write_certificate(findings, MACHINE, date="2026-01-01", whole=True, terms=Terms(**terms))  # type: ignore[arg-type]


A, B = certificate(KEPT, SLOW), certificate(BROKEN, FAST, Finding("CKPT-1", "x", True))
COMPARED = compare_certificates(["a.json", "b.json"], [A, B])


def text_of(drawn: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(drawn)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_each_clause_is_told_by_both_and_what_neither_has_measured_is_left_out() -> None:
    standings = {clause.id: clause.standings for clause in COMPARED.clauses}
    assert standings == {
        "NUM-1": ("kept", "broken"),
        "CKPT-1": (NOT_MEASURED, "kept"),
        "PERF-2": ("kept (C)", "kept (A)"),
    }
    assert [clause.differs for clause in COMPARED.clauses] == [True, True, True]
    assert COMPARED.verdicts == ("kept", "broken")


def test_performance_figures_have_ratios_where_both_have_them() -> None:
    figures = {one.figure: (one.values, one.ratio) for one in COMPARED.figures}
    assert figures["efficiency"] == ((0.6, 0.9), 0.9 / 0.6)
    assert figures["alone_per_s"] == ((100.0, None), None)
    assert figures["together_per_s"] == ((None, 900.0), None)
    nothing = replace(SLOW, figures={"efficiency": 0.0})
    (one,) = compare_certificates("ab", [certificate(nothing), certificate(FAST)]).figures[:1]
    assert one.ratio is None


def test_the_table_has_a_letter_for_each_and_says_who_signed() -> None:
    text = text_of(render_comparison(COMPARED, [A, B]))
    assert "A  a.json: the training spec" in text and "B  b.json" in text
    assert text.count("signed by nobody") == 2
    row = next(line for line in text.splitlines() if line.startswith("PERF-2  efficiency"))
    assert row.split()[-3:] == ["0.6", "0.9", "1.50"]


def test_pages_show_the_clauses_and_escape_what_they_show() -> None:
    evil = replace(BROKEN, case="<script>", figures={"error": 1.0, "reason": "<b>\x1b[2J"})
    page = render_certificate_page(certificate(evil, SLOW, not_offered=(NotOffered("NUM-4", "x", "<i>no"),)))
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page and "<b>\\x1b" not in page
    assert "broken" in page and "kept (C)" in page and "&lt;i&gt;no" in page
    both = render_comparison_page(COMPARED, [A, B])
    assert both.count("<h2>") == 2 and "not measured" in both and "1.50" in both
    alone = compare_certificates("ab", [certificate(KEPT), certificate(KEPT)])
    assert "Performance" not in render_comparison_page(alone, [A, B])


def test_refused_layouts_are_counted_apart_from_what_was_measured() -> None:
    refusals = [Finding(REFUSALS, f"layout-{number}", True, {"reason": "no experts"}) for number in range(3)]
    assert ": kept, 2 cases measured and 3 layouts refused on" in describe_verdict(certificate(KEPT, SLOW, *refusals))
    assert ": kept, 3 layouts refused on" in describe_verdict(certificate(*refusals))
    assert ": kept, no cases on" in describe_verdict(certificate())


def test_another_engine_is_named_and_what_it_declined_is_told() -> None:
    found = certificate(KEPT, engine="python mine.py", not_offered=(NotOffered("NUM-4", "fp32-one", "it cannot"),))
    assert ": kept by python mine.py, 1 cases measured on" in describe_verdict(found)
    assert list(describe_declined(found)) == ["NUM-4 not offered in fp32-one: it cannot"]
    assert certificate(engine="e", not_offered=found.not_offered).verdict == "not offered"
