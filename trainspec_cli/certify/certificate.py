"""The clauses of SPEC.md, which this reads, and the certificate: what was measured, under a digest."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.launcher.job.provenance import versions
from trainspec_cli.reading.files import UnreadableFileError, read_field, read_object
from trainspec_cli.spec.canonical import canonical_json, to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.records import FieldError, read_record
from trainspec_cli.spec.results.certificate import Certificate, ClauseSummary, Finding

SPEC = Path(__file__).with_name("SPEC.md")
_VERSION = re.compile(r"^# The training spec, version (\S+)$", re.MULTILINE)
_CLAUSE_TEXT = re.compile(r"^## (\S+) (MUST|SHOULD): (.+)\n\n((?:.+\n)+)", re.MULTILINE)


SCHEMA = "trainspec.certificate/1"


@dataclass(frozen=True)
class Clause:
    id: str
    level: Literal["MUST", "SHOULD"]
    title: str
    text: str


@lru_cache
def spec_version() -> str:
    found = _VERSION.search(SPEC.read_text(encoding="utf-8"))
    assert found, "SPEC.md begins with its version"
    return found.group(1)


@lru_cache
def read_clauses() -> dict[str, Clause]:
    """Return the clauses by id, in the document's order."""
    found = _CLAUSE_TEXT.findall(SPEC.read_text(encoding="utf-8"))
    return {id: Clause(id, level, title, " ".join(text.split())) for id, level, title, text in found}


def write_certificate(findings: Sequence[Finding], machine: Machine, *, date: str, whole: bool) -> Certificate:
    certificate = Certificate(
        schema=SCHEMA,
        spec_version=spec_version(),
        spec_sha256=hashlib.sha256(SPEC.read_bytes()).hexdigest(),
        date=date,
        machine=machine,
        versions=versions(),
        whole=whole,
        verdict=verdict(findings),
        clauses=tuple(_summarise(clause, findings) for clause in read_clauses()),
        findings=tuple(
            replace(finding, figures={name: _number(value) for name, value in finding.figures.items()})
            for finding in findings
        ),
    )
    return replace(certificate, digest=digest(to_plain(certificate)))


def verdict(findings: Sequence[Finding]) -> str:
    """`kept` where every MUST that was measured holds."""
    broken = [finding for finding in findings if not finding.passed]
    return "broken" if any(read_clauses()[finding.clause].level == "MUST" for finding in broken) else "kept"


def _summarise(id: str, findings: Sequence[Finding]) -> ClauseSummary:
    clause, own = read_clauses()[id], [finding for finding in findings if finding.clause == id]
    worst = max(own, key=lambda finding: finding.measured, default=None)
    return ClauseSummary(
        id=id,
        level=clause.level,
        title=clause.title,
        cases=len(own),
        failed=sum(not finding.passed for finding in own),
        worst=_number(worst.measured) if worst else None,
        bound=worst.bound if worst else None,
        worst_case=worst.case if worst else None,
    )


def _number(value: float | str) -> float | str:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(body: JsonObject) -> str:
    """Return the SHA-256 of everything but the digest itself, as canonical JSON."""
    content = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def verify(file: Path) -> Certificate:
    """Return the certificate in `file`. Raises RecipeError where it is none, or was altered."""
    try:
        body = read_object(file)
        schema, found = read_field(file, body, "schema", str), read_field(file, body, "digest", str)
    except UnreadableFileError as error:
        raise RecipeError(_refused(file, f"{file} is no certificate: {error}")) from error
    if schema != SCHEMA:
        raise RecipeError(_refused(file, f"{file} is of the schema {schema}, this version reads {SCHEMA}"))
    if found != _digest_or_none(body):
        raise RecipeError(_refused(file, f"{file} was altered: its digest is not that of its content"))
    return _read(file, body)


def _digest_or_none(body: JsonObject) -> str | None:
    """Return None for what canonical JSON cannot hold: NaN, infinity, half a surrogate pair."""
    try:
        return digest(body)
    except ValueError:
        return None


def _read(file: Path, body: JsonObject) -> Certificate:
    """Return the certificate. Raises RecipeError where it cannot be printed: anybody can put a digest to anything."""
    try:
        certificate = read_record(Certificate, body)
    except FieldError as error:
        raise RecipeError(_refused(file, f"{file} is damaged: {error}")) from error
    figures = [clause.worst for clause in certificate.clauses if clause.bound is not None]
    if any(figure is None or (isinstance(figure, str) and figure not in ("inf", "-inf", "nan")) for figure in figures):
        raise RecipeError(_refused(file, f"{file} has a figure that is no number"))
    return certificate


def _refused(file: Path, message: str) -> Problem:
    return Problem("bad_certificate", message, file=str(file), hint="make one with trainspec certify --output FILE")
