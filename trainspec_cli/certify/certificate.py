"""The certificate: what was measured on what, under a digest that an alteration breaks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainspec_cli.certify.clauses import SPEC, read_clauses, spec_version
from trainspec_cli.certify.judge import Finding
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launch.provenance import versions
from trainspec_cli.spec.canonical import canonical_json, to_plain
from trainspec_cli.spec.cluster import Machine

SCHEMA = "trainspec.certificate/1"


def write_certificate(findings: Sequence[Finding], machine: Machine, *, date: str, whole: bool) -> dict[str, Any]:
    """`whole`: nothing was left out by `--only`, so that the verdict speaks of the spec."""
    body = {
        "schema": SCHEMA,
        "spec_version": spec_version(),
        "spec_sha256": hashlib.sha256(SPEC.read_bytes()).hexdigest(),
        "date": date,
        "machine": to_plain(machine),
        "versions": versions(),
        "whole": whole,
        "verdict": verdict(findings),
        "clauses": [_summarise(clause, findings) for clause in read_clauses()],
        "findings": [_as_json(finding) for finding in findings],
    }
    return {**body, "digest": digest(body)}


def verdict(findings: Sequence[Finding]) -> str:
    """`kept` where every MUST that was measured holds."""
    broken = [finding for finding in findings if not finding.passed]
    return "broken" if any(read_clauses()[finding.clause].level == "MUST" for finding in broken) else "kept"


def _summarise(id: str, findings: Sequence[Finding]) -> dict[str, Any]:
    clause, own = read_clauses()[id], [finding for finding in findings if finding.clause == id]
    worst = max(own, key=lambda finding: finding.measured, default=None)
    return {
        "id": id,
        "level": clause.level,
        "title": clause.title,
        "cases": len(own),
        "failed": sum(not finding.passed for finding in own),
        "worst": _number(worst.measured) if worst else None,
        "bound": worst.bound if worst else None,
        "worst_case": worst.case if worst else None,
    }


def _as_json(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "figures": {name: _number(value) for name, value in finding.figures.items()}}


def _number(value: float | str) -> float | str:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(body: dict[str, Any]) -> str:
    """SHA-256 of everything but the digest itself, as canonical JSON."""
    content = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def verify(file: Path) -> dict[str, Any]:
    """The certificate in `file`. Raises RecipeError where it is none, or was altered."""
    if not file.is_file():
        raise RecipeError(_refused(file, f"there is no file {file}"))
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        schema, told = body["schema"], body["digest"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(_refused(file, f"{file} is no certificate: {error!r}")) from error
    if schema != SCHEMA:
        raise RecipeError(_refused(file, f"{file} is of the schema {schema}, this version reads {SCHEMA}"))
    if told != digest(body):
        raise RecipeError(_refused(file, f"{file} was altered: its digest is not that of its content"))
    return dict(body)


def _refused(file: Path, message: str) -> Problem:
    return Problem("bad_certificate", message, file=str(file), hint="make one with trainspec certify --output FILE")
