"""Check a bundle: the digest of every file, and whether its wheels fit and are whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from trainspec_cli.bundle.installer import RECORD, WHEELS, BundleRecord, examine, read_bundle
from trainspec_cli.bundle.own_wheel import NAME
from trainspec_cli.bundle.target import check_target
from trainspec_cli.bundle.wheel import lacking, missing_requirements, unfit_wheels, wheels_in
from trainspec_cli.errors import Problem


@dataclass(frozen=True)
class CheckedBundle:
    record: BundleRecord
    num_wheels: int


def find_faults(folder: Path) -> list[Problem]:
    """Return everything that is wrong with the bundle in `folder`."""
    faults = [Problem(fault.code, fault.message, hint=fault.hint, environment=True) for fault in examine(folder)]
    return faults or _wrong_wheels(folder)


def read_checked(folder: Path) -> CheckedBundle:
    """Return what a bundle without faults says of itself."""
    return CheckedBundle(read_bundle(folder), len(wheels_in(folder)))


def _wrong_wheels(folder: Path) -> list[Problem]:
    """Return the wheels that fit none of the platforms, and the requirements that no wheel meets. Their digests are
    right: the bundle was made so, or bundle.json was written again."""
    record = read_bundle(folder)
    targets = [check_target(record.python, name) for name in record.platforms]
    if not targets:
        return [Problem("bad_bundle", f"{folder / RECORD} names no platform", hint=f"make it again: {record.command}")]
    wheels = wheels_in(folder)
    extras = f"[{','.join(record.extras)}]" if record.extras else ""
    wanted = Requirement(f"{NAME}{extras}=={record.version}")
    problems = unfit_wheels(wheels, targets)
    for target in targets:
        if missing := missing_requirements(wheels, wanted, target):
            problems += lacking(missing, target, str(folder / WHEELS)).problems
    return problems
