"""What a run folder says of itself: run.json, plan.json and result.json, whoever wrote them."""

from __future__ import annotations

from types import NoneType
from typing import Any

from trainspec_cli.errors import RecipeError
from trainspec_cli.reading.files import unreadable
from trainspec_cli.reading.json_file import Kind, check_field, read_object, show_kind
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.results.plan import Plan

ABOUT: dict[str, Kind] = {"recipe": str, "created_at": float}
LATEST_S = 1e11
"""Unix seconds that a clock may show."""


def read_about(run: RunDir) -> dict[str, Any]:
    """run.json. Raises UnreadableFileError."""
    path = run.run_json
    about = read_object(path, ABOUT)
    if not 0 <= about["created_at"] < LATEST_S:
        raise unreadable(path, f"has {about['created_at']} as `created_at`; Unix seconds are needed")
    for name, kind in {"data_dir": str | NoneType, "resumes": list}.items():
        if name in about:
            check_field(path, about, name, kind)
    return about


def read_data_dir(run: RunDir) -> str | None:
    """The folder that the run reads its data from; None where it makes it up."""
    about = read_about(run)
    check_field(run.run_json, about, "data_dir", str | NoneType)
    data_dir: str | None = about["data_dir"]
    return data_dir


def read_plan(run: RunDir) -> Plan:
    """What the workers ran. Raises UnreadableFileError with everything that is wrong with plan.json."""
    plain = read_object(run.plan_json, {"spec": dict})
    try:
        return from_plain(Plan, plain)
    except RecipeError as error:
        hint = "it is damaged, or another version of trainspec wrote it"
        raise unreadable(run.plan_json, f"is no plan of this version: {error}", hint) from error


def read_plain_plan(run: RunDir) -> dict[str, Any]:
    """plan.json as it stands, of any version; empty where there is none. Raises UnreadableFileError."""
    if not run.plan_json.exists():
        return {}
    plan = read_object(run.plan_json, {"spec": dict})
    train = plan["spec"].get("train", {})
    if not isinstance(train, dict):
        raise unreadable(run.plan_json, "has no section `spec.train`")
    if "max_steps" in train:
        check_field(run.plan_json, train, "max_steps", int)
    return plan


def read_section(run: RunDir, name: str) -> dict[str, Any]:
    """A section of the run's recipe, of any version; empty where it has none. Raises UnreadableFileError."""
    section = read_plain_plan(run).get("spec", {}).get(name) or {}
    if not isinstance(section, dict):
        raise unreadable(run.plan_json, f"has {show_kind(section)} as `spec.{name}`; an object is needed")
    return section


def read_max_steps(run: RunDir) -> int | None:
    """Steps that the run was to make; None where no plan says."""
    max_steps: int | None = read_plain_plan(run).get("spec", {}).get("train", {}).get("max_steps")
    return max_steps


def read_result(run: RunDir) -> dict[str, Any]:
    """result.json; empty where the run has not ended. Raises UnreadableFileError."""
    if not run.result_json.exists():
        return {}
    result = read_object(run.result_json, {"status": str})
    kinds: dict[str, Kind] = {"exit_code": int | NoneType, "peak_memory_bytes": float | NoneType}
    for name, kind in {**kinds, "weights_sha256": str | NoneType}.items():
        if name in result:
            check_field(run.result_json, result, name, kind)
    return result
