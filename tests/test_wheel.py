"""A wheel carries conf/ and recipes/, and needs no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_works_from_anywhere(tmp_path: Path) -> None:
    built, site, elsewhere = tmp_path / "built", tmp_path / "site", tmp_path / "else where"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    data = site / "trainspec_cli" / "_data"
    shipped = {path.relative_to(data) for kind in ("yaml", "json") for path in data.rglob(f"*.{kind}")}
    assert shipped == {
        path.relative_to(ROOT)
        for folder in ("conf", "recipes")
        for kind in ("yaml", "json")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    }

    elsewhere.mkdir()
    code = (
        "import trainspec_cli.__main__ as program; print(program.__file__); "
        "raise SystemExit(program.run(['validate', 'recipe=tiny']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    where, said = ended.stdout.splitlines()
    assert where.startswith(str(site))
    assert said.startswith("tiny is valid")
