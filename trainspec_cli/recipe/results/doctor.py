"""The doctor's reports: one on each node, and one on all nodes of a job together. `doctor --json` prints them as
JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.tools import LinksResult, SpeedResult

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True)
class NodeReport:
    host: str
    """The node's name."""
    time: float
    """Unix time in seconds, on the node's own clock."""
    checks: tuple[Check, ...]
    speed: SpeedResult | None = None
    """None if it was not measured, or if the measurement failed."""
    heard_at: float | None = None
    """Unix time in seconds, on the first node's clock, when the report arrived; None for that node's own report."""

    def as_json(self) -> JsonObject:
        plain = to_plain(self) | {"speed": to_plain(self.speed) if self.speed else {}}
        return {key: value for key, value in plain.items() if key != "heard_at" or value is not None}


@dataclass(frozen=True)
class Diagnosis:
    status: Status
    """The worst status found."""
    hosts: tuple[NodeReport, ...]
    between: tuple[Check, ...]
    """Checks that compare nodes, and checks of the links between them."""
    slowest: str | None
    links: LinksResult | None
    """None for a single process."""

    def as_json(self) -> JsonObject:
        return to_plain(self) | {"hosts": [report.as_json() for report in self.hosts]}


# What a node's kernel and drivers say about a failure.


FaultCause = Literal[
    "xid",
    "ecc",
    "row_remap",
    "nvlink",
    "thermal",
    "nic",
    "link_down",
    "machine_check",
    "storage",
    "out_of_memory",
    "program",
    "lost",
]


FAULTS, DISK = "faults", "disk"
"""Names of the checks that list a node's faults, and the free space in the run folder."""


@dataclass(frozen=True)
class NodeFault:
    cause: FaultCause
    where: str
    """For example `GPU 0000:3b:00` or `mlx5_0 port 1`."""
    text: str
    """One line: the kernel's words, or a counter and its increase."""

    @property
    def is_of_machine(self) -> bool:
        """Return False if the program itself may have caused it."""
        return self.cause not in ("out_of_memory", "program")
