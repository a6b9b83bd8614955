"""Ed25519 keys: made, read from files, and used to sign certificates and to check their signatures.

A private key is a PEM file (PKCS 8) that its user alone may read; OpenSSH's form is read too. A public key is one line
as OpenSSH has it, and its fingerprint is the one that `ssh-keygen -l` prints.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.reading.files import UnreadableFileError, read_text
from trainspec_cli.rundir.files import write_text
from trainspec_cli.spec.results.certificate import Signer
from trainspec_cli.trust import create_private, read_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_KEY_BYTES = 2**14
PACKAGE, EXTRA = "cryptography", "signing"
SUFFIX = ".pub"
FINGERPRINT = "SHA256:"
PURPOSE = b"trainspec certificate\n"
"""Stands before what is signed, so that a signature of a certificate is of nothing else."""


class NoKeyError(ValueError):
    """A text is no public key of Ed25519."""


def check_package() -> None:
    """Raise MachineError where the package that signs is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        message = f"signatures need the package {PACKAGE}, which is not installed"
        hint = f"type pip install 'trainspec[{EXTRA}]'"
        raise MachineError(Problem("missing_package", message, hint=hint, environment=True))


def make_key(file: Path) -> Signer:
    """Write a new private key to `file` and its public key beside it. Raises RecipeError where a file is there."""
    check_package()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public, signer = file.with_name(file.name + SUFFIX), signer_of(key)
    try:
        if public.exists():
            raise FileExistsError(0, "there is a public key of this name", str(public))
        create_private(file, secret)
        write_text(public, f"{signer.public_key}\n")
    except OSError as error:
        why = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror
        message = f"--make-key {file}: {error.filename or file} cannot be written: {why}"
        hint = "choose another name, in a folder that is there; a key that is overwritten is lost"
        raise RecipeError(Problem("output_exists", message, "--make-key", hint)) from error
    return signer


def read_key(file: Path) -> Ed25519PrivateKey:
    """Return a private key. Raises MachineError where others may read the file, RecipeError where it holds none."""
    check_package()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        content = read_private(file, MAX_KEY_BYTES)
    except OSError as error:
        hint = f"type chmod 600 {shlex.quote(str(file))}, or make a key with trainspec certify --make-key FILE"
        message = f"the key {file} cannot be read: {error.strerror}"
        raise MachineError(Problem("secret", message, "--sign", hint, file=str(file), environment=True)) from error
    is_openssh = content.startswith(b"-----BEGIN OPENSSH")
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = load(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(file, "holds no private key that is read here, such as one without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(file, "holds a key of another kind than Ed25519")
    return key


def _no_key(file: Path, why: str) -> RecipeError:
    hint = "make one with trainspec certify --make-key FILE"
    return RecipeError(Problem("bad_key", f"{file} {why}", hint=hint, file=str(file)))


def signer_of(key: Ed25519PrivateKey) -> Signer:
    from cryptography.hazmat.primitives import serialization

    openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = key.public_key().public_bytes(*openssh).decode()
    return Signer(line, fingerprint_of(line))


def fingerprint_of(line: str) -> str:
    """Return `SHA256:...` of a public key as OpenSSH writes it. Raises NoKeyError."""
    words = line.split()
    if len(words) < 2 or words[0] != "ssh-ed25519":
        raise NoKeyError("a public key is a line that begins with ssh-ed25519")
    try:
        digest = hashlib.sha256(base64.b64decode(words[1], validate=True)).digest()
    except (binascii.Error, ValueError) as error:
        raise NoKeyError("the public key is not base64") from error
    return FINGERPRINT + base64.b64encode(digest).decode().rstrip("=")


def read_fingerprint(wanted: str) -> str:
    """Return the fingerprint that `wanted` is, or that of the public key in the file of this name.

    Raises RecipeError where it is neither.
    """
    if wanted.startswith(FINGERPRINT):
        return wanted
    file = Path(wanted)
    try:
        return fingerprint_of(read_text(file, MAX_KEY_BYTES))
    except UnreadableFileError as error:
        hint = "give the file of a public key, or its fingerprint (SHA256:...)"
        raise RecipeError(Problem("bad_key", f"--signed-by: {error}", "--signed-by", hint)) from error
    except NoKeyError as error:
        raise _no_key(file, f"holds no public key: {error}") from error


def sign(key: Ed25519PrivateKey, content: str) -> str:
    """Return the signature of a certificate's content, in base64."""
    return base64.b64encode(key.sign(PURPOSE + content.encode())).decode()


def is_signed(signer: Signer, content: str, signature: str) -> bool:
    """Return whether `signature` is the signer's of this content. Raises NoKeyError where the signer has no such key,
    MachineError where the package is missing that checks it."""
    check_package()
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if fingerprint_of(signer.public_key) != signer.fingerprint:
        raise NoKeyError("the fingerprint is not that of the public key")
    try:
        key = serialization.load_ssh_public_key(signer.public_key.encode())
        return _verifies(key, base64.b64decode(signature, validate=True), content)  # type: ignore[arg-type]
    except (InvalidSignature, binascii.Error):
        return False
    except (ValueError, UnsupportedAlgorithm) as error:
        raise NoKeyError("its public key is none of Ed25519") from error


def _verifies(key: Ed25519PublicKey, signature: bytes, content: str) -> bool:
    """Return True. Raises cryptography's InvalidSignature."""
    key.verify(signature, PURPOSE + content.encode())
    return True
