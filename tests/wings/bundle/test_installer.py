"""The installer in a bundle needs only Python, compares every file, and leaves no partial environment."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.drawing import slow_after
from lab.wheels import make_wheel

from trainspec_cli.wings.bundle import (
    BundleFault,
    examine,
    installer,
    machine_faults,
    platform_here,
    python_here,
    read_bundle,
)

COMMAND = "trainspec bundle OUT recipe=mine"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of two wheels and a recipe. Its pip does not work."""
    folder = tmp_path / "bundle"
    for name in ("wheels", "recipes"):
        (folder / name).mkdir(parents=True)
    make_wheel(folder / "wheels", "trainspec", "0.1.0")
    make_wheel(folder / "wheels", "pip", "26.0")
    (folder / "recipes" / "mine.yaml").write_text("train:\n  max_steps: 3\n")
    shutil.copy(installer.__file__, folder / "install.py")
    write_record(folder)
    return folder


def write_record(folder: Path, **changed: Any) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "bundle.json"]
    digests = {
        str(path.relative_to(folder)): {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": 1}
        for path in files
    }
    about = {
        "schema": "trainspec.bundle/1",
        "date": "2026-01-02",
        "version": "0.1.0",
        "python": python_here(),
        "extras": [],
    }
    target = {"platforms": [platform_here()], "command": COMMAND, "launches": {}, "files": digests}
    (folder / "bundle.json").write_text(json.dumps({**about, **target, **changed}))


def faults_by_code(folder: Path) -> dict[str, BundleFault]:
    return {fault.code: fault for fault in examine(folder)}


def run_script(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(folder / "install.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)


def test_the_script_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(installer.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).partition(".")[0] for name in modules} <= sys.stdlib_module_names


def test_an_unchanged_bundle_has_no_fault(bundle: Path) -> None:
    assert examine(bundle) == []
    checked = run_script(bundle, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("4 files ")
    assert not (bundle.parent / "venv").exists()


def test_a_missing_wheel_is_reported_with_a_remedy(bundle: Path) -> None:
    (bundle / "wheels" / "trainspec-0.1.0-py3-none-any.whl").unlink()
    fault = faults_by_code(bundle)["missing_file"]
    assert "wheels/trainspec-0.1.0-py3-none-any.whl" in fault.message and COMMAND in fault.hint
    assert run_script(bundle).returncode == 4


def test_one_changed_byte_of_a_wheel_is_found_and_nothing_is_installed(bundle: Path) -> None:
    wheel = bundle / "wheels" / "trainspec-0.1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    ended = run_script(bundle, "new")
    assert ended.returncode == 4
    assert wheel.name in ended.stderr and hashlib.sha256(content).hexdigest() in ended.stderr
    assert "copy wheels/trainspec" in ended.stderr and "Traceback" not in ended.stderr
    assert not (bundle.parent / "new").exists()


def test_all_faults_are_reported_together(bundle: Path) -> None:
    (bundle / "recipes" / "mine.yaml").unlink()
    (bundle / "install.py").write_text("")
    (bundle / "wheels" / "other-1-py3-none-any.whl").touch()
    assert sorted(faults_by_code(bundle)) == ["altered_file", "extra_file", "missing_file"]


def test_an_unlisted_wheel_is_a_fault_and_runs_next_to_the_folders_are_not(bundle: Path) -> None:
    (bundle / "wheels" / "numpy-9-py3-none-any.whl").touch()
    (bundle / "runs").mkdir()
    (bundle / "runs" / "run.json").touch()
    (fault,) = examine(bundle)
    assert fault.code == "extra_file" and "numpy-9" in fault.message and "rm " in fault.hint


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_instead_of_a_file_is_not_read(bundle: Path, tmp_path: Path, kind: str) -> None:
    """The link's target has the right content. Reading the pipe would block."""
    recipe = bundle / "recipes" / "mine.yaml"
    recipe.rename(tmp_path / "elsewhere.yaml")
    recipe.symlink_to(tmp_path / "elsewhere.yaml") if kind == "link" else os.mkfifo(recipe)
    assert list(faults_by_code(bundle)) == ["unreadable_file"]


@pytest.mark.parametrize(
    "content",
    slow_after(
        4,
        [
            None,
            "",
            "[]",
            "{}",
            "{" * 100_000,
            '{"schema": "trainspec.bundle/2"}',
            "\x00",
            '{"schema": "trainspec.bundle/1"}',
        ],
    ),
)
def test_a_damaged_record_is_one_fault(bundle: Path, content: str | None) -> None:
    record = bundle / "bundle.json"
    record.unlink() if content is None else record.write_text(content)
    (fault,) = examine(bundle)
    assert fault.code == "bad_bundle" and "bundle.json" in fault.message and fault.hint
    ended = run_script(bundle)
    assert ended.returncode == 4 and "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "wheels/../../secret", "", "a//b"])
def test_a_record_with_files_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    write_record(bundle, files={name: {"sha256": "0", "bytes": 1}})
    (fault,) = examine(bundle)
    assert fault.code == "bad_bundle" and repr(name) in fault.message


def test_another_python_or_machine_is_refused_before_anything_is_created(bundle: Path) -> None:
    write_record(bundle, python="3.8", platforms=["manylinux_2_28_riscv64", "macosx_99_0_arm64"])
    ended = run_script(bundle, "new")
    assert ended.returncode == 4
    assert "python3.8 install.py" in ended.stderr and f"--platform {platform_here()}" in ended.stderr
    assert [fault.code for fault in machine_faults(read_bundle(bundle))] == ["wrong_python", "wrong_platform"]
    assert not (bundle.parent / "new").exists()
    write_record(bundle, platforms=["riscv", platform_here()])
    assert machine_faults(read_bundle(bundle)) == []


def test_an_existing_environment_is_not_changed(bundle: Path) -> None:
    (bundle.parent / "venv").mkdir()
    ended = run_script(bundle)
    assert ended.returncode == 2 and "rm -r venv" in ended.stderr
    assert list((bundle.parent / "venv").iterdir()) == []


def test_a_failed_installation_leaves_nothing(bundle: Path) -> None:
    ended = run_script(bundle, "new")
    assert ended.returncode == 4
    assert "pip ended with" in ended.stderr and "Traceback" not in ended.stderr
    assert not (bundle.parent / "new").exists()
