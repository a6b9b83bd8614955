"""`trainspec bundle`, with the real pip and a folder of fake wheels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.commands import call
from lab.problems import codes
from lab.waiting import wait_for
from lab.wheels import make_wheel, make_whole_set

CHECKOUT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call("bundle", *arguments, folder=folder, TRAINSPEC_CACHE=str(folder / "cache"))


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A folder with a complete set of wheels."""
    make_whole_set(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("made")
    make_whole_set(folder / "stock")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "own.yaml").write_text("defaults:\n  - /recipe/tiny\n", encoding="utf-8")
    ended = run(folder, "out", "--wheels", "stock")
    assert ended.returncode == 0, ended.stderr
    return folder / "out"


def copy(made: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", str(made), str(folder / "out")], check=True)
    return folder / "out"


def test_a_bundle_contains_what_trainspec_needs_and_no_more(made: Path) -> None:
    wheels = {file.name.partition("-")[0] for file in (made / "wheels").iterdir()}
    assert wheels == {"trainspec", "dep", "deeper", "pip"}
    names = {path.name for path in made.iterdir()}
    assert names == {"wheels", "conf", "recipes", "bundle.json", "install.py", "README.md"}
    assert {"own.yaml", "quickstart.yaml"} <= {file.name for file in (made / "recipes").iterdir()}
    assert (made / "conf" / "trainspec.yaml").is_file()
    assert [path.name for path in made.parent.iterdir() if path.name.startswith(".")] == []


def test_an_unchanged_bundle_is_complete(made: Path) -> None:
    ended = run(made.parent, "out", "--check")
    assert ended.returncode == 0, ended.stderr
    assert "trainspec 0.1.0 for " in ended.stdout
    record = json.loads(run(made.parent, "out", "--check", "--json").stdout)
    assert record["version"] == "0.1.0" and record["command"] == "trainspec bundle out --wheels stock"
    assert set(record["files"]) >= {"install.py", "README.md", "recipes/own.yaml"}


def test_faults_of_a_bundle_are_reported_with_a_command(made: Path, tmp_path: Path) -> None:
    out = copy(made, tmp_path)
    (out / "wheels" / "dep-1.5-py3-none-any.whl").unlink()
    (out / "recipes" / "own.yaml").write_text("")
    ended = run(tmp_path, "out", "--check")
    assert ended.returncode == 4
    assert "dep-1.5-py3-none-any.whl" in ended.stderr and "own.yaml" in ended.stderr
    assert "trainspec bundle out --wheels stock" in " ".join(ended.stderr.split())


def test_a_folder_that_is_not_a_bundle_is_reported(tmp_path: Path) -> None:
    ended = run(tmp_path, "nothing", "--check", "--json")
    assert ended.returncode == 4 and "bundle.json" in ended.stdout
    assert codes(ended.stdout) == [("bad_bundle", "")]


@pytest.mark.slow
def test_an_extra_adds_its_wheels(stock: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, "out", "--wheels", "stock", "--extra", "more", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["extras"] == ["more"]
    assert (tmp_path / "out" / "wheels" / "extra_dep-1.0-py3-none-any.whl").is_file()


@pytest.mark.slow
def test_each_platform_gets_its_wheels_and_its_own_requirements(stock: Path, tmp_path: Path) -> None:
    make_wheel(
        stock,
        "dep",
        "1.6",
        ["deeper", "on-arm; platform_machine == 'aarch64'"],
        tag="cp312-cp312-manylinux_2_17_x86_64",
    )
    make_wheel(
        stock,
        "dep",
        "1.6",
        ["deeper", "on-arm; platform_machine == 'aarch64'"],
        tag="cp312-cp312-manylinux_2_17_aarch64",
    )
    make_wheel(stock, "on-arm")
    both = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_28_aarch64", "--python", "3.12")
    ended = run(tmp_path, "out", "--wheels", "stock", *both)
    assert ended.returncode == 0, ended.stderr
    names = {file.name for file in (tmp_path / "out" / "wheels").iterdir()}
    assert {name for name in names if name.startswith(("dep", "on_arm"))} == {
        "dep-1.6-cp312-cp312-manylinux_2_17_x86_64.whl",
        "dep-1.6-cp312-cp312-manylinux_2_17_aarch64.whl",
        "on_arm-1.0-py3-none-any.whl",
    }
    assert run(tmp_path, "out", "--check").returncode == 0


@pytest.mark.slow
def test_a_missing_wheel_is_reported_in_pips_words_and_nothing_is_left(stock: Path, tmp_path: Path) -> None:
    (stock / "deeper-1.0-py3-none-any.whl").unlink()
    ended = run(tmp_path, "out", "--wheels", "stock")
    message = " ".join(ended.stderr.split())
    assert ended.returncode == 4
    assert "distribution found for deeper" in message and "--wheels FOLDER" in message
    assert {path.name for path in tmp_path.iterdir()} <= {"stock", "cache"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--platform", "win_amd64"), "--platform win_amd64"),
        (("--python", "3.12.1"), "--python is 3.12.1"),
        (("--python", "3.10"), "--python is 3.10"),
        (("--extra", "mor"), "mean more?"),
        (("train.max_steps=3",), "recipe=NAME train.max_steps=3"),
        (("recipe=tiny", "recipe=tiny"), "recipe=tiny is"),
        (("recipe=tinny",), "did you mean"),
        (("--wheels", "nowhere"), "--wheels nowhere"),
        (("--check", "--extra", "more"), "combined with --extra"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    stock: Path, tmp_path: Path, arguments: tuple[str, ...], part: str
) -> None:
    ended = run(tmp_path, "out", "--wheels", "stock", *arguments)
    assert ended.returncode == 2, ended.stderr
    assert part in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_with_content_is_not_overwritten(stock: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    ended = run(tmp_path, "out", "--wheels", "stock")
    assert ended.returncode == 2 and "out" in ended.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_two_wheels_of_trainspec_are_refused(stock: Path, tmp_path: Path) -> None:
    make_wheel(stock, "trainspec", "0.2.0")
    ended = run(tmp_path, "out", "--wheels", "stock", "--json")
    assert (ended.returncode, codes(ended.stdout)) == (2, [("contradiction", "--wheels")])


@pytest.mark.slow
def test_a_full_disk_is_reported_and_nothing_is_left_on_it(stock: Path, tmp_path: Path) -> None:
    """The recipes do not fit."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk")
    try:
        ended = run(tmp_path, "small/out", "--wheels", "stock")
        left = list(small.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert ended.returncode == 4 and "no space left" in " ".join(ended.stderr.split())
    assert left == []


@pytest.mark.slow
def test_an_interrupted_bundle_leaves_nothing(stock: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-m", "trainspec_cli", "bundle", "folder/out", "--wheels", "stock"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "TRAINSPEC_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as making:
        wait_for(lambda: any(folder.iterdir()))
        making.send_signal(signal.SIGINT)
        output = making.communicate()[1].decode()
    assert making.returncode == 130 and "Traceback" not in output
    assert list(folder.iterdir()) == []
