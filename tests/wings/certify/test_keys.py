"""Keys and signatures of certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from lab.keys import make_key

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Signer
from trainspec_cli.wings.certify import certificate as module
from trainspec_cli.wings.certify.certificate import (
    NoKeyError,
    is_signed,
    read_fingerprint,
    read_key,
    sign_certificate,
    write_certificate,
)


def signed_by(key: Path) -> tuple[Signer, JsonObject, str]:
    """Return the signer, the content and the signature of a certificate that the key has signed."""
    made = sign_certificate(write_certificate((), Machine("box", 2, 2**34), date="2026-01-02"), read_key(key))
    assert made.signer is not None
    return made.signer, to_plain(made), made.signature


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_keys_and_fingerprints_are_those_of_openssh(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "theirs"], check=True)
    signer, body, signature = signed_by(tmp_path / "theirs")
    listed = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "theirs.pub"], capture_output=True, text=True)
    assert signer.fingerprint == listed.stdout.split()[1] == read_fingerprint(str(tmp_path / "theirs.pub"))
    assert signer.public_key == " ".join((tmp_path / "theirs.pub").read_text().split()[:2])
    assert is_signed(signer, body, signature)


@pytest.mark.parametrize(
    ("content", "mode", "code"),
    [
        (b"hello", 0o600, "bad_key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", 0o600, "bad_key"),
        (b"", 0o640, "secret"),
        (None, 0o600, "secret"),
    ],
)
def test_a_file_without_a_private_key_is_refused(tmp_path: Path, content: bytes | None, mode: int, code: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises((MachineError, RecipeError)) as error:
        read_key(file)
    assert error.value.problems[0].code == code


def test_other_kinds_of_keys_and_keys_with_a_password_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem, serialization.NoEncryption())
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(*pem, serialization.BestAvailableEncryption(b"word"))
    for content, words in ((other, "Ed25519"), (locked, "password")):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(RecipeError, match=words) as error:
            read_key(tmp_path / "key")
        assert error.value.problems[0].code == "bad_key"


def test_a_signature_is_valid_for_one_certificate_and_one_key(tmp_path: Path) -> None:
    make_key(tmp_path / "a")
    make_key(tmp_path / "b")
    signer, body, signature = signed_by(tmp_path / "a")
    other, _, _ = signed_by(tmp_path / "b")
    assert is_signed(signer, body, signature)
    assert not is_signed(signer, body | {"date": "2026-01-03"}, signature)
    assert not is_signed(other, body, signature)
    assert not is_signed(signer, body, "not base64")
    with pytest.raises(NoKeyError, match="fingerprint"):
        is_signed(Signer(signer.public_key, other.fingerprint), body, signature)


@pytest.mark.parametrize("line", ["", "ssh-ed25519", "ssh-rsa AAAA", "ssh-ed25519 AAAA", "ssh-ed25519 é"])
def test_an_invalid_public_key_is_refused(line: str) -> None:
    with pytest.raises(NoKeyError):
        is_signed(Signer(line, module._fingerprint_of(line)), {}, "AAAA")


def test_a_signer_is_named_by_a_public_key_file_or_a_fingerprint(tmp_path: Path) -> None:
    fingerprint = make_key(tmp_path / "a")
    assert read_fingerprint(fingerprint) == fingerprint
    for name in (str(tmp_path / "a"), "nobody.pub"):
        with pytest.raises(RecipeError) as error:
            read_fingerprint(name)
        assert error.value.problems[0].code == "bad_key"


def test_a_missing_package_is_reported_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(tmp_path / "mine")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as error:
        read_key(tmp_path / "mine")
    (problem,) = error.value.problems
    assert problem.code == "missing_package" and "'trainspec[signing]'" in problem.hint
