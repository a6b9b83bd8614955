"""Keys that certificates are signed with."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def make_key(file: Path) -> str:
    """Write a private key to `file` and its public key to `file`.pub, as ssh-keygen does; return its fingerprint."""
    from trainspec_cli.wings.certify.certificate import read_fingerprint

    key = Ed25519PrivateKey.generate()
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    openssh = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    file.touch(0o600)
    file.write_bytes(key.private_bytes(*pem))
    public = file.with_name(f"{file.name}.pub")
    public.write_bytes(key.public_key().public_bytes(*openssh))
    return read_fingerprint(str(public))
