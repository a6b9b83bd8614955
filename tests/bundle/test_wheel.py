"""What a wheel says, and whether a set of wheels is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.wheels import make_wheel
from packaging.requirements import Requirement

from trainspec_cli.bundle.target import WheelTarget
from trainspec_cli.bundle.wheel import missing_requirements, read_wheel, unfit_wheels
from trainspec_cli.reading.files import UnreadableFileError

LINUX = WheelTarget("3.12", "manylinux_2_28_x86_64")
ARM = WheelTarget("3.12", "manylinux_2_28_aarch64")
MAC = WheelTarget("3.12", "macosx_14_0_arm64")


def missing(folder: Path, wanted: str, target: WheelTarget = LINUX) -> set[str]:
    wheels = [read_wheel(file) for file in folder.glob("*.whl")]
    return {requirement.name for requirement in missing_requirements(wheels, Requirement(wanted), target)}


def test_what_a_package_needs_of_others_is_missed_too(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["middle>=1"])
    make_wheel(tmp_path, "middle", requires=["bottom", "top"])
    assert missing(tmp_path, "top") == {"bottom"}
    make_wheel(tmp_path, "bottom")
    assert missing(tmp_path, "top") == set()


def test_a_version_that_is_not_asked_for_is_not_enough(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["bottom>=2"])
    make_wheel(tmp_path, "bottom", "1.9")
    assert missing(tmp_path, "top") == {"bottom"}


def test_markers_are_judged_by_the_target_and_not_by_this_machine(tmp_path: Path) -> None:
    requires = [
        "on-arm; platform_machine == 'aarch64'",
        "on-mac; sys_platform == 'darwin'",
        "old; python_version < '3.12'",
    ]
    make_wheel(tmp_path, "top", requires=requires)
    assert missing(tmp_path, "top", LINUX) == set()
    assert missing(tmp_path, "top", ARM) == {"on-arm"}
    assert missing(tmp_path, "top", MAC) == {"on-mac"}


def test_an_extra_is_missed_where_it_is_asked_for(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", requires=["more; extra == 'all'"], headers={"Provides-Extra": "all"})
    assert missing(tmp_path, "top") == set()
    assert missing(tmp_path, "top[all]") == {"more"}


def test_a_wheel_for_another_platform_does_not_count(tmp_path: Path) -> None:
    make_wheel(tmp_path, "top", tag="cp312-cp312-manylinux_2_17_aarch64")
    assert missing(tmp_path, "top", LINUX) == {"top"}
    assert missing(tmp_path, "top", ARM) == set()


def test_a_wheel_that_fits_no_target_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    fits = make_wheel(tmp_path, "fits")
    wrong = make_wheel(tmp_path, "wrong", "2.0", tag="cp311-cp311-manylinux_2_17_x86_64")
    (problem,) = unfit_wheels([read_wheel(fits), read_wheel(wrong)], [LINUX, ARM])
    assert str(wrong) in problem.message and "manylinux_2_28_aarch64 with Python 3.12" in problem.message
    assert "pip download" in problem.hint and "wrong==2.0" in problem.hint


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        ({"License-Expression": "MIT OR Apache-2.0", "License": "other"}, "MIT OR Apache-2.0"),
        ({"License": "BSD-3-Clause"}, "BSD-3-Clause"),
        ({"License": "x" * 101, "Classifier": "License :: OSI Approved :: MIT License"}, "MIT License"),
        ({"License": "UNKNOWN"}, ""),
        ({}, ""),
    ],
)
def test_the_licence_is_the_clearest_that_the_wheel_names(
    tmp_path: Path, headers: dict[str, str], licence: str
) -> None:
    assert read_wheel(make_wheel(tmp_path, "some", headers=headers)).licence == licence


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_wheel_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some-1.0-py3-none-any.whl"
    file.write_bytes(content)
    with pytest.raises(UnreadableFileError, match="is no wheel"):
        read_wheel(file).requirements((), LINUX)


def test_a_file_that_has_no_wheels_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match=r"some\.whl is no wheel"):
        read_wheel(tmp_path / "some.whl")
