"""A wing's folder may be deleted: everything else goes on without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.wings import find_wings

CHECKOUT = Path(__file__).parents[1]
REMOVABLE = sorted(find_wings())
"""The wings which the trunk does not import (see test_architecture.py)."""
LOAD_EVERYTHING = """
import importlib, pkgutil, sys
import trainspec_cli
from trainspec_cli.core.wings import find_wings
names = [module.name for module in pkgutil.walk_packages(trainspec_cli.__path__, "trainspec_cli.")]
for name in names:
    if not name.startswith("trainspec_cli.wings.") and not name.endswith("__main__"):
        importlib.import_module(name)
print(*find_wings())
"""


def copy_without(folder: Path, *wings: str) -> dict[str, str]:
    """Copy the package to `folder` without these wings; return an environment whose Python imports the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "trainspec_cli", folder / "trainspec_cli", ignore=ignored)
    for name in ("conf", "recipes"):
        shutil.copytree(CHECKOUT / name, folder / name)
    for wing in wings:
        shutil.rmtree(folder / "trainspec_cli" / "wings" / wing)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run_python(environment: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_without_removable_wings_every_module_loads_and_a_recipe_trains(tmp_path: Path, measured_cache: Path) -> None:
    environment = copy_without(tmp_path / "copy", *REMOVABLE) | {"TRAINSPEC_CACHE": str(measured_cache)}
    loaded = run_python(environment, tmp_path, "-c", LOAD_EVERYTHING)
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert not {*loaded.stdout.split()} & {*REMOVABLE}

    program = ("-m", "trainspec_cli")
    shown = run_python(environment, tmp_path, *program, "--help")
    gone = {name for wing in REMOVABLE for name in find_wings()[wing].commands}
    listed = {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")}
    assert gone
    assert not gone & listed
    unknown = run_python(environment, tmp_path, *program, sorted(gone)[0])
    assert unknown.returncode == 2, unknown.stderr

    command = (*program, "validate", "recipe=tiny", "--json")
    for given, path in (("resilience=sites", "resilience.mode"), ("resilience.sites.fragments=2", "resilience.sites")):
        refused = run_python(environment, tmp_path, *command, given)
        problems = [(one["code"], one["path"]) for one in json.loads(refused.stdout)["errors"]]
        assert (refused.returncode, problems) == (2, [("missing_wing", path)]), refused.stderr

    trained = run_python(
        environment, tmp_path, *program, "launch", "recipe=tiny", "train.max_steps=4", "run.dir=here", "--json"
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "done"

    check_that_a_missing_kind_is_named(environment, tmp_path)


def check_that_a_missing_kind_is_named(environment: dict[str, str], here: Path) -> None:
    """Without own_script, whatever needs to know how a command runs says that its wing is missing."""
    run = here / "command"
    run.mkdir(mode=0o700)
    (run / "run.json").write_text('{"recipe": "train.py", "created_at": 1.0, "command": ["python"]}')
    (run / "run.json").chmod(0o600)
    for arguments in (("resume", str(run)), ("sbatch", "cluster.device=cpu", "--", sys.executable)):
        refused = run_python(environment, here, "-m", "trainspec_cli", arguments[0], "--json", *arguments[1:])
        assert refused.returncode == MachineError.exit_code, refused.stderr
        assert [one["code"] for one in json.loads(refused.stdout)["errors"]] == ["missing_wing"]
    shown = run_python(environment, here, "-m", "trainspec_cli", "report", str(run))
    assert shown.returncode == 0, shown.stderr
    attached = run_python(environment, here, "-c", "import trainspec_cli; trainspec_cli.attach()")
    assert "MachineError" in attached.stderr


@pytest.mark.slow
def test_without_wings_the_tests_of_the_trunk_pass(tmp_path: Path) -> None:
    """Those of its quick rooms; files that take a wing's cases for their own are left out."""
    environment = copy_without(tmp_path / "copy", *REMOVABLE)
    for name in ("tests", "docs", "pyproject.toml", "README.md", ".ci", "constraints.txt"):
        (tmp_path / "copy" / name).symlink_to(CHECKOUT / name)
    rooms = (CHECKOUT / "tests" / room for room in ("core", "balance", "run", "session"))
    files = [file for room in rooms for file in sorted(room.rglob("test_*.py"))]
    of_trunk = [str(file.relative_to(CHECKOUT)) for file in files if "trainspec_cli.wings" not in file.read_text()]
    assert len(of_trunk) > 0.9 * len(files)
    command = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *of_trunk)
    ran = run_python(environment, tmp_path / "copy", *command)
    assert ran.returncode == 0, ran.stdout[-5_000:]


def test_what_a_wing_gives_is_there_and_asked_for() -> None:
    sources = (file.read_text() for file in (CHECKOUT / "trainspec_cli").rglob("*.py"))
    points = {name for source in sources for name in re.findall(r'Point\("([a-z_]+)"\)', source)}
    for name, wing in find_wings().items():
        assert {*wing.parts} <= points, name
        for part in wing.parts.values():
            module, _, attribute = part.partition(":")
            assert hasattr(__import__(module, fromlist=[attribute]), attribute), part
