"""A certificate as a page."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.reporter.certificate import (
    describe_broken,
    describe_declined,
    describe_standing,
    describe_trust,
    describe_verdict,
    show_worst,
    standing_of,
)
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    details,
    heading,
    origin_line,
    plain_list,
    render_page,
    section,
    shorten,
    table,
    text_row,
    text_table,
)
from trainspec_cli.spec.results.certificate import Certificate, Finding

FOOTER = "Measured by trainspec certify. Only a signature by a key that you know shows who wrote it."
MOST_FINDINGS, MOST_CHARACTERS = 5000, 400


def render_certificate_page(certificate: Certificate, origin: PageOrigin | None = None) -> str:
    clauses = [
        (one.id, one.level, one.title, str(one.cases), str(one.failed), standing_of(one), *show_worst(one))
        for one in certificate.clauses
        if one.cases
    ]
    headings = ("clause", "level", "what it says", "#cases", "#failed", "standing", "#worst", "#bound")
    broken = [shorten(line, MOST_CHARACTERS) for line in describe_broken(certificate)]
    declined = [shorten(line, MOST_CHARACTERS) for line in describe_declined(certificate)]
    parts = [
        heading("Certificate of the training spec", describe_verdict(certificate)),
        origin_line(origin),
        plain_list([describe_trust(certificate), *describe_standing(certificate)]),
        section("Clauses", "", text_table(headings, clauses)),
        section("What was broken", "", plain_list(broken)) if broken else "",
        section("What was not offered", "", plain_list(declined)) if declined else "",
        details("Every case", _findings(certificate.findings)),
    ]
    return render_page("Certificate of the training spec", "".join(parts), FOOTER)


def _findings(findings: Sequence[Finding]) -> str:
    rows = [
        text_row((one.clause, one.case, "kept" if one.passed else "broken", shorten(_figures(one), MOST_CHARACTERS)))
        for one in findings[:MOST_FINDINGS]
    ]
    return table(("clause", "case", "standing", "figures"), rows)


def _figures(finding: Finding) -> str:
    shown = (
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in finding.figures.items()
    )
    return ", ".join(shown)
