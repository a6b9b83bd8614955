"""Programs other than Slurm that find the nodes of a run and start trainspec on them (`cluster.manager`). Each is a
plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.wings import Point
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.check import packages, parts_for
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.notify import Notify

if TYPE_CHECKING:
    from trainspec_cli.session.recipe.load import Loaded


RecordChanges = Callable[[Machine, tuple[str, ...]], None]
"""Receives a description of the nodes, and the command that starts the run there."""


class Manager(Protocol):
    def launch(self, loaded: Loaded, notify: Notify, *, force: bool, as_json: bool, detach: bool) -> int:
        """Train a recipe; return the run's exit code, or 0 once it has started if `detach`. Raises TrainspecError if
        the run is rejected."""

    def resume(
        self,
        run: RunDir,
        spec: RunSpec,
        record: RecordChanges | None,
        notify: Notify,
        *,
        force: bool,
        as_json: bool,
        detach: bool,
    ) -> int:
        """Continue a run with the values of `spec`; otherwise like `launch`. `record`: records the values in the run if
        they have changed."""

    def ask_to_stop(self, run: RunDir) -> None:
        """Ask the supervisor of a run to stop, like one Ctrl-C."""


MANAGERS: Point[Manager] = Point("managers")


def manager_of(spec: RunSpec) -> Manager | None:
    """Return the program that starts the runs of a recipe; None if the user or Slurm does. Raises MachineError if its
    package is not installed."""
    if spec.cluster.manager != "none" and (missing := list(packages(spec))):
        raise MachineError(missing)
    return next(iter(parts_for(MANAGERS, spec)), None)
