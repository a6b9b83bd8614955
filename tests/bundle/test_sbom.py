"""The bill of materials: by CycloneDX's own schema, and what it says of each wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.wheels import make_wheel, make_whole_set

from trainspec_cli.bundle.record import list_files
from trainspec_cli.bundle.sbom import sbom
from trainspec_cli.bundle.target import WheelTarget
from trainspec_cli.bundle.wheel import wheels_in
from trainspec_cli.json_value import JsonObject

TARGETS = (WheelTarget("3.12", "manylinux_2_28_x86_64"), WheelTarget("3.12", "manylinux_2_28_aarch64"))


@pytest.fixture
def written(tmp_path: Path) -> JsonObject:
    make_whole_set(tmp_path / "wheels")
    make_wheel(tmp_path / "wheels", "torch", "2.13.0+cpu", headers={"License-Expression": "bsd-3-clause"})
    return sbom(wheels_in(tmp_path), list_files(tmp_path), ("more",), TARGETS, "2026-01-02T03:04:05+00:00")


def test_it_is_what_the_schema_of_cyclonedx_asks_for(written: JsonObject) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(written)) is None
    assert validator.validate_str(json.dumps({**written, "version": "one"})) is not None


def test_each_wheel_is_a_component_with_its_digest_and_its_licence(written: JsonObject, tmp_path: Path) -> None:
    by_name = {component["name"]: component for component in written["components"]}
    assert sorted(by_name) == ["deeper", "dep", "extra-dep", "pip", "torch"]
    assert by_name["torch"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu?file_name=torch-2.13.0%2Bcpu-py3-none-any.whl"
    assert by_name["torch"]["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert by_name["dep"]["licenses"] == [{"license": {"name": "BSD"}}]
    assert "licenses" not in by_name["deeper"]
    digests = list_files(tmp_path)
    assert by_name["dep"]["hashes"] == [
        {"alg": "SHA-256", "content": digests["wheels/dep-1.5-py3-none-any.whl"].sha256}
    ]


def test_it_says_what_needs_what(written: JsonObject) -> None:
    needs = {entry["ref"].partition("-")[0]: entry["dependsOn"] for entry in written["dependencies"]}
    assert needs["trainspec"] == ["dep-1.5-py3-none-any.whl", "extra_dep-1.0-py3-none-any.whl"]
    assert needs["dep"] == ["deeper-1.0-py3-none-any.whl"]
    assert needs["deeper"] == []
    assert written["metadata"]["component"]["name"] == "trainspec"
