"""Record, for later launches, the settings that made runs on this machine run out of memory.

There is one file per plan in the cache. Its name depends on everything that determines a plan's memory except the
settings themselves: the machine, the model, the layout, formats and versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import cache_dir, make_cache
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import Absent, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Relief
from trainspec_cli.run.folder.event_types.events import MemoryEvent
from trainspec_cli.run.folder.events import EventTail
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.tools import figures_path, read_figures

KIND = "memory"


@dataclass(frozen=True)
class Learned:
    """One out-of-memory failure."""

    relief: Relief
    run: str
    """The folder of the run that ran out of memory."""
    at: float
    """Unix time in seconds."""
    predicted_bytes: float | None = None
    """The memory that the plan predicts for the device or for the process."""
    used_bytes: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True)
class MemoryLimits:
    """All out-of-memory failures of one plan, oldest first."""

    model: str
    device: str
    layout: str
    learned: tuple[Learned, ...] = ()

    @property
    def reliefs(self) -> list[Relief]:
        return [learned.relief for learned in self.learned]


def read_limits(plan: Plan, machine: Machine) -> MemoryLimits:
    """Return the out-of-memory failures of `plan` on `machine` so far; there may be none."""
    known = read_figures(MemoryLimits, _path(plan, machine))
    return known or MemoryLimits(
        plan.spec.model.name or plan.spec.model.family, _device(machine), plan.as_one_group.layout.describe()
    )


def list_limits() -> list[tuple[Path, MemoryLimits]]:
    """List the out-of-memory failures of this user's runs on this machine, newest first."""
    found = ((path, read_figures(MemoryLimits, path)) for path in (cache_dir() / "machine").glob(f"{KIND}-*.json"))
    known = [(path, limits) for path, limits in found if limits is not None and limits.learned]
    return sorted(known, key=lambda pair: -pair[1].learned[-1].at)


def forget_limits() -> int:
    """Forget everything, and return the number of plans that were forgotten."""
    paths = [path for path, _ in list_limits()]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


class LimitsWatch:
    """Records the out-of-memory failures of a live run. Call `look` repeatedly. Faults injected by a recipe are
    ignored."""

    def __init__(self, run: RunDir, plan: Plan, machine: Machine, now: Callable[[], float] = time.time):
        self._run = run
        self._machine = machine
        self._now = now
        # A plan after a scheduled layout change still contains the initial layout's prediction, so drop it.
        changed = [replace(plan.with_layout(change), prediction=None) for change in plan.changes]
        self._plans = {one.layout.describe(): one for one in (*changed, plan)}
        """The plans, keyed by the axes of their layouts."""
        self._tail = None if plan.spec.fault else EventTail(run.directives)

    def look(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Record new failures. If the cache cannot be read or written, `report` is called once and nothing more is
        recorded, because the run itself does not need the record."""
        if self._tail is None:
            return
        try:
            for event in self._tail.read():
                if not isinstance(event, MemoryEvent) or event.layout not in self._plans:
                    continue
                plan = self._plans[event.layout]
                limits = read_limits(plan, self._machine)
                learned = Learned(
                    Relief(event.failed, event.taken),
                    run=str(self._run.root.absolute()),
                    at=self._now(),
                    predicted_bytes=plan.prediction.needed_bytes if plan.prediction else None,
                    used_bytes=_known(event.used_bytes),
                    limit_bytes=_known(event.limit_bytes),
                )
                # If the same setting has failed before, the newer run's record is more reliable.
                others = [one for one in limits.learned if one.relief.failed != learned.relief.failed]
                make_cache()
                write_json(_path(plan, self._machine), to_plain(replace(limits, learned=(*others, learned))))
        except (MachineError, OSError) as error:
            self._tail = None
            report(f"this out-of-memory failure is not recorded for later launches: {error}")


def _known(value: int | Absent | None) -> int | None:
    return None if isinstance(value, Absent) else value


def _device(machine: Machine) -> str:
    return machine.gpu_names[0] if machine.gpu_names else machine.hostname


def _path(plan: Plan, machine: Machine) -> Path:
    spec = to_plain(plan.spec)
    whole = to_plain(plan)
    facts = {key: spec[key] for key in ("model", "lora", "compile", "precision", "kernels")}
    facts |= {key: whole[key] for key in ("layout", "device", "replica_groups", "num_nodes")}
    return figures_path(
        KIND, plan, machine, {"plan": facts, "seq_len": plan.spec.data.seq_len, "optimizer": plan.spec.optim.name}
    )
