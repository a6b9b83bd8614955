from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from trainspec_cli.run.job.job import GitRefusal, GitState, git_state, versions


def test_the_lock_holds_dependencies_of_dependencies_and_imports_none() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["antlr4-python3-runtime"] == metadata.version("antlr4-python3-runtime")  # through hydra-core
    assert "pytest" not in found


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=someone", "-c", "user.email=someone@example.com")
    command = ["git", *settings, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_state_of_git(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "work")
    (tmp_path / "recipe.yaml").write_text("a: 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == GitState(commit, "work", False)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "result.json").touch()
    assert git_state(tmp_path) == GitState(commit, "work", False)
    (tmp_path / "recipe.yaml").write_text("a: 2\n")
    assert git_state(tmp_path) == GitState(commit, "work", True)


def test_outside_a_repository_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path.cwd()) is None


# Repositories of strangers


class Trap:
    """A repository of one file, and a command that leaves a mark when something runs it."""

    def __init__(self, folder: Path):
        self.repository, self.marker = folder / "repository", folder / "marker"
        self.command = folder / "command"
        self.command.write_text(f"#!/bin/sh\ntouch {self.marker}\n")
        self.command.chmod(0o755)
        self.repository.mkdir()
        git(self.repository, "init", "-b", "work")
        (self.repository / "a.txt").write_text("one\n")
        git(self.repository, "add", ".")
        git(self.repository, "commit", "-m", "one")

    def touch(self) -> None:
        """Its content must be read to know that it is what it was."""
        os.utime(self.repository / "a.txt", (1.0, 1.0))


def fsmonitor(trap: Trap) -> None:
    git(trap.repository, "config", "core.fsmonitor", str(trap.command))


def hooks(trap: Trap) -> None:
    (trap.repository / "hooks").mkdir()
    shutil.copy(trap.command, trap.repository / "hooks" / "post-index-change")
    git(trap.repository, "config", "core.hooksPath", "hooks")
    trap.touch()


def clean_filter(trap: Trap) -> None:
    (trap.repository / ".git" / "info" / "attributes").write_text("*.txt filter=a=b\n")
    git(trap.repository, "config", "filter.a=b.clean", str(trap.command))
    trap.touch()


def process_filter(trap: Trap) -> None:
    (trap.repository / ".gitattributes").write_text("*.txt filter=trap\n")
    git(trap.repository, "config", "filter.trap.process", str(trap.command))
    git(trap.repository, "config", "filter.trap.required", "true")
    trap.touch()


def submodule(trap: Trap) -> None:
    inner = trap.repository / "inner"
    inner.mkdir()
    git(inner, "init", "-b", "work")
    git(inner, "commit", "--allow-empty", "-m", "inner")
    git(trap.repository, "add", "inner")
    git(trap.repository, "commit", "-m", "two")
    git(inner, "config", "core.fsmonitor", str(trap.command))


def lazy_fetch(trap: Trap) -> None:
    """An object is missing, and is to be had from a remote whose address is a command."""
    settings = {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{trap.command}",
        "protocol.ext.allow": "always",
    }
    tree = git(trap.repository, "rev-parse", "HEAD^{tree}")
    for key, value in settings.items():
        git(trap.repository, "config", key, value)
    (trap.repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


def included(trap: Trap) -> None:
    (trap.repository / "more").write_text(f"[core]\n\tfsmonitor = {trap.command}\n")
    git(trap.repository, "config", "include.path", "../more")


SET = (fsmonitor, hooks, clean_filter, process_filter, submodule, lazy_fetch, included)


@pytest.mark.parametrize("set_trap", SET, ids=lambda set_trap: set_trap.__name__)
def test_nothing_is_run_that_a_repository_names(tmp_path: Path, set_trap: Callable[[Trap], None]) -> None:
    trap = Trap(tmp_path)
    set_trap(trap)
    commit = git(trap.repository, "rev-parse", "HEAD")
    shutil.copytree(trap.repository, tmp_path / "copy")
    subprocess.run(
        ["git", "-C", tmp_path / "copy", "status"], check=False, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert trap.marker.exists(), "git itself steps into the trap"
    trap.marker.unlink()
    state = git_state(trap.repository)
    assert not trap.marker.exists()
    assert state == GitState(commit, "work", None if set_trap is lazy_fetch else False)


def test_a_file_behind_a_filter_is_not_known_to_differ(tmp_path: Path) -> None:
    """As with git-lfs: the committed file differs from that in the folder, and only the filter knows why."""
    trap = Trap(tmp_path)
    (trap.repository / ".gitattributes").write_text("*.bin filter=lfs\n")
    for name in ("b.bin", "c.py"):
        (trap.repository / name).write_text("before\n")
    git(trap.repository, "add", ".")
    git(trap.repository, "commit", "-m", "two")
    (trap.repository / "b.bin").write_text("another\n")
    assert git_state(trap.repository).dirty is None  # type: ignore[union-attr]
    (trap.repository / "c.py").write_text("another\n")
    assert git_state(trap.repository).dirty is True  # type: ignore[union-attr]


def test_how_files_compare_is_the_repositorys_to_say(tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    (trap.repository / "a.txt").chmod(0o755)
    assert git_state(trap.repository).dirty is True  # type: ignore[union-attr]
    git(trap.repository, "config", "core.fileMode", "false")
    assert git_state(trap.repository).dirty is False  # type: ignore[union-attr]


def test_the_state_is_told_in_subfolders_and_linked_work_trees(tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    (trap.repository / "sub").mkdir()
    git(trap.repository, "worktree", "add", "-b", "other", str(tmp_path / "linked"))
    commit = git(trap.repository, "rev-parse", "HEAD")
    (tmp_path / "linked" / "a.txt").write_text("two\n")
    assert git_state(trap.repository / "sub") == GitState(commit, "work", False)
    assert git_state(tmp_path / "linked") == GitState(commit, "other", True)
    git(tmp_path / "linked", "commit", "-a", "-m", "two")
    git(tmp_path / "linked", "checkout", "--detach")
    detached = git_state(tmp_path / "linked")
    assert detached == GitState(git(tmp_path / "linked", "rev-parse", "HEAD"), None, False)


def test_a_repository_with_the_longer_digests(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "work", "--object-format=sha256")
    (tmp_path / "a").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    state = git_state(tmp_path)
    assert (len(state.commit), state.dirty) == (64, False)  # type: ignore[union-attr]


def test_variables_of_a_hook_that_launches_are_not_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = Trap(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "elsewhere"))
    assert git_state(trap.repository).dirty is False  # type: ignore[union-attr]


def test_another_users_repository_is_said_to_be_refused(shared: Path, stranger: Callable[..., None]) -> None:
    stranger("HOME=/nonexistent git init $1/theirs && touch $1/theirs/a && git -C $1/theirs add a", shared)
    stranger("git -C $1/theirs -c user.name=a -c user.email=b commit -m one", shared)
    state = git_state(shared / "theirs")
    assert isinstance(state, GitRefusal)
    assert "dubious ownership" in state.refused
