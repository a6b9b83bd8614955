"""Tell this machine from others: by the identity that the system keeps of it, which is not published as it is."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

from trainspec_cli.core.node import cpu_name

SYSTEM_IDS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_RANDOM = 1 << 40
"""The bit of an address by which uuid marks one that it has drawn, since the machine shows none."""
_PURPOSE = "trainspec machine 1"


def machine_identity(files: tuple[Path, ...] = SYSTEM_IDS) -> str:
    """Return 32 hexadecimal digits that stay the same while the system does and the processor is of one kind; empty
    where the system has neither an identity nor a network address of its own.

    They are a digest for this purpose alone: the system's identity itself is to be kept private.
    """
    identity = next(filter(None, map(_read, files)), "")
    if not identity and not (address := uuid.getnode()) & _RANDOM:
        identity = f"{address:012x}"
    if not identity:
        return ""
    return hashlib.sha256("\n".join((_PURPOSE, identity, cpu_name())).encode()).hexdigest()[:32]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
