"""A wing's folder may be deleted: everything else works without it."""

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


RUN_EACH = """
import contextlib, io, json, sys
from trainspec_cli.__main__ import run
ran = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    ran.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ran))
"""


def test_without_removable_wings_every_module_loads_and_their_commands_are_gone(tmp_path: Path) -> None:
    environment = copy_without(tmp_path / "copy", *REMOVABLE)
    loaded = run_python(environment, tmp_path, "-c", LOAD_EVERYTHING)
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert not {*loaded.stdout.split()} & {*REMOVABLE}

    gone = {name for wing in REMOVABLE for name in find_wings()[wing].commands}
    command = tmp_path / "command"
    command.mkdir(mode=0o700)
    (command / "run.json").write_text('{"recipe": "train.py", "created_at": 1.0, "command": ["python"]}')
    (command / "run.json").chmod(0o600)
    cases = (
        (["--help"], 0, []),
        ([sorted(gone)[0]], 2, []),
        (["validate", "recipe=tiny", "--json", "resilience=sites"], 2, ["missing_wing"]),
        (["validate", "recipe=tiny", "--json", "resilience.sites.fragments=2"], 2, ["missing_wing"]),
        # Whatever needs to know how a command runs says that own_script is missing.
        (["resume", "--json", str(command)], MachineError.exit_code, ["missing_wing"]),
        (["sbatch", "--json", "cluster.device=cpu", "--", sys.executable], MachineError.exit_code, ["missing_wing"]),
        (["report", str(command)], 0, []),
    )
    ran = run_python(environment, tmp_path, "-c", RUN_EACH, json.dumps([arguments for arguments, _, _ in cases]))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for (arguments, code, problems), (found_code, out, err) in zip(cases, found, strict=True):
        assert found_code == code, (arguments, out, err)
        if "--json" in arguments:
            assert [one["code"] for one in json.loads(out)["errors"]] == problems
    listed = {line.split()[0] for line in found[0][1].splitlines() if line.startswith("  ")}
    assert gone
    assert not gone & listed
    paths = [json.loads(out)["errors"][0]["path"] for _, out, _ in found[2:4]]
    assert paths == ["resilience.mode", "resilience.sites"]
    attached = run_python(environment, tmp_path, "-c", "import trainspec_cli; trainspec_cli.attach()")
    assert "MachineError" in attached.stderr


@pytest.mark.slow
def test_without_wings_a_recipe_trains_and_the_tests_of_the_trunk_pass(tmp_path: Path, measured_cache: Path) -> None:
    """Those of its quick rooms; files that take a wing's cases for their own are left out."""
    environment = copy_without(tmp_path / "copy", *REMOVABLE) | {"TRAINSPEC_CACHE": str(measured_cache)}
    launch = ("-m", "trainspec_cli", "launch", "recipe=tiny", "train.max_steps=4", "run.dir=here", "--json")
    trained = run_python(environment, tmp_path, *launch)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "done"
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
