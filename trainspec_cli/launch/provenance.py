"""What a run was made with: versions of the interpreter and of every installed dependency, and the state of git."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

GIT_TIMEOUT_S = 10.0

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)([^;]*)(?:;(.*))?")


def versions() -> dict[str, str]:
    """Python, the system, trainspec, and all that it depends on, as far as installed; read without importing them."""
    found: dict[str, str] = {}
    wanted = ["trainspec"]
    while wanted:
        name = _canonical(wanted.pop())
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system, or trainspec runs from a checkout
        found[name] = distribution.version
        wanted += _required_names(distribution)
    return {"python": platform.python_version(), "system": platform.platform(), **dict(sorted(found.items()))}


def _required_names(distribution: metadata.Distribution) -> list[str]:
    """Names of the requirements that do not belong to an extra."""
    matches = (_REQUIREMENT.match(line) for line in distribution.requires or ())
    return [match.group(1) for match in matches if match and "extra" not in (match.group(3) or "")]


def _canonical(name: str) -> str:
    """One spelling for `nvidia_ml_py`, `nvidia-ml-py` and `Nvidia.ml.py` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether tracked files differ from it; None outside a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _git(folder, "branch", "--show-current") or None,
        "dirty": None if status is None else bool(status),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
