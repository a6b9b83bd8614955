"""A certificate for people: who vouches for it, a line for each clause, then what was broken."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.certificate import REFUSALS, Certificate, ClauseSummary, Figure, Finding
from trainspec_cli.reporter.rich_text import Text

SHOWN_DIGITS = 16


def render_certificate(certificate: Certificate) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says"):
        table.add_column(name, no_wrap=name != "what it says")
    for name in ("cases", "failed", "worst", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for clause in certificate.clauses:
        if clause.cases:
            table.add_row(*_row(clause), style="red" if clause.failed else "")
    declined = [Text(line, style="yellow") for line in describe_declined(certificate)]
    broken = [*declined, *(Text(line, style="red") for line in describe_broken(certificate))]
    standing = [Text(line) for line in describe_standing(certificate)]
    verdict = Text(describe_verdict(certificate), style="bold red" if certificate.verdict == "broken" else "bold")
    trust = Text(describe_trust(certificate), style="" if certificate.signer else "bold yellow")
    return Group(trust, Text(), table, *([Text(), *broken] if broken else []), Text(), verdict, *standing)


def _row(clause: ClauseSummary) -> list[str]:
    return [clause.id, clause.level, clause.title, str(clause.cases), str(clause.failed), *show_worst(clause)]


def show_worst(clause: ClauseSummary) -> tuple[str, str]:
    """Return the worst case's figure and its bound, as tables show them."""
    if clause.bound is not None and clause.worst is not None:
        if clause.grade:
            return f"{show_figure(clause.worst)} ({clause.grade})", show_figure(clause.bound)
        return show_figure(clause.worst), show_figure(clause.bound)
    return "differs" if clause.failed else "exact", "exact"


def show_figure(value: Figure) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else f"{float(value):.2f}"


def describe_broken(certificate: Certificate) -> Iterator[str]:
    return (_describe(finding) for finding in certificate.findings if not finding.passed)


def describe_declined(certificate: Certificate) -> Iterator[str]:
    return (f"{one.clause} not offered in {one.case}: {one.reason}" for one in certificate.not_offered)


def _describe(finding: Finding) -> str:
    shown = {name: f"{figure:.2e}" if isinstance(figure, float) else figure for name, figure in finding.figures.items()}
    figures = ", ".join(f"{name} {figure}" for name, figure in shown.items())
    return f"{finding.clause} broken by {finding.case}: {figures}"


def describe_verdict(found: Certificate) -> str:
    measured = [clause for clause in found.clauses if clause.cases]
    runs = sum(clause.cases for clause in measured if clause.id != REFUSALS)
    refusals = sum(clause.cases for clause in measured if clause.id == REFUSALS)
    counted = {"cases measured": runs, "layouts refused": refusals}
    counts = " and ".join(f"{count:,} {what}" for what, count in counted.items() if count) or "no cases"
    whose = f" by {found.engine}" if found.engine else ""
    part = f"{len(measured)} clause{'s' * (len(measured) != 1)} of the spec"
    what = f"the training spec {found.spec_version}" if found.whole else part
    where = place_of(found.machine)
    digest = found.digest[:SHOWN_DIGITS]
    return f"{what}: {found.verdict}{whose}, {counts} on {where}; digest {digest}"


def place_of(machine: Machine) -> str:
    gpus = machine.gpu_names
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine.cpu_cores} CPU cores"


def describe_trust(found: Certificate) -> str:
    """Return who vouches for a certificate whose signature was checked."""
    if found.signer:
        accept = "--verify FILE --key KEY accepts that key alone"
        return f"signed by {found.signer.fingerprint} (anybody can make a key: {accept})"
    return "unsigned: anybody could have written this certificate, and its figures and machine with it"


def describe_standing(found: Certificate) -> Iterator[str]:
    """Say when the certificate was made, and on which machine."""
    if found.date:
        yield f"made on {found.date}"
    if found.machine_id:
        yield f"of the machine {found.machine_id} ({found.machine.hostname})"
