"""Keys in files: how they are made, which are read, and that a signature is of one text by one key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trainspec_cli.certify import keys
from trainspec_cli.errors import MachineError, RecipeError
from trainspec_cli.spec.results.certificate import Signer


def test_a_key_is_private_and_its_public_half_stands_beside_it(tmp_path: Path) -> None:
    signer = keys.make_key(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "mine").read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert (tmp_path / "mine.pub").read_text() == f"{signer.public_key}\n"
    assert keys.signer_of(keys.read_key(tmp_path / "mine")) == signer


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keys.make_key(tmp_path / "mine")
    secret = (tmp_path / "mine").read_bytes()
    for left in ("mine", "mine.pub"):
        (tmp_path / ({"mine", "mine.pub"} - {left}).pop()).unlink()
        with pytest.raises(RecipeError, match="there is a file of this name"):
            keys.make_key(tmp_path / "mine")
        (tmp_path / left).unlink()
        keys.make_key(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() != secret
    with pytest.raises(RecipeError, match="No such file or directory"):
        keys.make_key(tmp_path / "no" / "folder" / "mine")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_keys_and_fingerprints_are_those_of_openssh(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "theirs"], check=True)
    signer = keys.signer_of(keys.read_key(tmp_path / "theirs"))
    listed = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "theirs.pub"], capture_output=True, text=True)
    assert signer.fingerprint == listed.stdout.split()[1] == keys.read_fingerprint(str(tmp_path / "theirs.pub"))
    own = keys.make_key(tmp_path / "mine")
    listed = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "mine.pub"], capture_output=True, text=True)
    assert listed.stdout.split()[1] == own.fingerprint


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"hello", 0o600, "holds no private key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", 0o600, "no private key"),
        (b"", 0o640, "others may read it"),
        (None, 0o600, "cannot be read: No such file"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes | None, mode: int, words: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises((MachineError, RecipeError), match=words):
        keys.read_key(file)


def test_keys_of_another_kind_and_with_a_password_are_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem, serialization.NoEncryption())
    locked = ed25519.Ed25519PrivateKey.generate().private_bytes(*pem, serialization.BestAvailableEncryption(b"word"))
    for content, words in ((other, "another kind than Ed25519"), (locked, "without a password")):
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(RecipeError, match=words):
            keys.read_key(tmp_path / "key")


def test_a_signature_is_of_one_text_by_one_key(tmp_path: Path) -> None:
    signer, other = keys.make_key(tmp_path / "a"), keys.make_key(tmp_path / "b")
    signature = keys.sign(keys.read_key(tmp_path / "a"), "text")
    assert keys.is_signed(signer, "text", signature)
    assert not keys.is_signed(signer, "text ", signature)
    assert not keys.is_signed(other, "text", signature)
    assert not keys.is_signed(signer, "text", "not base64")
    with pytest.raises(keys.NoKeyError, match="not that of the public key"):
        keys.is_signed(Signer(signer.public_key, other.fingerprint), "text", signature)


@pytest.mark.parametrize("line", ["", "ssh-ed25519", "ssh-rsa AAAA", "ssh-ed25519 AAAA", "ssh-ed25519 é"])
def test_a_public_key_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(keys.NoKeyError):
        keys.is_signed(Signer(line, keys.fingerprint_of(line)), "text", "AAAA")


def test_who_is_to_have_signed_is_named_by_a_file_or_a_fingerprint(tmp_path: Path) -> None:
    signer = keys.make_key(tmp_path / "a")
    assert keys.read_fingerprint(signer.fingerprint) == signer.fingerprint
    assert keys.read_fingerprint(str(tmp_path / "a.pub")) == signer.fingerprint
    with pytest.raises(RecipeError, match="holds no public key"):
        keys.read_fingerprint(str(tmp_path / "a"))
    with pytest.raises(RecipeError, match="there is no file") as error:
        keys.read_fingerprint("nobody.pub")
    assert "SHA256:" in error.value.problems[0].hint


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="cryptography, which is not installed") as error:
        keys.make_key(tmp_path / "mine")
    assert error.value.problems[0].hint == "type pip install 'trainspec[signing]'"
