"""Record the software of a run: versions of the interpreter and of every installed dependency, and the state of git."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

GIT_TIMEOUT_S = 10.0
# Git runs nothing for what is asked of the repository itself; this is in case another version of it would.
_NO_COMMANDS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)([^;]*)(?:;(.*))?")


def versions() -> dict[str, str]:
    """Python, the system, trainspec, and all that it depends on, as far as installed; read without importing them."""
    found: dict[str, str] = {}
    wanted = ["trainspec"]
    while wanted:
        # One spelling for `nvidia_ml_py`, `nvidia-ml-py` and `Nvidia.ml.py` (PEP 503).
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system, or trainspec runs from a checkout
        found[name] = distribution.version
        needed = (_REQUIREMENT.match(line) for line in distribution.requires or ())
        wanted += [match.group(1) for match in needed if match and "extra" not in (match.group(3) or "")]
    return {"python": platform.python_version(), "system": platform.platform(), **dict(sorted(found.items()))}


@dataclass(frozen=True)
class GitState:
    """The commit that a folder's repository is at."""

    commit: str
    branch: str | None
    """None for a detached head."""
    dirty: bool | None
    """True where tracked files differ from the commit; None where that cannot be known."""


@dataclass(frozen=True)
class GitRefusal:
    """The repository is one that git does not read."""

    refused: str
    """The reason, in git's words."""


def git_state(folder: Path) -> GitState | GitRefusal | None:
    """Return the state of the repository that holds `folder`; None outside a repository or without git.

    No command that the repository's configuration names is run: it may be a stranger's. Another user's repository is
    refused by git, unless `safe.directory` allows it.
    """
    found = _git(folder, "rev-parse", *_FACTS)
    if found is None or found.returncode:
        return GitRefusal(found.stderr.strip().partition("\n")[0]) if found and _DUBIOUS in found.stderr else None
    commit, top, index, objects, object_format = found.stdout.splitlines()
    branch = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    repository = _Repository(commit, folder / top, folder / index, folder / objects, object_format)
    return GitState(commit, branch.stdout.strip() or None if branch else None, _is_dirty(repository))


_FACTS = ("HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects", "--show-object-format")
_DUBIOUS = "dubious ownership"
_COMPARISON = "filemode|symlinks|ignorecase|precomposeunicode|trustctime|checkstat|autocrlf|eol"
"""Keys of `core` that say how files compare with what is committed; none of them names a command."""


@dataclass(frozen=True)
class _Repository:
    commit: str
    top: Path
    index: Path
    objects: Path
    object_format: str


def _is_dirty(repository: _Repository) -> bool | None:
    """Return True if tracked files were changed; None where it cannot be known, as where a touched file has a filter
    (git-lfs).

    The repository's index, objects and files are compared by a git folder of our own, since its own configuration may
    name commands: filters, hooks, monitors, ways to fetch.
    """
    comparison = _git(repository.top, "config", "--null", "--get-regexp", rf"^core\.({_COMPARISON})$")
    pairs = (entry.partition("\n") for entry in comparison.stdout.split("\0") if entry) if comparison else ()
    settings = [part for key, _, value in pairs for part in ("-c", f"{key}={value or 'true'}")]
    with tempfile.TemporaryDirectory(prefix="trainspec-git-") as scratch:
        folder = Path(scratch)
        is_sha256 = repository.object_format == "sha256"
        extensions = "[extensions]\n\tobjectformat = sha256\n" if is_sha256 else ""
        (folder / "refs").mkdir()
        (folder / "HEAD").write_text(f"{repository.commit}\n")
        (folder / "config").write_text(f"[core]\n\trepositoryformatversion = {int(is_sha256)}\n{extensions}")
        own = {
            "GIT_DIR": scratch,
            "GIT_WORK_TREE": str(repository.top),
            "GIT_INDEX_FILE": str(repository.index),
            "GIT_OBJECT_DIRECTORY": str(repository.objects),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        ask = partial(_git, repository.top, *settings, environment=own)
        status = ask("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=dirty")
        if status is None or status.returncode:
            return None
        changed = [entry for entry in status.stdout.split("\0") if entry]
        touched = [entry[3:] for entry in changed if entry.startswith(" M")]
        if len(touched) < len(changed) or not touched:
            return bool(changed)
        filters = ask("check-attr", "-z", "--stdin", "filter", stdin="".join(f"{name}\0" for name in touched))
    unfiltered = {"unspecified", "unset"} & set(filters.stdout.split("\0")[2::3]) if filters else True
    return True if unfiltered else None


def _git(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str] | None:
    """Run git in `folder`; return None where there is no git or it does not answer in time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    quiet = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        return subprocess.run(
            ["git", "--no-pager", *_NO_COMMANDS, "-C", str(folder), *arguments],
            env={**inherited, **quiet, **(environment or {})},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=GIT_TIMEOUT_S,
            input=stdin,
        )
    except (OSError, subprocess.SubprocessError):
        return None
