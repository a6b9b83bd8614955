"""Render a certificate for people: who signed it, one line for each clause, and the broken cases."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.recipe.results.certificate import REFUSALS, Certificate, Figure
from trainspec_cli.reporter.console import Text
from trainspec_cli.wings.certify.cases import EMULATED

SHOWN_DIGITS = 16


def render_certificate(certificate: Certificate) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says"):
        table.add_column(name, no_wrap=name != "what it says")
    for name in ("cases", "failed", "worst", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for clause in certificate.clauses:
        if not clause.cases:
            continue
        worst = "differs" if clause.failed else "exact"
        bound = "exact"
        if clause.bound is not None and clause.worst is not None:
            worst = show_figure(clause.worst) + (f" ({clause.grade})" if clause.grade else "")
            bound = show_figure(clause.bound)
        cells = (clause.id, clause.level, clause.title, str(clause.cases), str(clause.failed), worst, bound)
        table.add_row(*cells, style="red" if clause.failed else "")
    below = [
        Text(f"{one.clause} not offered for {one.case}: {one.reason}", style="yellow")
        for one in certificate.not_offered
    ]
    for finding in certificate.findings:
        if not finding.passed:
            figures = (
                f"{name} {f'{figure:.2e}' if isinstance(figure, float) else figure}"
                for name, figure in finding.figures.items()
            )
            below.append(Text(f"{finding.clause} broken by {finding.case}: {', '.join(figures)}", style="red"))
    measured = [clause for clause in certificate.clauses if clause.cases]
    runs = sum(clause.cases for clause in measured if clause.id != REFUSALS)
    refusals = sum(clause.cases for clause in measured if clause.id == REFUSALS)
    counted = {"cases measured": runs, "layouts refused": refusals}
    counts = " and ".join(f"{count:,} {what}" for what, count in counted.items() if count) or "no cases"
    engine = f" by {certificate.engine}" if certificate.engine else ""
    part = f"{len(measured)} clause{'s' * (len(measured) != 1)} of the spec"
    what = f"the training spec {certificate.spec_version}" if certificate.whole else part
    gpus = certificate.machine.gpu_names
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{certificate.machine.cpu_cores} CPU cores"
    if EMULATED in certificate.features:
        where = f"an emulated accelerator ({where})"
    summary = f"{what}: {certificate.verdict}{engine}, {counts} on {where}; digest {certificate.digest[:SHOWN_DIGITS]}"
    verdict = Text(summary, style="bold red" if certificate.verdict == "broken" else "bold")
    trust = Text(describe_trust(certificate), style="" if certificate.signer else "bold yellow")
    parts: list[RenderableType] = [trust, Text(), table, *([Text(), *below] if below else []), Text(), verdict]
    if certificate.date:
        parts.append(Text(f"made on {certificate.date}"))
    if certificate.machine_id:
        parts.append(Text(f"on the machine {certificate.machine_id} ({certificate.machine.hostname})"))
    return Group(*parts)


def show_figure(value: Figure) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value < 0.1 else f"{float(value):.2f}"


def describe_trust(found: Certificate) -> str:
    """Return who signed a certificate. The caller must have checked the signature."""
    if found.signer:
        accept = "--verify FILE --key KEY accepts only that key"
        return f"signed by {found.signer.fingerprint} (anybody can make a key: {accept})"
    return "unsigned: anybody could have written this certificate, including its figures and its machine"
