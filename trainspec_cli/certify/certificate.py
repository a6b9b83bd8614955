"""The clauses of SPEC.md, which this reads, and the certificate: what was measured, under a digest and a signature."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainspec_cli.certify import keys
from trainspec_cli.certify.standing import stand
from trainspec_cli.json_value import JsonObject
from trainspec_cli.launcher.job.provenance import versions
from trainspec_cli.spec.canonical import canonical_json, to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, ClauseSummary, Finding, NotOffered

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SPEC = Path(__file__).with_name("SPEC.md")
_VERSION = re.compile(r"^# The training spec, version (\S+)$", re.MULTILINE)
_CLAUSE_TEXT = re.compile(r"^## (\S+) (MUST|SHOULD): (.+)\n\n((?:.+\n)+)", re.MULTILINE)

SCHEMA = "trainspec.certificate/3"
FIRST_SCHEMA = "trainspec.certificate/1"
"""A certificate of the first schema has no signer, and its findings lack figures that later ones have."""


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
def spec_sha256() -> str:
    return hashlib.sha256(SPEC.read_bytes()).hexdigest()


@lru_cache
def read_clauses() -> dict[str, Clause]:
    """Return the clauses by id, in the document's order."""
    found = _CLAUSE_TEXT.findall(SPEC.read_text(encoding="utf-8"))
    return {id: Clause(id, level, title, " ".join(text.split())) for id, level, title, text in found}


@dataclass(frozen=True)
class Terms:
    """What a certificate says of itself, as the fields of `Certificate` do."""

    measured_since: str = ""
    machine_id: str = ""
    engine: str = ""
    processes: int = 0
    features: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    not_offered: tuple[NotOffered, ...] = ()


def write_certificate(
    findings: Sequence[Finding], machine: Machine, *, date: str, whole: bool, terms: Terms | None = None
) -> Certificate:
    raw = Certificate(
        schema=SCHEMA,
        spec_version=spec_version(),
        spec_sha256=spec_sha256(),
        date=date,
        **vars(terms or Terms()),
        machine=machine,
        versions=versions(),
        whole=whole,
        verdict="",
        clauses=(),
        findings=tuple(findings),
    )
    certificate = derive(raw, whole=whole)
    return replace(certificate, digest=digest(to_plain(certificate)))


def derive(raw: Certificate, *, whole: bool) -> Certificate:
    """Return the certificate with every statement that follows from others: findings, clauses, verdict, `whole`.

    Measurements (the figures of findings, what was declined, the machine, versions and dates) stay as they are. The
    findings of the first schema stay too: its figures do not suffice to compute them.
    """
    findings = raw.findings
    clauses = {clause.id: (clause.level, clause.title) for clause in raw.clauses}
    if raw.schema != FIRST_SCHEMA:
        clauses = {clause.id: (clause.level, clause.title) for clause in read_clauses().values()}
        plain = to_plain(raw)
        measured_on = {name: plain[name] for name in ("machine", "machine_id", "versions", "features")}
        sha256 = hashlib.sha256(canonical_json(measured_on).encode()).hexdigest()
        findings = tuple(_stated(finding, sha256, of_engine=bool(raw.engine)) for finding in findings)
    is_broken = any(not finding.passed and clauses[finding.clause][0] == "MUST" for finding in findings)
    return replace(
        raw,
        whole=whole,
        verdict="not offered" if raw.not_offered and not findings else "broken" if is_broken else "kept",
        clauses=tuple(_summarise(id, level, title, findings) for id, (level, title) in clauses.items()),
        findings=findings,
    )


def _stated(finding: Finding, machine_sha256: str, *, of_engine: bool) -> Finding:
    found = stand(finding.clause, finding.case, finding.figures, of_engine=of_engine)
    figures = {name: _number(value) for name, value in found.figures.items()}
    return replace(found, figures=figures, machine_sha256=machine_sha256)


def sign_certificate(certificate: Certificate, key: Ed25519PrivateKey) -> Certificate:
    """Return the certificate with its signer named, under another digest, and signed."""
    named = replace(certificate, signer=keys.signer_of(key))
    named = replace(named, digest=digest(to_plain(named)))
    return replace(named, signature=keys.sign(key, signed_content(to_plain(named))))


def _summarise(id: str, level: str, title: str, findings: Sequence[Finding]) -> ClauseSummary:
    own = [finding for finding in findings if finding.clause == id]
    worst = max(own, key=lambda finding: finding.measured, default=None)
    return ClauseSummary(
        id=id,
        level=level,
        title=title,
        cases=len(own),
        failed=sum(not finding.passed for finding in own),
        worst=_number(worst.measured) if worst else None,
        bound=worst.bound if worst else None,
        worst_case=worst.case if worst else None,
        grade=worst.grade if worst else "",
    )


def _number(value: float | str) -> float | str:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(body: JsonObject) -> str:
    """Return the SHA-256 of everything but the digest itself and the signature, as canonical JSON."""
    content = {key: value for key, value in body.items() if key not in ("digest", "signature")}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def signed_content(body: JsonObject) -> str:
    """Return what is signed: everything but the signature, as canonical JSON."""
    return canonical_json({key: value for key, value in body.items() if key != "signature"})
