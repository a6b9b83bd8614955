"""A bundle's wheels as a software bill of materials: CycloneDX 1.6, JSON (https://cyclonedx.org/docs/1.6/json).

The few fields are written here: its library would bring four packages for them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

from trainspec_cli.bundle.installer import WHEELS, BundledFile
from trainspec_cli.bundle.own_wheel import NAME
from trainspec_cli.bundle.target import WheelTarget
from trainspec_cli.bundle.wheel import Wheel
from trainspec_cli.json_value import JsonObject, JsonValue

SBOM = "sbom.cdx.json"


def sbom(
    wheels: Sequence[Wheel],
    files: Mapping[str, BundledFile],
    extras: Sequence[str],
    targets: Sequence[WheelTarget],
    time: str,
) -> JsonObject:
    """Return the bill of materials. `time`: of its making, in UTC, as ISO 8601 has it."""
    (own,) = (wheel for wheel in wheels if wheel.name == NAME)
    others = [wheel for wheel in wheels if wheel is not own]
    component = {**_component(own, files), "type": "application"}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": time,
            "tools": {"components": [{"type": "application", "name": NAME, "version": own.version}]},
            "component": component,
        },
        "components": [_component(wheel, files) for wheel in others],
        "dependencies": [_dependencies(wheel, wheels, extras if wheel is own else (), targets) for wheel in wheels],
    }


def _component(wheel: Wheel, files: Mapping[str, BundledFile]) -> JsonObject:
    licences: JsonObject = {"licenses": [_licence(wheel.licence)]} if wheel.licence else {}
    return {
        "type": "library",
        "bom-ref": wheel.file.name,
        "name": wheel.name,
        "version": wheel.version,
        "hashes": [{"alg": "SHA-256", "content": files[f"{WHEELS}/{wheel.file.name}"].sha256}],
        **licences,
        "purl": f"pkg:pypi/{wheel.name}@{_quoted(wheel.version)}?file_name={_quoted(wheel.file.name)}",
    }


def _licence(text: str) -> JsonObject:
    """Return an SPDX expression as such; any other text is a licence's name."""
    try:
        return {"expression": canonicalize_license_expression(text)}
    except InvalidLicenseExpression:
        return {"license": {"name": text}}


def _quoted(text: str) -> str:
    """A purl holds a local version's plus as %2B."""
    return text.replace("+", "%2B")


def _dependencies(
    wheel: Wheel, wheels: Sequence[Wheel], extras: Sequence[str], targets: Sequence[WheelTarget]
) -> JsonObject:
    """Return the wheels that this one needs on any of the targets that it fits."""
    fitting = [target for target in targets if target.takes(wheel.tags)]
    names = {
        canonicalize_name(requirement.name) for target in fitting for requirement in wheel.requirements(extras, target)
    }
    needed: list[JsonValue] = [other.file.name for other in wheels if other.name in names]
    return {"ref": wheel.file.name, "dependsOn": needed}
