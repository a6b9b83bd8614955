"""The environment that was active at submission, as bash takes it up again in the job."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from trainspec_cli.run.slurm.script import activation_lines


def run(lines: list[str], shown: str) -> str:
    script = "\n".join([*lines, f'echo "{shown}"'])
    clean = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-eu"], input=script, env=clean, capture_output=True, text=True, check=True).stdout


def test_a_virtual_environment_is_activated(tmp_path: Path) -> None:
    root = tmp_path / "it's mine"
    venv.create(root, symlinks=True)
    comment, *lines = activation_lines({"VIRTUAL_ENV": str(root)}, str(root), f"{root}/bin/python")
    assert comment.startswith("# The virtual environment that was active at submission")
    assert run(lines, "$VIRTUAL_ENV ${PATH%%:*}") == f"{root} {root}/bin\n"


@pytest.mark.parametrize("name", ["conda", "micromamba"])
def test_a_conda_environment_is_activated_by_its_own_program(tmp_path: Path, name: str) -> None:
    """A stand-in for the program, which knows the words of its own hook."""
    hook = {"conda": "shell.bash hook", "micromamba": "shell hook --shell bash"}[name]
    tool, root = tmp_path / "bin" / name, tmp_path / "envs" / "train"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{hook}" ] && echo "{name}() {{ DONE=\\"\\$*\\"; }}"\n')
    tool.chmod(0o755)
    environ = {"CONDA_PREFIX": str(root), ("CONDA_EXE" if name == "conda" else "MAMBA_EXE"): str(tool)}
    comment, *lines = activation_lines(environ, str(root), f"{root}/bin/python")
    assert comment.startswith("# The conda environment that was active at submission")
    assert run(lines, "$DONE") == f"activate {root}\n"


def test_an_environment_without_trainspec_is_left_alone_and_modules_are_named(tmp_path: Path) -> None:
    environ = {"CONDA_PREFIX": "/opt/base\nrm -r x", "CONDA_EXE": "/opt/conda", "LOADEDMODULES": "gcc/12:cuda/12.4"}
    lines = list(activation_lines(environ, str(tmp_path), sys.executable))
    assert all(line.startswith("# ") and "\n" not in line for line in lines)
    assert "gcc/12, cuda/12.4" in lines[0]
    assert "not installed there" in lines[-1] and sys.executable in lines[-1]
    (nothing,) = activation_lines({}, str(tmp_path), sys.executable)
    assert "none was active" in nothing


def test_the_environment_of_a_command_need_not_hold_trainspec(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    venv.create(root, symlinks=True)
    active = {"VIRTUAL_ENV": str(root)}
    _, *lines = activation_lines(active, sys.prefix, sys.executable, of_command=True)
    assert run(lines, "$VIRTUAL_ENV") == f"{root}\n"
    assert list(activation_lines({}, sys.prefix, sys.executable, of_command=True)) == []
    (comment,) = activation_lines(active, sys.prefix, sys.executable)
    assert "not installed there" in comment
