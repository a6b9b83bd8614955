from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from trainspec_cli.launch.provenance import git_state, versions


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
    assert git_state(tmp_path) == {"commit": commit, "branch": "work", "dirty": False}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "result.json").touch()
    assert git_state(tmp_path) == {"commit": commit, "branch": "work", "dirty": False}
    (tmp_path / "recipe.yaml").write_text("a: 2\n")
    assert git_state(tmp_path) == {"commit": commit, "branch": "work", "dirty": True}


def test_outside_a_repository_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path.cwd()) is None
