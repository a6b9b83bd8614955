"""Certificates of others: which are accepted, and why the others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from trainspec_cli.certify import keys
from trainspec_cli.certify.certificate import Terms, digest, sign_certificate, write_certificate
from trainspec_cli.certify.verify import Requirements, verify
from trainspec_cli.errors import RecipeError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.certificate import Certificate, Finding

MACHINE = Machine("box", 2, 2**34)
FINDING = Finding("NUM-1", "dense-fp32-tp2", True, {"worst_gradient_error": 5e-7, "parameter": "p"}, 1e-5)
TERMS = Terms("2026-12-31", "nonce 1", "2026-01-01", "ab" * 16)
DAY = date(2026, 6, 1)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    keys.make_key(tmp_path / "key")
    return tmp_path / "key"


def made(terms: Terms = TERMS) -> Certificate:
    return write_certificate([FINDING], MACHINE, date="2026-01-02", whole=True, terms=terms)


def written(folder: Path, certificate: Certificate | JsonObject) -> Path:
    file = folder / "certificate.json"
    file.write_text(json.dumps(certificate if isinstance(certificate, dict) else to_plain(certificate)))
    return file


def refusal(file: Path, asked: Requirements) -> str:
    with pytest.raises(RecipeError) as error:
        verify(file, asked)
    (problem,) = error.value.problems
    assert problem.code == "bad_certificate" and problem.file == str(file)
    return problem.message


def test_a_signed_certificate_is_read_again_as_it_was(tmp_path: Path, key_file: Path) -> None:
    signed = sign_certificate(made(), keys.read_key(key_file))
    fingerprint = keys.read_fingerprint(f"{key_file}.pub")
    found = verify(written(tmp_path, signed), Requirements(fingerprint, "nonce 1", "ab" * 16, DAY))
    assert found == signed
    assert found.signer and found.signer.fingerprint == fingerprint


CHANGES: dict[str, Callable[[JsonObject], object]] = {
    "a finding": lambda body: body["findings"][0].update(passed=False),  # type: ignore[index, union-attr, call-overload]
    "the expiry": lambda body: body.update(valid_until="2030-01-01"),
    "the challenge": lambda body: body.update(challenge="nonce 2"),
    "the machine": lambda body: body.update(machine_id="cd" * 16),
    "a field that nobody reads": lambda body: body.update(note="x"),
    "the signature": lambda body: body.update(signature="AAAA"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_altered_is_refused_although_its_digest_was_made_anew(
    tmp_path: Path, key_file: Path, change: str
) -> None:
    body = to_plain(sign_certificate(made(), keys.read_key(key_file)))
    CHANGES[change](body)
    body["digest"] = digest(body)
    assert "the signature is not that of its content" in refusal(written(tmp_path, body), Requirements(today=DAY))


def test_another_key_cannot_take_the_signers_place(tmp_path: Path, key_file: Path) -> None:
    other = keys.make_key(tmp_path / "other")
    body = to_plain(sign_certificate(made(), keys.read_key(key_file)))
    swapped = body | {"signer": to_plain(other)}
    swapped["digest"] = digest(swapped)
    assert "the signature is not that of its content" in refusal(written(tmp_path, swapped), Requirements(today=DAY))
    signed = sign_certificate(made(), keys.read_key(tmp_path / "other"))
    asked = Requirements(keys.read_fingerprint(f"{key_file}.pub"), today=DAY)
    assert f"is signed by {other.fingerprint}; a signature by" in refusal(written(tmp_path, signed), asked)


def test_a_certificate_whose_signature_was_taken_off_is_one_that_nobody_signed(tmp_path: Path, key_file: Path) -> None:
    body = to_plain(sign_certificate(made(), keys.read_key(key_file)))
    fingerprint = keys.read_fingerprint(f"{key_file}.pub")
    bare = {**body, "signer": None}
    bare["digest"] = digest(bare)
    assert "names nobody who signed" in refusal(written(tmp_path, bare), Requirements(today=DAY))
    bare["signature"] = ""
    assert verify(written(tmp_path, bare), Requirements(today=DAY)).signer is None
    assert "is not signed; a signature by SHA256:" in refusal(
        written(tmp_path, bare), Requirements(fingerprint, today=DAY)
    )
    assert "the signature is not" in refusal(written(tmp_path, body | {"signature": ""}), Requirements(today=DAY))


def test_a_replayed_one_and_one_of_another_machine_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, made())
    assert "it answers the challenge 'nonce 1', and may have been made before" in refusal(
        file, Requirements(challenge="nonce 2", today=DAY)
    )
    assert f"is of the machine {'ab' * 16}, and not of here" in refusal(
        file, Requirements(machine_id="here", today=DAY)
    )
    plain = written(tmp_path, made(Terms()))
    assert "it answers none" in refusal(plain, Requirements(challenge="nonce 2", today=DAY))
    assert "is of the machine (unknown)" in refusal(plain, Requirements(machine_id="here", today=DAY))


@pytest.mark.parametrize(
    ("today", "words"),
    [
        (date(2026, 1, 1), None),  # it is tomorrow already where it was made
        (date(2026, 12, 31), None),
        (date(2027, 1, 1), "has expired: it was valid until 2026-12-31"),
        (date(2025, 12, 31), "is dated 2026-01-02, and today is 2025-12-31"),
    ],
)
def test_dates(tmp_path: Path, today: date, words: str | None) -> None:
    file = written(tmp_path, made())
    if words is None:
        assert verify(file, Requirements(today=today)) == made()
    else:
        assert words in refusal(file, Requirements(today=today))


def test_dates_that_are_none_are_refused(tmp_path: Path) -> None:
    assert "days are needed" in refusal(
        written(tmp_path, made(replace(TERMS, valid_until="soon"))), Requirements(today=DAY)
    )


def test_the_first_schema_is_read_as_what_it_is(tmp_path: Path) -> None:
    """It has neither a signer nor dates that bind, whatever somebody has written into it."""
    body = to_plain(made()) | {"schema": "trainspec.certificate/1", "valid_until": "2020-01-01", "challenge": "c"}
    body["signer"], body["signature"] = {"public_key": "ssh-ed25519 x", "fingerprint": "SHA256:x"}, "AAAA"
    body["digest"] = digest(body)
    found = verify(written(tmp_path, body), Requirements(today=DAY))
    assert (found.signer, found.signature, found.valid_until, found.challenge, found.machine_id) == (None, *[""] * 4)
    assert found.findings == (FINDING,)
    assert "is not signed" in refusal(written(tmp_path, body), Requirements("SHA256:x", today=DAY))
    assert "is not the answer" in refusal(written(tmp_path, body), Requirements(challenge="c", today=DAY))
