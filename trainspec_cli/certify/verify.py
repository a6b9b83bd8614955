"""Read the certificates of others: every statement is computed again from the measurements, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from trainspec_cli.certify.cases import refused
from trainspec_cli.certify.certificate import (
    FIRST_SCHEMA,
    SCHEMA,
    derive,
    digest,
    read_clauses,
    signed_content,
    spec_sha256,
    spec_version,
)
from trainspec_cli.certify.engine.cases import engine_checks
from trainspec_cli.certify.judge import checks
from trainspec_cli.certify.keys import NoKeyError, is_signed
from trainspec_cli.certify.standing import LEVELS, SECURITY, stand
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.json_value import JsonObject, JsonValue
from trainspec_cli.reading.files import UnreadableFileError, read_field, read_object
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.records import FieldError, read_record
from trainspec_cli.spec.results.certificate import Certificate

CLOCKS = timedelta(days=1)
"""The clocks of two machines, in any zones, differ by less."""
MAY_BE_MISSING = ("PERF-1",)
"""Not measured where nothing was predicted for the machine."""


def _today() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True)
class Requirements:
    """What a certificate has to be, beyond consistent; empty texts ask for nothing."""

    fingerprint: str = ""
    """The key that it has to be signed by."""
    machine_id: str = ""
    """The machine that it has to speak of."""
    today: date = field(default_factory=_today)


def is_whole(made: Certificate) -> bool:
    """Return whether each case that belongs to the spec, on this many processes, has one finding, and no other has."""
    launched = set() if made.engine else {*SECURITY, *LEVELS}
    found = [(finding.clause, finding.case) for finding in made.findings if finding.clause not in launched]
    of_launches = {finding.clause for finding in made.findings if finding.clause in launched}
    is_part = launched - of_launches - {*MAY_BE_MISSING} or not found
    if is_part or made.recipe or made.not_offered or made.schema == FIRST_SCHEMA:
        return False
    if made.engine:
        wanted = [(check.clause, check.run.name) for check in engine_checks(made.processes)]
    else:
        wanted = [(check.clause, check.run.name) for check in checks(made.processes, features=made.features)]
        wanted += [("LEGAL-1", name) for name in refused(made.processes)]
    return sorted(found) == sorted(wanted)


def verify(file: Path, asked: Requirements | None = None) -> Certificate:
    """Return the certificate in `file`. Raises RecipeError where it is none, was altered, contradicts itself or is not
    the one that is asked for; MachineError where the package is missing that checks its signature."""
    try:
        body = read_object(file)
        schema, found = read_field(file, body, "schema", str), read_field(file, body, "digest", str)
    except UnreadableFileError as error:
        raise _refused(file, f"is no certificate: {error}") from error
    if schema not in (SCHEMA, FIRST_SCHEMA):
        raise _refused(file, f"is of the schema {schema}, this version reads {SCHEMA} and {FIRST_SCHEMA}")
    if found != _digest_or_none(body):
        raise _refused(file, "was altered: its digest is not that of its content")
    certificate = _read(file, body)
    _check_signature(file, certificate, body)
    if contradiction := _contradiction(certificate):
        raise _refused(file, contradiction)
    for why in _objections(certificate, asked or Requirements()):
        raise _refused(file, why)
    return certificate


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
        raise _refused(file, f"is damaged: {error}") from error
    if certificate.schema == FIRST_SCHEMA:  # which has no such fields, whatever a file of it holds
        return replace(certificate, machine_id="", signer=None, signature="")
    return certificate


def _contradiction(certificate: Certificate) -> str | None:
    """Return the first statement that its own measurements contradict; None where all of them agree."""
    clauses = {clause.id: clause.level for clause in read_clauses().values()}
    known = {clause.id for clause in certificate.clauses}
    if certificate.schema != FIRST_SCHEMA:
        if (certificate.spec_version, certificate.spec_sha256) != (spec_version(), spec_sha256()):
            made_by = certificate.versions.get("trainspec", "that made it")
            return (
                f"is of the training spec {certificate.spec_version} ({certificate.spec_sha256[:16]}), and this "
                f"trainspec has {spec_version()} ({spec_sha256()[:16]}): verify it with trainspec {made_by}"
            )
        known = set(clauses)
    for number, finding in enumerate(certificate.findings):
        path = f"findings[{number}]"
        if finding.clause not in known:
            return f"contradicts itself: {path}.clause is {finding.clause!r}, which the spec does not have"
        if certificate.schema == FIRST_SCHEMA and finding.clause in clauses:  # `derive` leaves its findings as they are
            again = stand(finding.clause, finding.case, finding.figures)
            if finding.bound != again.bound:
                return f"contradicts the spec: {path}.bound is {finding.bound}, not {again.bound}"
            if finding.passed and again.bound is not None and not again.measured <= again.bound:
                return f"contradicts itself: {path}.passed is True, and its figures are over the bound"
    for number, clause in enumerate(certificate.clauses):
        level = clauses.get(clause.id, clause.level)
        if clause.level != level:
            return f"contradicts the spec: clauses[{number}].level is {clause.level!r}, not {level!r}"
    expected = derive(certificate, whole=is_whole(certificate))
    found = _first_difference(to_plain(certificate), to_plain(expected))
    return found and f"contradicts itself: {found}"


def _first_difference(stated: JsonValue, follows: JsonValue, path: str = "") -> str | None:
    """Return the path of the first leaf that differs, with what is stated and what follows from the findings."""
    if isinstance(stated, dict) and isinstance(follows, dict):
        pairs = [(f"{path}.{key}" if path else key, stated.get(key), follows.get(key)) for key in stated | follows]
    elif isinstance(stated, list) and isinstance(follows, list) and len(stated) == len(follows):
        pairs = [(f"{path}[{number}]", stated[number], follows[number]) for number in range(len(stated))]
    else:
        return None if stated == follows else f"{path} is {stated!r}, and {follows!r} follows from its findings"
    return next((found for name, one, other in pairs if (found := _first_difference(one, other, name))), None)


def _check_signature(file: Path, certificate: Certificate, body: JsonObject) -> None:
    if certificate.signer is None:
        if certificate.signature:
            raise _refused(file, "was altered: it has a signature and names nobody who signed")
        return
    try:
        if not is_signed(certificate.signer, signed_content(body), certificate.signature):
            raise _refused(file, "was altered: the signature is not that of its content")
    except NoKeyError as error:
        raise _refused(file, f"is signed by no key that is known here: {error}") from error


def _objections(certificate: Certificate, asked: Requirements) -> Iterator[str]:
    """Yield each reason for which the certificate is not the one that is asked for."""
    if certificate.schema != FIRST_SCHEMA:
        yield from _wrong_dates(certificate, asked.today)
    if asked.fingerprint and certificate.signer is None:
        yield f"is not signed; a signature by {asked.fingerprint} is needed"
    elif asked.fingerprint and certificate.signer and certificate.signer.fingerprint != asked.fingerprint:
        yield f"is signed by {certificate.signer.fingerprint}; a signature by {asked.fingerprint} is needed"
    if asked.machine_id and certificate.machine_id != asked.machine_id:
        yield f"is of the machine {certificate.machine_id or '(unknown)'}, and not of {asked.machine_id}"


def _wrong_dates(certificate: Certificate, today: date) -> Iterator[str]:
    try:
        made = date.fromisoformat(certificate.date)
        since = date.fromisoformat(certificate.measured_since) if certificate.measured_since else made
    except ValueError:
        yield f"is damaged: its dates are {certificate.date!r} and {certificate.measured_since!r}; days are needed"
        return
    if since > made:
        yield f"contradicts itself: measured_since is {since}, after date, {made}"
    if made > today + CLOCKS:
        yield f"is dated {made}, and today is {today}: one of the two clocks is wrong"


def _refused(file: Path, why: str) -> RecipeError:
    hint = "make one with trainspec certify --output FILE"
    return RecipeError(Problem("bad_certificate", f"{file} {why}", file=str(file), hint=hint))
