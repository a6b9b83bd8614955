"""Known versions of the training spec are read; others are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import (
    CURRENT_VERSION,
    NEWER_VERSION,
    UNKNOWN_VERSION,
    VERSIONS,
    check_version,
    find_fault,
    is_newer,
)
from trainspec_cli.core.reading.yaml_file import read_versioned_yaml


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_that_there_has_been_is_read(version: str) -> None:
    assert find_fault(version) is None


@pytest.mark.clause("VER-4")
@pytest.mark.parametrize("version", ["1.1", "1.10", "2.0", "10.0"])
def test_a_newer_version_is_told_by_name(version: str) -> None:
    fault = find_fault(version)
    assert fault is not None and fault.code == NEWER_VERSION
    assert f" version {version} " in fault.why and fault.why.endswith(" 0.1 and 1.0")
    assert fault.hint.endswith("pip install --upgrade trainspec")


@pytest.mark.clause("VER-5")
@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ("0.7", "'0.7' (known: 0.1 and 1.0)"),
        ("1", "'1' (known: "),
        ("1.0.0", "'1.0.0' (known: "),
        ("99999.0", "'99999.0' (known: "),
        ("", "'' (known: "),
        (1.0, "1.0 as "),
        (None, "None as "),
        (["1.0"], "['1.0'] as "),
        ("x" * 99, f"'{'x' * 39} (known: "),
    ],
)
def test_what_is_no_version_is_told_with_what_to_write(stated: object, why: str) -> None:
    fault = find_fault(stated)
    assert fault is not None and (fault.code, fault.hint) == (
        UNKNOWN_VERSION,
        f'write spec_version: "{CURRENT_VERSION}"',
    )
    assert "`spec_version`" in fault.why and why in fault.why


def test_numbers_are_compared_as_numbers() -> None:
    assert is_newer("1.10", than="1.9") and is_newer("10.0", than="9.1") and not is_newer("1.9", than="1.10")


def test_a_fault_names_the_file_and_the_line() -> None:
    with pytest.raises(MachineError) as caught:
        check_version(Path("a.jsonl"), "3.0", 7)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where(), problem.environment) == (NEWER_VERSION, "a.jsonl:7", True)


def test_yaml_is_read_without_its_version(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text('spec_version: "1.0"\na: 1\n')
    assert read_versioned_yaml(file) == {"a": 1}
    file.write_text('spec_version: "9.0"\na: 1\n')
    with refused(MachineError, NEWER_VERSION, "", "9.0"):
        read_versioned_yaml(file)
