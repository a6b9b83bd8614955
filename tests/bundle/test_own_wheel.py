"""The wheel of trainspec itself, from a checkout and from what a wheel has installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainspec_cli.bundle.own_wheel import own_wheel

MAKE = "from pathlib import Path; from trainspec_cli.bundle.own_wheel import own_wheel; own_wheel(Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture
def site(built: Path, tmp_path: Path) -> Path:
    """What pip has installed of the wheel."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
        str(built),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "site"


def pack(site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {MAKE}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder)], cwd=folder, env={}, capture_output=True, text=True
    )


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_a_checkout_is_built(built: Path) -> None:
    assert built.name == "trainspec-0.1.0-py3-none-any.whl"
    assert "trainspec_cli/_data/recipes/quickstart.yaml" in contents(built)


def test_an_installed_wheel_is_packed_again_as_it_was(built: Path, site: Path, tmp_path: Path) -> None:
    ended = pack(site, tmp_path / "packed")
    assert ended.returncode == 0, ended.stderr
    (packed,) = (tmp_path / "packed").iterdir()
    assert packed.name == built.name
    assert contents(packed) == contents(built)
    again = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "again"),
        str(packed),
    ]
    assert subprocess.run(again, capture_output=True).returncode == 0


def test_a_file_that_was_altered_since_is_not_passed_on(site: Path, tmp_path: Path) -> None:
    with (site / "trainspec_cli" / "node.py").open("a") as file:
        file.write("# changed\n")
    ended = pack(site, tmp_path / "packed")
    assert ended.returncode == 1 and "node.py was altered after it was installed" in ended.stderr


def test_a_copy_that_pip_does_not_know_is_refused(site: Path, tmp_path: Path) -> None:
    for folder in site.glob("trainspec-*.dist-info"):
        folder.rename(tmp_path / folder.name)
    ended = pack(site, tmp_path / "packed")
    assert ended.returncode == 1 and "trainspec_cli is" in ended.stderr and "MachineError" in ended.stderr
