"""Find checkpoints of the Hugging Face Hub on this machine by name, in a mirror folder or in the Hub's cache.

Nothing is downloaded. The cache has the layout of `huggingface_hub`: `models--ORG--NAME/refs/REVISION` contains a
commit, and `snapshots/COMMIT` contains its files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.environment_names import HUB_MIRROR
from trainspec_cli.core.reading.files import expand

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([A-Za-z0-9][\w.-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_REF_BYTES = 200


@dataclass(frozen=True)
class HubName:
    """A checkpoint's name on the Hub: `ORG/NAME`, or `ORG/NAME@REVISION`."""

    name: str
    revision: str = "main"
    """A branch, a tag or a commit."""

    def folder(self) -> Path | None:
        """Return the folder of the checkpoint; None if this machine does not have it. A mirror only has the revision
        `main`."""
        mirror = os.environ.get(HUB_MIRROR)
        mirrored = expand(mirror) / self.name if mirror and self.revision == "main" else None
        if mirrored is not None and mirrored.is_dir():
            return mirrored
        cached = hub_cache() / f"models--{self.name.replace('/', '--')}"
        commit = self.revision if _COMMIT.fullmatch(self.revision) else _read_ref(cached / "refs" / self.revision)
        snapshot = cached / "snapshots" / commit
        return snapshot if commit and snapshot.is_dir() else None


def hub_name(text: str) -> HubName | None:
    """Parse a checkpoint's name; return None if `text` is a folder, or can only be a path."""
    return None if Path(text).is_dir() else parse_hub_name(text)


def parse_hub_name(text: str) -> HubName | None:
    """Parse a checkpoint's name; return None if `text` is not one."""
    named = _NAMED.fullmatch(text)
    if named is None:
        return None
    name, revision = named.groups()
    return HubName(name, revision or "main")


def locate_checkpoint(text: str) -> Path:
    """Return the folder that `hf:TEXT` refers to: a folder, or otherwise a checkpoint by its name on the Hub. If
    neither exists, return TEXT as the path of a missing folder."""
    named = hub_name(text)
    found = named.folder() if named else None
    return found or expand(text)


def hub_cache() -> Path:
    """Return the location of `huggingface_hub`'s cache."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expand(cache)
    if home := os.environ.get("HF_HOME"):
        return expand(home) / "hub"
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _read_ref(file: Path) -> str:
    """Return the commit that a ref points to, or ""."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_REF_BYTES).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
    return text if _COMMIT.fullmatch(text) else ""
