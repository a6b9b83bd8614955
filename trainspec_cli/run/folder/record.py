"""The records of a run folder: run.json, plan.json and result.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import read_field, read_text, show_kind, unreadable
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import (
    ABSENT,
    Absent,
    Count,
    FieldError,
    canonical_json,
    from_plain,
    number,
    read_record,
    to_plain,
)
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Shortage
from trainspec_cli.run.folder.accounting import Recovery, WallTime
from trainspec_cli.run.folder.event_types.events import SetFigures
from trainspec_cli.run.folder.files import read_versioned, read_versioned_record, write_versioned
from trainspec_cli.run.folder.paths import COMMAND, RECIPE, RunDir

ErrorRecord = TypeVar("ErrorRecord", "WorkerErrorRecord", "NodeErrorRecord")
PLAN_DIGEST = "sha256"
"""The key in plan.json for the digest of all other keys, in plans since 1.0."""
COMPOSED_BYTES = 2**18
"""The maximum size of a composed recipe, in bytes."""
UnixSeconds = Annotated[float, number(0, 1e11)]


@dataclass(frozen=True)
class Resume:
    """One call of `trainspec resume` for a run."""

    argv: tuple[str, ...]
    trainspec: str
    at: float
    from_step: int


@dataclass(frozen=True)
class RunRecord:
    """run.json: the origin of the run."""

    recipe: str
    created_at: UnixSeconds
    digest: str | Absent = ABSENT
    """The digest of the plan's spec."""
    argv: tuple[str, ...] | Absent = ABSENT
    trainspec: str | Absent = ABSENT
    """The trainspec version that created the run."""
    data_dir: str | Absent | None = ABSENT
    """The folder containing the run's data; None for generated data."""
    git: object = ABSENT
    """The state of the repository where the run was started; None without a repository. May also be content from
    another version."""
    resumes: tuple[object, ...] = ()
    """Calls of `trainspec resume`, oldest first: each is a `Resume`, or content from another version."""
    command: tuple[str, ...] | Absent = ABSENT
    """The user-defined command of a run without a recipe."""
    memory_secret: str | Absent = ABSENT
    """The random word that is part of the name of the folder for in-memory copies."""
    others: dict[str, object] = field(default_factory=dict)
    """Keys from other versions, which are preserved."""


def write_plan(run: RunDir, plan: Plan) -> None:
    """Write the plan for the workers, with its digest."""
    content = to_plain(plan)
    write_versioned(run.plan_json, {**content, PLAN_DIGEST: _digest(content)})


def read_run_record(run: RunDir) -> RunRecord:
    """Read run.json. Raises UnreadableFileError."""
    plain = read_versioned(run.run_json)
    try:
        record = read_record(RunRecord, {key: plain[key] for key in plain.keys() - {"others"}})
    except FieldError as fault:
        raise unreadable(run.run_json, f"is not a record of a run: {fault}") from fault
    known = to_plain(record).keys() - {"others"}
    return replace(record, others={key: value for key, value in plain.items() if key not in known})


def write_run_record(run: RunDir, record: RunRecord) -> None:
    plain = to_plain(record)
    del plain["others"]
    write_versioned(run.run_json, {**plain, **record.others})


def read_composed(run: RunDir) -> str:
    """Return the composed recipe as recorded; empty if it was not recorded. Raises UnreadableFileError."""
    return read_text(run.composed_yaml, COMPOSED_BYTES) if run.composed_yaml.exists() else ""


def read_data_dir(run: RunDir) -> str | None:
    """Return the folder containing the run's data; None for generated data."""
    data_dir = read_run_record(run).data_dir
    if isinstance(data_dir, Absent):
        raise unreadable(run.run_json, "has no `data_dir`; expected text or null")
    return data_dir


def kind_of_run(run: RunDir) -> str:
    """Return the run's kind: RECIPE, or COMMAND for a run started by a plug-in. Raises UnreadableFileError."""
    if not run.run_json.is_file() or isinstance(read_run_record(run).command, Absent):
        return RECIPE
    return COMMAND


def has_plan(run: RunDir) -> bool:
    """Return whether the run has a plan, even if it has not been written yet. Raises UnreadableFileError."""
    return kind_of_run(run) == RECIPE


def read_plan(run: RunDir) -> Plan:
    """Return the plan that the workers ran. Raises UnreadableFileError with everything that is wrong in plan.json."""
    return read_plan_file(run.plan_json)


def read_plan_of_all_nodes(run: RunDir) -> Plan:
    """Return the plan that each start of the run begins with; later plans may leave out dropped nodes. Raises the same
    errors as `read_plan`."""
    all_nodes = run.plan_of_all_nodes
    return read_plan_file(all_nodes if all_nodes.is_file() else run.plan_json)


def read_plan_file(path: Path) -> Plan:
    """Read a plan.json at any path. Raises the same errors as `read_plan`, and an error if the content does not match
    its digest."""
    plain = read_versioned(path)
    read_field(path, plain, "spec", dict)
    stated = plain.pop(PLAN_DIGEST, None)
    if stated is not None and stated != _digest(plain):
        hint = "undo the change, and pass the values that you want to change to trainspec resume: key=value"
        raise unreadable(path, "was altered: its content does not match its digest", hint)
    try:
        return from_plain(Plan, plain)
    except RecipeError as error:
        hint = "it is damaged, or another version of trainspec wrote it"
        raise unreadable(path, f"is not a plan of this version: {error}", hint) from error


def _digest(content: Mapping[str, object]) -> str:
    """Return the SHA-256 of a plan's content as stored on disk."""
    return hashlib.sha256(canonical_json(json.loads(json_text(content))).encode()).hexdigest()


@dataclass(frozen=True)
class PlanOutline:
    """The parts of plan.json that can be read regardless of its version; all of them are empty without a plan."""

    spec: JsonObject = field(default_factory=dict)
    total_steps: int | None = None
    """Same as `Plan.total_steps`; None if plan.json does not state it."""
    prediction: JsonValue = None
    kernels: JsonValue = field(default_factory=dict)
    replica_groups: int = 1


def read_plan_outline(run: RunDir) -> PlanOutline:
    """Read plan.json, regardless of its version. Raises UnreadableFileError."""
    path = run.plan_json
    if not path.exists():
        return PlanOutline()
    plan = read_versioned(path)
    spec = read_field(path, plan, "spec", dict)
    train = spec.get("train", {})
    if not isinstance(train, dict):
        raise unreadable(path, "has no section `spec.train`")
    max_steps = read_field(path, train, "max_steps", int) if "max_steps" in train else None
    steps = max_steps if plan.get("steps") is None else read_field(path, plan, "steps", int)
    groups = read_field(path, plan, "replica_groups", int) if "replica_groups" in plan else 1
    return PlanOutline(spec, steps, plan.get("prediction"), plan.get("kernels", {}), groups)


def read_section(run: RunDir, name: str) -> JsonObject:
    """Return a section of the run's recipe, regardless of its version; empty if the recipe has no such section. Raises
    UnreadableFileError."""
    section = read_plan_outline(run).spec.get(name) or {}
    if not isinstance(section, dict):
        raise unreadable(run.plan_json, f"has {show_kind(section)} as `spec.{name}`; expected an object")
    return section


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """result.json: how the run ended. It is written by the workers or, if they could not, by the supervisor, with null
    for values that only the workers know."""

    status: str
    """done, stopped or failed."""
    exit_code: int | None = None
    """Exit code of the supervisor or, for a user-defined command, of the command."""
    reason: str | Absent = ABSENT
    """Why the run failed; absent if it did not fail."""
    hint: str | Absent = ABSENT
    """What to do about the failure, if known."""
    steps: Count = 0
    final_loss: float | None = None
    heldout_loss: float | Absent | None = ABSENT
    heldout_bits_per_byte: float | Absent | None = ABSENT
    xz_bits_per_byte: float | Absent | None = ABSENT
    sets: dict[str, SetFigures] | Absent = ABSENT
    heldout_accuracy: float | Absent | None = ABSENT
    heldout_dice: float | Absent | None = ABSENT
    """The fields from `heldout_loss` to this one have the values of the last `eval` event."""
    tokens_per_s: float | Absent | None = ABSENT
    samples_per_s: float | Absent | None = ABSENT
    mfu: float | None = None
    peak_memory_bytes: Count | None = None
    wire_bytes: dict[str, Count] | Absent = ABSENT
    """Bytes that the ranks (of one replica group) sent to one another during the last start, by purpose: gradients,
    parameters, other. The kernel counts them at the sockets. Absent if the ranks use GPUs, whose links the kernel does
    not see."""
    weights_sha256: str | None = None
    goodput: float | None = None
    time_s: WallTime | Absent = ABSENT
    recoveries: tuple[Recovery, ...] | Absent = ABSENT
    """The cost of each failure, which the supervisor adds."""


def read_result(run: RunDir) -> RunResult | None:
    """Read result.json; None if the run has not ended. Raises UnreadableFileError."""
    if not run.result_json.exists():
        return None
    return read_versioned_record(run.result_json, RunResult, "result of a run")


def write_result(run: RunDir, result: RunResult) -> None:
    write_versioned(run.result_json, to_plain(result))


@dataclass(frozen=True, kw_only=True)
class WorkerErrorRecord:
    """errors/rank00000.json: the report of a failed worker."""

    rank: Count
    host: str
    type: str
    """The name of the exception's class."""
    message: str
    traceback: str
    time: UnixSeconds | None = None
    code: str | None = None
    """The error code, if the error is an anticipated one. Only the code `hang` comes with a traceback."""
    hint: str | None = None
    step: Count | None = None
    exit_code: int | None = None
    shortage: Shortage | None = None
    """The out-of-memory failure, if there was one."""


@dataclass(frozen=True, kw_only=True)
class NodeErrorRecord:
    """errors/node00001.json: a node that was lost or could not start."""

    node: Count
    host: str
    message: str
    lost: bool
    time: UnixSeconds | None = None
    hint: str = ""


def write_error(path: Path, error: WorkerErrorRecord | NodeErrorRecord) -> None:
    write_versioned(path, to_plain(error))


def read_error(path: Path, cls: type[ErrorRecord]) -> ErrorRecord:
    """Read a file in the run's errors folder. Raises UnreadableFileError."""
    return read_versioned_record(path, cls, "error of a run")
