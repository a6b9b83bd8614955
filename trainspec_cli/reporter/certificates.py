"""Certificates side by side: which clause is kept by whom, and their performance figures with ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.reporter.certificate import describe_standing, describe_verdict, show_worst
from trainspec_cli.reporter.rich_text import Text
from trainspec_cli.spec.results.certificate import Certificate, ClauseSummary, Finding

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ComparedClause:
    """A clause by two certificates."""

    id: str
    level: str
    title: str
    standings: tuple[str, ...]
    """kept, broken or not measured, by each; of a clause that has levels, the grade."""
    worst: tuple[str, ...]
    """The figure of each one's worst case; empty where it has none."""

    @property
    def differs(self) -> bool:
        return len(set(self.standings)) > 1


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of a clause with levels, by two certificates."""

    clause: str
    figure: str
    values: tuple[float | None, ...]
    ratio: float | None
    """The second over the first; None where one of them has no such figure."""


@dataclass(frozen=True)
class CertificateComparison:
    names: tuple[str, ...]
    """The files."""
    verdicts: tuple[str, ...]
    clauses: tuple[ComparedClause, ...]
    figures: tuple[ComparedFigure, ...]


def compare_certificates(names: Sequence[str], certificates: Sequence[Certificate]) -> CertificateComparison:
    by_id = [{clause.id: clause for clause in certificate.clauses} for certificate in certificates]
    ids = list(dict.fromkeys(id for clauses in by_id for id in clauses))
    compared = [_compare([clauses.get(id) for clauses in by_id]) for id in ids]
    shown = tuple(clause for clause in compared if set(clause.standings) != {NOT_MEASURED})
    return CertificateComparison(
        tuple(names), tuple(one.verdict for one in certificates), shown, tuple(_figures(certificates))
    )


def _compare(clauses: Sequence[ClauseSummary | None]) -> ComparedClause:
    one = next(clause for clause in clauses if clause is not None)
    worst = tuple(show_worst(clause)[0] if clause and clause.cases else "" for clause in clauses)
    return ComparedClause(one.id, one.level, one.title, tuple(map(standing_of, clauses)), worst)


def standing_of(clause: ClauseSummary | None) -> str:
    if clause is None or not clause.cases:
        return NOT_MEASURED
    grade = f" ({clause.grade})" if clause.grade else ""
    return f"{'broken' if clause.failed else 'kept'}{grade}"


def _figures(certificates: Sequence[Certificate]) -> list[ComparedFigure]:
    graded = [{finding.clause: finding for finding in one.findings if finding.grade} for one in certificates]
    ids = list(dict.fromkeys(id for findings in graded for id in findings))
    return [figure for id in ids for figure in _figures_of(id, [findings.get(id) for findings in graded])]


def _figures_of(clause: str, findings: Sequence[Finding | None]) -> list[ComparedFigure]:
    names = dict.fromkeys(name for finding in findings if finding for name in finding.figures)
    compared = []
    for name in names:
        values = tuple(_number(finding.figures.get(name)) if finding else None for finding in findings)
        if any(value is not None for value in values):
            compared.append(ComparedFigure(clause, name, values, _ratio(values)))
    return compared


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _ratio(values: Sequence[float | None]) -> float | None:
    first, second = values[0], values[-1]
    return second / first if first and second is not None else None


def render_comparison(comparison: CertificateComparison, certificates: Sequence[Certificate]) -> RenderableType:
    about = [Text(line) for line in describe_both(comparison, certificates)]
    parts: list[RenderableType] = [*about, Text(), _clause_table(comparison)]
    if comparison.figures:
        parts += [Text(), _figure_table(comparison)]
    return Group(*parts)


def describe_both(comparison: CertificateComparison, certificates: Sequence[Certificate]) -> list[str]:
    lines = []
    for letter, name, one in zip("AB", comparison.names, certificates, strict=True):
        lines += [f"{letter}  {name}: {describe_verdict(one)}", *(f"   {line}" for line in describe_standing(one))]
    return lines


def _clause_table(comparison: CertificateComparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "what it says", "A", "worst", "B", "worst"):
        table.add_column(name, no_wrap=name != "what it says")
    for clause in comparison.clauses:
        (a, b), (worst_a, worst_b) = clause.standings, clause.worst
        style = "bold" if clause.differs else ""
        table.add_row(clause.id, clause.level, clause.title, a, worst_a, b, worst_b, style=style)
    return table


def _figure_table(comparison: CertificateComparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "figure"):
        table.add_column(name, no_wrap=True)
    for name in ("A", "B", "B over A"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in comparison.figures:
        table.add_row(one.clause, one.figure, *figure_cells(one))
    return table


def figure_cells(one: ComparedFigure) -> list[str]:
    values = ["-" if value is None else f"{value:.4g}" for value in one.values]
    return [*values, "-" if one.ratio is None else f"{one.ratio:.2f}"]
