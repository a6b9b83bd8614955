"""The metadata of wheels, whether a set of wheels is complete, and the platforms of a bundle."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

import pytest
from lab.wheels import make_wheel
from packaging.requirements import Requirement
from packaging.tags import parse_tag

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.wings.bundle import (
    WheelTarget,
    check_target,
    missing_requirements,
    own_wheel,
    platform_here,
    read_wheel,
    runs_here,
    wheels,
)

GLIBC_2_28 = "manylinux_2_28_x86_64"
LINUX = WheelTarget("3.12", GLIBC_2_28)
ARM = WheelTarget("3.12", "manylinux_2_28_aarch64")
MAC = WheelTarget("3.12", "macosx_14_0_arm64")


def missing(folder: Path, wanted: str, target: WheelTarget = LINUX) -> set[str]:
    wheels = [read_wheel(file) for file in folder.glob("*.whl")]
    return {requirement.name for requirement in missing_requirements(wheels, Requirement(wanted), target)}


def test_indirect_requirements_are_found(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["middle>=1"])
    make_wheel(tmp_path, "middle", requires=["bottom", "top"])
    assert missing(tmp_path, "top") == {"bottom"}
    make_wheel(tmp_path, "bottom")
    assert missing(tmp_path, "top") == set()


def test_a_wheel_of_another_version_does_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["bottom>=2"])
    make_wheel(tmp_path, "bottom", "1.9")
    assert missing(tmp_path, "top") == {"bottom"}


def test_markers_are_evaluated_for_the_target_and_not_for_this_machine(tmp_path: Path) -> None:
    requires = [
        "on-arm; platform_machine == 'aarch64'",
        "on-mac; sys_platform == 'darwin'",
        "old; python_version < '3.12'",
    ]
    make_wheel(tmp_path, "top", requires=requires)
    assert missing(tmp_path, "top", LINUX) == set()
    assert missing(tmp_path, "top", ARM) == {"on-arm"}
    assert missing(tmp_path, "top", MAC) == {"on-mac"}


def test_requirements_of_an_extra_count_only_with_the_extra(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["more; extra == 'all'"], headers={"Provides-Extra": "all"})
    assert missing(tmp_path, "top") == set()
    assert missing(tmp_path, "top[all]") == {"more"}


def test_a_wheel_for_another_platform_does_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", tag="cp312-cp312-manylinux_2_17_aarch64")
    assert missing(tmp_path, "top", LINUX) == {"top"}
    assert missing(tmp_path, "top", ARM) == set()


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_not_a_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some-1.0-py3-none-any.whl"
    file.write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"some-1\.0-py3-none-any\.whl"):
        read_wheel(file).requirements((), LINUX)


def test_a_file_without_the_name_of_a_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"some\.whl"):
        read_wheel(tmp_path / "some.whl")


def test_the_wheel_is_built_from_a_checkout(tmp_path: Path) -> None:
    built = own_wheel(tmp_path, None, lambda line: None)
    assert (built.name, built.version) == ("trainspec", "0.1.0")
    with zipfile.ZipFile(built.file) as archive:
        assert "trainspec_cli/_data/recipes/quickstart.yaml" in archive.namelist()


@pytest.mark.slow
def test_without_a_checkout_pip_downloads_the_wheel_of_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = tmp_path / "stock"
    stock.mkdir()
    (tmp_path / "staging").mkdir()
    monkeypatch.setattr(wheels, "CHECKOUT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(stock))
    with pytest.raises(MachineError) as caught:
        own_wheel(tmp_path / "staging", None, lambda line: None)
    assert caught.value.problems[0].code == "no_own_wheel"
    make_wheel(stock, "trainspec", "0.1.0")
    assert own_wheel(tmp_path / "staging", None, lambda line: None).version == "0.1.0"


# Platforms


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("py3-none-any", True),
        ("cp312-cp312-manylinux_2_28_x86_64", True),
        ("cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64", True),
        ("cp39-abi3-manylinux_2_17_x86_64", True),
        ("cp312-cp312-linux_x86_64", True),
        ("cp311-cp311-manylinux_2_17_x86_64", False),
        ("cp313-abi3-manylinux_2_17_x86_64", False),
        ("cp312-cp312-manylinux_2_34_x86_64", False),
        ("cp312-cp312-manylinux_2_17_aarch64", False),
        ("cp312-cp312-macosx_11_0_arm64", False),
    ],
)
def test_a_wheel_must_match_python_libc_and_processor(tag: str, fits: bool) -> None:
    assert check_target("3.12", GLIBC_2_28).supports(parse_tag(tag)) == fits


def test_a_mac_supports_wheels_of_older_systems() -> None:
    mac = check_target("3.12", "macosx_14_0_arm64")
    assert mac.supports(parse_tag("cp312-cp312-macosx_11_0_arm64"))
    assert mac.supports(parse_tag("cp312-cp312-macosx_11_0_universal2"))
    assert not mac.supports(parse_tag("cp312-cp312-macosx_15_0_arm64"))
    assert mac.markers["sys_platform"] == "darwin" and mac.markers["platform_machine"] == "arm64"


@pytest.mark.parametrize("name", ["linux_x86_64", "manylinux_3_1_x86_64", "win_amd64", "manylinux_2_28_", "../x"])
def test_an_unknown_platform_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_target("3.12", name)
    (problem,) = caught.value.problems
    assert problem.code == "unknown_value" and GLIBC_2_28 in problem.hint


def test_a_patch_version_of_python_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        check_target("3.12.1", GLIBC_2_28)
    assert [problem.code for problem in caught.value.problems] == ["wrong_type"]


def test_this_machine_runs_wheels_of_an_older_libc_but_not_of_a_newer_one() -> None:
    here = platform_here()
    family, major, minor, machine = here.split("_", 3)
    assert runs_here(here)
    assert runs_here(f"{family}_{major}_{int(minor) - 1}_{machine}") or minor == "0"
    assert not runs_here(f"{family}_{major}_{int(minor) + 1}_{machine}")
    assert not runs_here(here.replace(platform.machine(), "riscv64"))
    assert not runs_here("win_amd64")
