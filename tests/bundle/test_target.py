"""The platforms that a bundle can be for."""

from __future__ import annotations

import platform

import pytest
from packaging.tags import parse_tag

from trainspec_cli.bundle.installer import platform_here, runs_here
from trainspec_cli.bundle.target import check_target
from trainspec_cli.errors import RecipeError

GLIBC_2_28 = "manylinux_2_28_x86_64"


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
def test_a_wheel_fits_by_its_python_its_libc_and_its_processor(tag: str, fits: bool) -> None:
    assert check_target("3.12", GLIBC_2_28).takes(parse_tag(tag)) == fits


def test_a_mac_takes_wheels_for_older_ones() -> None:
    mac = check_target("3.12", "macosx_14_0_arm64")
    assert mac.takes(parse_tag("cp312-cp312-macosx_11_0_arm64"))
    assert mac.takes(parse_tag("cp312-cp312-macosx_11_0_universal2"))
    assert not mac.takes(parse_tag("cp312-cp312-macosx_15_0_arm64"))
    assert mac.markers["sys_platform"] == "darwin" and mac.markers["platform_machine"] == "arm64"


@pytest.mark.parametrize("name", ["linux_x86_64", "manylinux_3_1_x86_64", "win_amd64", "manylinux_2_28_", "../x"])
def test_another_platform_is_refused_with_one_that_is_none(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_target("3.12", name)
    (problem,) = caught.value.problems
    assert name in problem.message and GLIBC_2_28 in problem.hint


def test_a_pythons_patch_version_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"--python is 3\.12\.1"):
        check_target("3.12.1", GLIBC_2_28)


def test_this_machine_runs_wheels_of_an_older_libc_and_of_no_newer_one() -> None:
    here = platform_here()
    family, major, minor, machine = here.split("_", 3)
    assert runs_here(here)
    assert runs_here(f"{family}_{major}_{int(minor) - 1}_{machine}") or minor == "0"
    assert not runs_here(f"{family}_{major}_{int(minor) + 1}_{machine}")
    assert not runs_here(here.replace(platform.machine(), "riscv64"))
    assert not runs_here("win_amd64")
