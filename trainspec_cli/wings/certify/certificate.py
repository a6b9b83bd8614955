"""Write, sign and verify certificates.

`derive` computes every statement in a certificate that follows from its measurements. It is used both to write and to
verify certificates. Signatures are Ed25519. A private key is a PEM file (PKCS 8 or OpenSSH) that only its owner can
read, such as `ssh-keygen -t ed25519` creates. A public key is one line in OpenSSH format, with the fingerprint printed
by `ssh-keygen -l`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.node import read_private
from trainspec_cli.core.reading.files import UnreadableFileError, read_field, read_object, read_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import FieldError, canonical_json, read_record, to_plain
from trainspec_cli.recipe.results.certificate import Certificate, ClauseSummary, Finding, NotOffered, Signer
from trainspec_cli.run.job.job import versions
from trainspec_cli.wings.certify.cases import refused
from trainspec_cli.wings.certify.clauses import LEVELS, SECURITY, make_finding, read_clauses, spec_sha256, spec_version
from trainspec_cli.wings.certify.judge import checks
from trainspec_cli.wings.certify.other_engine import engine_checks

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = "trainspec.certificate/3"
FIRST_SCHEMA = "trainspec.certificate/1"
"""The first schema has no signer, and its findings lack values that later schemas include."""
MAY_BE_MISSING = ("PERF-1",)
"""Clauses that a complete certificate may omit, because the planner may have no prediction for the machine."""


def write_certificate(
    findings: Sequence[Finding],
    machine: Machine,
    *,
    date: str,
    measured_since: str = "",
    machine_id: str = "",
    engine: str = "",
    processes: int = 0,
    features: tuple[str, ...] = (),
    recipe: tuple[str, ...] = (),
    not_offered: tuple[NotOffered, ...] = (),
) -> Certificate:
    """Return the certificate for these findings. The other arguments are the fields of `Certificate`."""
    raw = Certificate(
        schema=SCHEMA,
        spec_version=spec_version(),
        spec_sha256=spec_sha256(),
        date=date,
        measured_since=measured_since,
        machine=machine,
        machine_id=machine_id,
        versions=versions(),
        engine=engine,
        processes=processes,
        features=features,
        recipe=recipe,
        not_offered=not_offered,
        whole=False,
        verdict="",
        clauses=(),
        findings=tuple(findings),
    )
    certificate = derive(raw)
    return replace(certificate, digest=digest(to_plain(certificate)))


def derive(raw: Certificate) -> Certificate:
    """Return the certificate after recomputing everything that follows from its measurements: findings, clauses,
    verdict, `whole`.

    Measurements (the values in findings, declined cases, the machine, versions and dates) are kept. Findings in the
    first schema are also kept, because their values do not suffice to compute them."""
    findings = raw.findings
    levels = {clause.id: (clause.level, clause.title) for clause in raw.clauses}
    if raw.schema != FIRST_SCHEMA:
        levels = {clause.id: (clause.level, clause.title) for clause in read_clauses().values()}
        plain = to_plain(raw)
        measured_on = {name: plain[name] for name in ("machine", "machine_id", "versions", "features")}
        machine_sha256 = hashlib.sha256(canonical_json(measured_on).encode()).hexdigest()
        again = [make_finding(one.clause, one.case, one.figures, of_engine=bool(raw.engine)) for one in findings]
        findings = tuple(
            replace(
                one,
                figures={name: _number(value) for name, value in one.figures.items()},
                machine_sha256=machine_sha256,
            )
            for one in again
        )
    summaries = []
    for id, (level, title) in levels.items():
        of_clause = [finding for finding in findings if finding.clause == id]
        worst = max(of_clause, key=lambda finding: finding.measured, default=None)
        summaries.append(
            ClauseSummary(
                id=id,
                level=level,
                title=title,
                cases=len(of_clause),
                failed=sum(not finding.passed for finding in of_clause),
                worst=_number(worst.measured) if worst else None,
                bound=worst.bound if worst else None,
                worst_case=worst.case if worst else None,
                grade=worst.grade if worst else "",
            )
        )
    is_broken = any(not finding.passed and levels[finding.clause][0] == "MUST" for finding in findings)
    return replace(
        raw,
        whole=is_whole(raw),
        verdict="not offered" if raw.not_offered and not findings else "broken" if is_broken else "kept",
        clauses=tuple(summaries),
        findings=findings,
    )


def _number(value: float | str) -> float | str:
    """Return the number in a form that JSON can represent, because JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_whole(made: Certificate) -> bool:
    """Return whether the certificate has exactly one finding for each case that the spec requires for its number of
    processes."""
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


def digest(body: JsonObject) -> str:
    """Return the SHA-256 of the canonical JSON without the digest and the signature."""
    content = {key: value for key, value in body.items() if key not in ("digest", "signature")}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


# Keys and signatures

MAX_KEY_BYTES = 2**14
FINGERPRINT = "SHA256:"
PURPOSE = b"trainspec certificate\n"
"""Prefix of the signed content, so that the signature of a certificate is not valid for anything else."""
MAKE_KEY = "ssh-keygen -t ed25519 -N '' -f FILE"


class NoKeyError(ValueError):
    """The text is not an Ed25519 public key."""


def _check_package() -> None:
    """Raise MachineError if the package for signatures is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        message = "signatures need the package cryptography, which is not installed"
        hint = "run pip install 'trainspec[signing]'"
        raise MachineError(Problem("missing_package", message, hint=hint, environment=True))


def read_key(file: Path) -> Ed25519PrivateKey:
    """Return a private key. Raises MachineError if other users can read the file, and RecipeError if it is not a
    key."""
    _check_package()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        content = read_private(file, MAX_KEY_BYTES)
    except OSError as error:
        hint = f"run chmod 600 {shlex.quote(str(file))}, or create a key with {MAKE_KEY}"
        message = f"the key {file} cannot be read: {error.strerror}"
        raise MachineError(Problem("secret", message, "--key", hint, file=str(file), environment=True)) from error
    is_openssh = content.startswith(b"-----BEGIN OPENSSH")
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = load(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(file, "contains no readable private key; keys with a password are not supported") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(file, "contains a key that is not Ed25519")
    return key


def read_fingerprint(wanted: str) -> str:
    """Return `wanted` if it is a fingerprint, otherwise the fingerprint of the public key in the file with that name.

    Raises RecipeError if it is neither."""
    if wanted.startswith(FINGERPRINT):
        return wanted
    file = Path(wanted)
    try:
        return _fingerprint_of(read_text(file, MAX_KEY_BYTES))
    except UnreadableFileError as error:
        hint = f"pass the file of a public key, or its fingerprint ({FINGERPRINT}...)"
        raise RecipeError(Problem("bad_key", f"--key: {error}", "--key", hint)) from error
    except NoKeyError as error:
        raise _no_key(file, f"contains no public key: {error}") from error


def _no_key(file: Path, why: str) -> RecipeError:
    return RecipeError(Problem("bad_key", f"{file} {why}", hint=f"create one with {MAKE_KEY}", file=str(file)))


def _fingerprint_of(line: str) -> str:
    """Return the fingerprint `SHA256:...` of a public key in OpenSSH format. Raises NoKeyError."""
    words = line.split()
    if len(words) < 2 or words[0] != "ssh-ed25519":
        raise NoKeyError("a public key is a line that starts with ssh-ed25519")
    try:
        content = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoKeyError("the public key is not base64") from error
    return FINGERPRINT + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def sign_certificate(certificate: Certificate, key: Ed25519PrivateKey) -> Certificate:
    """Return the certificate with its signer, a new digest and the signature."""
    from cryptography.hazmat.primitives import serialization

    encoding = serialization.Encoding.OpenSSH
    line = key.public_key().public_bytes(encoding, serialization.PublicFormat.OpenSSH).decode()
    named = replace(certificate, signer=Signer(line, _fingerprint_of(line)))
    named = replace(named, digest=digest(to_plain(named)))
    return replace(named, signature=base64.b64encode(key.sign(_signed_content(to_plain(named)))).decode())


def _signed_content(body: JsonObject) -> bytes:
    """Return the content to sign, which is the canonical JSON of everything except the signature."""
    return PURPOSE + canonical_json({key: value for key, value in body.items() if key != "signature"}).encode()


def is_signed(signer: Signer, body: JsonObject, signature: str) -> bool:
    """Return whether this signature of the certificate was made by the signer.

    Raises NoKeyError if the public key is invalid, and MachineError if the package for signatures is missing."""
    _check_package()
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if _fingerprint_of(signer.public_key) != signer.fingerprint:
        raise NoKeyError("the fingerprint does not match the public key")
    try:
        key = serialization.load_ssh_public_key(signer.public_key.encode())
        key.verify(base64.b64decode(signature, validate=True), _signed_content(body))  # type: ignore[call-arg]
    except (InvalidSignature, binascii.Error):
        return False
    except (ValueError, UnsupportedAlgorithm) as error:
        raise NoKeyError("the public key is not Ed25519") from error
    return True


# Verification


def verify(file: Path, signed_by: str = "") -> Certificate:
    """Return the certificate in `file` after recomputing every statement from its measurements.

    `signed_by`: the fingerprint of the key that must have signed it; if empty, any key or a missing signature is
    accepted. Raises RecipeError if the file is not a certificate, was altered, contradicts itself or has a different
    signer, and MachineError if the package for signatures is missing."""
    try:
        body = read_object(file)
        schema = read_field(file, body, "schema", str)
        stated = read_field(file, body, "digest", str)
    except UnreadableFileError as error:
        raise _refused(file, f"is not a certificate: {error}") from error
    if schema not in (SCHEMA, FIRST_SCHEMA):
        raise _refused(file, f"has the schema {schema}; this version reads {SCHEMA} and {FIRST_SCHEMA}")
    try:
        found = digest(body)
    except ValueError:  # canonical JSON cannot represent NaN, infinity or lone surrogates
        found = ""
    if found != stated:
        raise _refused(file, "was altered: its digest does not match its content")
    try:
        certificate = read_record(Certificate, body)
    except FieldError as error:  # a valid digest proves nothing, because anyone can compute it
        raise _refused(file, f"is damaged: {error}") from error
    if schema == FIRST_SCHEMA:  # ignore these fields, which the schema does not have
        certificate = replace(certificate, machine_id="", signer=None, signature="")
    signer = certificate.signer
    if signer is None and certificate.signature:
        raise _refused(file, "was altered: it has a signature but no signer")
    try:
        if signer is not None and not is_signed(signer, body, certificate.signature):
            raise _refused(file, "was altered: its signature does not match its content")
    except NoKeyError as error:
        raise _refused(file, f"has an invalid signer: {error}") from error
    if contradiction := _contradiction(certificate):
        raise _refused(file, contradiction)
    if signed_by and (signer is None or signer.fingerprint != signed_by):
        by = f"is signed by {signer.fingerprint}" if signer else "is not signed"
        raise _refused(file, f"{by}; a signature by {signed_by} is required")
    return certificate


def _contradiction(certificate: Certificate) -> str | None:
    """Return the first statement that contradicts the measurements or the spec; None if there is no contradiction."""
    clauses = {clause.id: clause.level for clause in read_clauses().values()}
    known = {clause.id for clause in certificate.clauses}
    if certificate.schema != FIRST_SCHEMA:
        if (certificate.spec_version, certificate.spec_sha256) != (spec_version(), spec_sha256()):
            made_by = certificate.versions.get("trainspec", "that made it")
            return (
                f"is for the training spec {certificate.spec_version} ({certificate.spec_sha256[:16]}), and this "
                f"trainspec has {spec_version()} ({spec_sha256()[:16]}): verify it with trainspec {made_by}"
            )
        known = set(clauses)
        if certificate.measured_since > certificate.date:  # ISO 8601 dates can be compared as text
            since = certificate.measured_since
            made = certificate.date
            return f"contradicts itself: measured_since is {since!r}, after date, {made!r}"
    for number, finding in enumerate(certificate.findings):
        path = f"findings[{number}]"
        if finding.clause not in known:
            return f"contradicts itself: {path}.clause is {finding.clause!r}, which the spec does not have"
        if certificate.schema == FIRST_SCHEMA and finding.clause in clauses:  # `derive` keeps these as stated
            again = make_finding(finding.clause, finding.case, finding.figures)
            if finding.bound != again.bound:
                return f"contradicts the spec: {path}.bound is {finding.bound}, not {again.bound}"
            if finding.passed and again.bound is not None and not again.measured <= again.bound:
                return f"contradicts itself: {path}.passed is True, but its values exceed the bound"
    for number, clause in enumerate(certificate.clauses):
        level = clauses.get(clause.id, clause.level)
        if clause.level != level:
            return f"contradicts the spec: clauses[{number}].level is {clause.level!r}, not {level!r}"
    found = _first_difference(to_plain(certificate), to_plain(derive(certificate)))
    return found and f"contradicts itself: {found}"


def _first_difference(stated: JsonValue, follows: JsonValue, path: str = "") -> str | None:
    """Return the path of the first value that differs, with the stated value and the one that follows from the
    findings."""
    if isinstance(stated, dict) and isinstance(follows, dict):
        pairs = [(f"{path}.{key}" if path else key, stated.get(key), follows.get(key)) for key in stated | follows]
    elif isinstance(stated, list) and isinstance(follows, list) and len(stated) == len(follows):
        pairs = [(f"{path}[{number}]", stated[number], follows[number]) for number in range(len(stated))]
    else:
        return None if stated == follows else f"{path} is {stated!r}, but its findings give {follows!r}"
    return next((found for name, one, other in pairs if (found := _first_difference(one, other, name))), None)


def _refused(file: Path, why: str) -> RecipeError:
    hint = "create one with trainspec certify --output FILE"
    return RecipeError(Problem("bad_certificate", f"{file} {why}", file=str(file), hint=hint))
