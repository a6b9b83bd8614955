"""Read the certificates of others: altered, replayed and expired ones are refused, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from trainspec_cli.certify.certificate import FIRST_SCHEMA, SCHEMA, digest, signed_content
from trainspec_cli.certify.keys import NoKeyError, is_signed
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.reading.files import UnreadableFileError, read_field, read_object
from trainspec_cli.spec.records import FieldError, read_record
from trainspec_cli.spec.results.certificate import Certificate

CLOCKS = timedelta(days=1)
"""The clocks of two machines, in any zones, differ by less."""


def _today() -> date:
    return datetime.now(UTC).date()


@dataclass(frozen=True)
class Requirements:
    """What a certificate has to be, beyond unaltered; empty texts ask for nothing."""

    fingerprint: str = ""
    """The key that it has to be signed by."""
    challenge: str = ""
    """The words that it has to answer."""
    machine_id: str = ""
    """The machine that it has to speak of."""
    today: date = field(default_factory=_today)


def verify(file: Path, asked: Requirements | None = None) -> Certificate:
    """Return the certificate in `file`. Raises RecipeError where it is none, was altered, has expired or is not the one
    that is asked for; MachineError where the package is missing that checks its signature."""
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
    figures = [clause.worst for clause in certificate.clauses if clause.bound is not None]
    if any(figure is None or (isinstance(figure, str) and figure not in ("inf", "-inf", "nan")) for figure in figures):
        raise _refused(file, "has a figure that is no number")
    if certificate.schema == FIRST_SCHEMA:  # which has no such fields, whatever a file of it holds
        return replace(certificate, valid_until="", challenge="", machine_id="", signer=None, signature="")
    return certificate


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
    if asked.challenge and certificate.challenge != asked.challenge:
        answered = f"answers the challenge {certificate.challenge!r}" if certificate.challenge else "answers none"
        yield f"is not the answer to the challenge {asked.challenge!r}: it {answered}, and may have been made before"
    if asked.machine_id and certificate.machine_id != asked.machine_id:
        yield f"is of the machine {certificate.machine_id or '(unknown)'}, and not of {asked.machine_id}"


def _wrong_dates(certificate: Certificate, today: date) -> Iterator[str]:
    try:
        made = date.fromisoformat(certificate.date)
        until = date.fromisoformat(certificate.valid_until) if certificate.valid_until else today
    except ValueError:
        yield f"is damaged: its dates are {certificate.date!r} and {certificate.valid_until!r}; days are needed"
        return
    if until < today:
        yield f"has expired: it was valid until {until}, and today is {today}"
    if made > today + CLOCKS:
        yield f"is dated {made}, and today is {today}: one of the two clocks is wrong"


def _refused(file: Path, why: str) -> RecipeError:
    hint = "make one with trainspec certify --output FILE"
    return RecipeError(Problem("bad_certificate", f"{file} {why}", file=str(file), hint=hint))
