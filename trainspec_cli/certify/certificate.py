"""The clauses of SPEC.md, which this reads, and the certificate: what was measured, under a digest."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from trainspec_cli.certify.judge import Finding
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.launch.job.provenance import versions
from trainspec_cli.reading.files import UnreadableFileError
from trainspec_cli.reading.json_file import Kind, check_field, read_object
from trainspec_cli.spec.canonical import canonical_json, to_plain
from trainspec_cli.spec.recipe.cluster import Machine

SPEC = Path(__file__).with_name("SPEC.md")
_VERSION = re.compile(r"^# The training spec, version (\S+)$", re.MULTILINE)
_CLAUSE_TEXT = re.compile(r"^## (\S+) (MUST|SHOULD): (.+)\n\n((?:.+\n)+)", re.MULTILINE)


SCHEMA = "trainspec.certificate/1"
_HEAD: dict[str, Kind] = {"schema": str, "digest": str}
_FIELDS: dict[str, Kind] = {
    "verdict": str,
    "spec_version": str,
    "whole": bool,
    "machine": dict,
    "clauses": list,
    "findings": list,
}
_CLAUSE: dict[str, Kind] = {
    "id": str,
    "level": str,
    "title": str,
    "cases": int,
    "failed": int,
    "worst": float | str | None,
    "bound": float | None,
}
_FINDING: dict[str, Kind] = {"clause": str, "case": str, "passed": bool, "figures": dict}


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
        "findings": [
            {**asdict(finding), "figures": {name: _number(value) for name, value in finding.figures.items()}}
            for finding in findings
        ],
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


def _number(value: float | str) -> float | str:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(body: dict[str, Any]) -> str:
    """SHA-256 of everything but the digest itself, as canonical JSON."""
    content = {key: value for key, value in body.items() if key != "digest"}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def verify(file: Path) -> dict[str, Any]:
    """The certificate in `file`. Raises RecipeError where it is none, or was altered."""
    try:
        body = read_object(file, _HEAD)
    except UnreadableFileError as error:
        raise RecipeError(_refused(file, f"{file} is no certificate: {error}")) from error
    schema, digest = body["schema"], body["digest"]
    if schema != SCHEMA:
        raise RecipeError(_refused(file, f"{file} is of the schema {schema}, this version reads {SCHEMA}"))
    if digest != _digest_or_none(body):
        raise RecipeError(_refused(file, f"{file} was altered: its digest is not that of its content"))
    _check_parts(file, body)
    return body


def _digest_or_none(body: dict[str, Any]) -> str | None:
    """Return None for what canonical JSON cannot hold: NaN, infinity, half a surrogate pair."""
    try:
        return digest(body)
    except ValueError:
        return None


def _check_parts(file: Path, body: dict[str, Any]) -> None:
    """Anybody can put a digest to anything. Raises RecipeError where it cannot be printed."""
    try:
        for field, kind in _FIELDS.items():
            check_field(file, body, field, kind)
        for name, fields in (("clauses", _CLAUSE), ("findings", _FINDING)):
            for number, part in enumerate(body[name]):
                check_field(file, {f"{name}.{number}": part}, f"{name}.{number}", dict)
                for field, kind in fields.items():
                    check_field(file, part, field, kind)
        check_field(file, body["machine"], "gpu_names", list)
        check_field(file, body["machine"], "cpu_cores", int)
    except UnreadableFileError as error:
        raise RecipeError(_refused(file, f"{error}")) from error
    figures = [clause["worst"] for clause in body["clauses"] if clause["bound"] is not None]
    if any(figure is None or (isinstance(figure, str) and figure not in ("inf", "-inf", "nan")) for figure in figures):
        raise RecipeError(_refused(file, f"{file} has a figure that is no number"))


def _refused(file: Path, message: str) -> Problem:
    return Problem("bad_certificate", message, file=str(file), hint="make one with trainspec certify --output FILE")
