"""`trainspec bundle`: made by the real pip from a folder of made-up wheels, checked, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.commands import call
from lab.waiting import wait_for
from lab.wheels import make_wheel, make_whole_set

CHECKOUT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call("bundle", *arguments, folder=folder, TRAINSPEC_CACHE=str(folder / "cache"))


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A folder with a whole set of wheels in it."""
    make_whole_set(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, in a folder that was filled by one command; tests copy it."""
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


def test_a_bundle_holds_what_trainspec_needs_and_no_more(made: Path) -> None:
    wheels = {file.name.partition("-")[0] for file in (made / "wheels").iterdir()}
    assert wheels == {"trainspec", "dep", "deeper", "pip"}
    names = {path.name for path in made.iterdir()}
    assert names == {"wheels", "conf", "recipes", "bundle.json", "install.py", "README.md"}
    assert {"own.yaml", "quickstart.yaml"} <= {file.name for file in (made / "recipes").iterdir()}
    assert (made / "conf" / "trainspec.yaml").is_file()
    assert [path.name for path in made.parent.iterdir() if path.name.startswith(".")] == []


def test_a_bundle_as_it_was_made_is_whole(made: Path) -> None:
    ended = run(made.parent, "out", "--check")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("out is whole: trainspec 0.1.0 for ")
    told = json.loads(run(made.parent, "out", "--check", "--json").stdout)
    assert told["version"] == "0.1.0" and told["command"] == "trainspec bundle out --wheels stock"
    assert set(told["files"]) >= {"install.py", "README.md", "recipes/own.yaml"}


def test_what_is_wrong_with_a_bundle_is_told_with_what_to_type(made: Path, tmp_path: Path) -> None:
    out = copy(made, tmp_path)
    (out / "wheels" / "dep-1.5-py3-none-any.whl").unlink()
    (out / "recipes" / "own.yaml").write_text("")
    ended = run(tmp_path, "out", "--check")
    assert ended.returncode == 4
    assert "dep-1.5-py3-none-any.whl is missing" in ended.stderr
    assert "own.yaml is altered" in ended.stderr
    assert "trainspec bundle out --wheels stock" in " ".join(ended.stderr.split())


def test_a_folder_that_is_no_bundle_is_told(tmp_path: Path) -> None:
    ended = run(tmp_path, "nothing", "--check")
    assert ended.returncode == 4 and "bundle.json cannot be read: No such file" in " ".join(ended.stderr.split())


def test_an_extra_brings_its_wheels(stock: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, "out", "--wheels", "stock", "--extra", "more", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["extras"] == ["more"]
    assert (tmp_path / "out" / "wheels" / "extra_dep-1.0-py3-none-any.whl").is_file()


@pytest.mark.slow
def test_each_platform_gets_its_wheels_and_what_it_alone_needs(stock: Path, tmp_path: Path) -> None:
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


def test_a_wheel_that_is_not_there_is_told_in_pips_words_and_nothing_is_left(stock: Path, tmp_path: Path) -> None:
    (stock / "deeper-1.0-py3-none-any.whl").unlink()
    ended = run(tmp_path, "out", "--wheels", "stock")
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 4
    assert "No matching distribution found for deeper" in said and "--wheels FOLDER" in said
    assert {path.name for path in tmp_path.iterdir()} <= {"stock", "cache"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--platform", "win_amd64"), "--platform win_amd64 is none that a bundle can be made for"),
        (("--python", "3.12.1"), "--python is 3.12.1; a version such as"),
        (("--python", "3.10"), "--python is 3.10; trainspec needs Python"),
        (("--extra", "mor"), "did you mean more?"),
        (("train.max_steps=3",), "comes before any recipe=NAME"),
        (("recipe=tiny", "recipe=tiny"), "recipe=tiny is given twice"),
        (("recipe=tinny",), "did you mean"),
        (("--wheels", "nowhere"), "--wheels nowhere is no folder"),
        (("--check", "--extra", "more"), "--extra cannot stand beside it"),
    ],
)
def test_what_cannot_be_made_is_refused_before_the_work(
    stock: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    ended = run(tmp_path, "out", "--wheels", "stock", *arguments)
    assert ended.returncode == 2, ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_not_written_over(stock: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    ended = run(tmp_path, "out", "--wheels", "stock")
    assert ended.returncode == 2 and "out exists and is not empty" in ended.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_two_own_wheels_are_a_question(stock: Path, tmp_path: Path) -> None:
    make_wheel(stock, "trainspec", "0.2.0")
    ended = run(tmp_path, "out", "--wheels", "stock")
    assert ended.returncode == 2 and "holds several wheels of trainspec" in " ".join(ended.stderr.split())


def test_a_disk_that_fills_is_told_and_nothing_is_left_on_it(stock: Path, tmp_path: Path) -> None:
    """The recipes do not fit."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts a small disk")
    try:
        ended = run(tmp_path, "small/out", "--wheels", "stock")
        left = list(small.iterdir())
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert ended.returncode == 4 and "no space left to write" in " ".join(ended.stderr.split())
    assert left == []


def test_an_interrupted_bundle_leaves_nothing(stock: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "trainspec_cli", "bundle", "place/out", "--wheels", "stock"]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "TRAINSPEC_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as making:
        wait_for(lambda: any(place.iterdir()))
        making.send_signal(signal.SIGINT)
        said = making.communicate()[1].decode()
    assert making.returncode == 130 and "Traceback" not in said
    assert list(place.iterdir()) == []
