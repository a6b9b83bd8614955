"""User-defined callbacks and trackers: classes that receive a run's events but cannot change its results.

They get the same events as the run folder, but have no access to the model. The state of the random generators is
restored after each call. The results of a run are therefore bitwise identical with and without them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainspec_cli.core.errors import Problem, RecipeError, WorkerError, did_you_mean
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.engine.accelerators import started_kind
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.user_code import CALLBACK, TRACKER, Extension, load, user_code_errors, worker_code_of
from trainspec_cli.run.folder.event_types.events import Event
from trainspec_cli.run.folder.paths import RunDir

CALLBACK_METHODS = {kind: f"on_{kind}" for kind in ("start", "step", "eval", "checkpoint", "sample", "warning", "end")}
"""Maps an event type to the callback method that receives it."""
TRACKER_METHODS = ("record", "close")


class OptionalCodeError(Exception):
    """Code marked as `optional` has failed; the run continues without it."""


@dataclass(frozen=True)
class RunFacts:
    """Information about the run that callbacks and trackers receive."""

    folder: Path
    """The run folder."""
    rank: int
    recipe: JsonObject
    """The full recipe, as plain values."""


class OwnWatcher:
    """Passes events to a user-defined callback or tracker."""

    def __init__(self, extension: Extension, made: Any, methods: Mapping[str, Callable[[Event], object]]):
        """`methods`: names of the methods to call, by event type; "" means all types."""
        self._extension = extension
        self._made = made
        self._methods = methods

    def record(self, event: Event) -> None:
        """Raises WorkerError if the code fails, or OptionalCodeError if the run can continue without it."""
        method = self._methods.get(event.type) or self._methods.get("")
        if method is not None:
            self._call(f"at {event.type} of step {getattr(event, 'step', 0)}", lambda: method(event))

    def close(self) -> None:
        if close := getattr(self._made, "close", None):
            self._call("when it was closed", close)

    def _call(self, when: str, call: Callable[[], object]) -> None:
        try:
            with user_code_errors(self._extension, when), keeping_generators():
                call()
        except WorkerError as error:
            if getattr(self._made, "optional", False):
                raise OptionalCodeError(f"{error}; the run continues without it") from error
            raise


def watchers_of(spec: RunSpec, run_dir: RunDir, rank: int) -> list[OwnWatcher]:
    """Create the recipe's callbacks and trackers for this rank: rank 0 gets all of them, and other ranks only those
    whose class sets `every_rank = True`. Raises RecipeError for invalid classes."""
    facts = RunFacts(run_dir.root.resolve(), rank, to_plain(spec))
    named = list(worker_code_of(spec))
    found = [_make_callback(extension, facts, spec) for extension in named if extension.kind is CALLBACK]
    found += [_make_tracker(extension, facts) for extension in named if extension.kind is TRACKER]
    return [watcher for watcher in found if watcher is not None]


def _make_callback(extension: Extension, facts: RunFacts, spec: RunSpec) -> OwnWatcher | None:
    made_of = load(extension)
    known = CALLBACK_METHODS.values()
    names = [name for name in dir(made_of) if name.startswith("on_")]
    if unknown := [name for name in names if name not in known]:
        message = f"`{extension.path}`: {extension.text} has a method `{unknown[0]}`, which is never called"
        hint = did_you_mean(unknown[0], known) or f"define only methods among {', '.join(known)}"
        raise RecipeError(Problem("unknown_name", message, extension.path, hint))
    if not names:
        message = f"`{extension.path}`: {extension.text} has none of {', '.join(known)}"
        raise RecipeError(
            Problem("missing_value", message, extension.path, "define one, such as def on_step(self, event): ...")
        )
    on_every_rank = getattr(made_of, "every_rank", False)
    if on_every_rank and spec.resilience.mode == "elastic":
        message = f"`{extension.path}`: {extension.text} sets every_rank, which resilience=elastic does not support"
        raise RecipeError(Problem("unsupported", message, extension.path, "set resilience=restart"))
    if facts.rank and not on_every_rank:
        return None
    made = _make(extension, made_of, facts)
    return OwnWatcher(
        extension, made, {kind: getattr(made, name) for kind, name in CALLBACK_METHODS.items() if name in names}
    )


def _make_tracker(extension: Extension, facts: RunFacts) -> OwnWatcher | None:
    made_of = load(extension)
    if missing := [name for name in TRACKER_METHODS if not hasattr(made_of, name)]:
        message = f"`{extension.path}`: {extension.text} has no method `{missing[0]}`; trackers have record and close"
        hint = "define record(self, event) and close(self)"
        raise RecipeError(Problem("missing_value", message, extension.path, hint))
    if facts.rank:
        return None
    made = _make(extension, made_of, facts)
    return OwnWatcher(extension, made, {"": made.record})


def _make(extension: Extension, made_of: Callable[..., Any], facts: RunFacts) -> Any:
    with user_code_errors(extension, "when it was created", RecipeError), keeping_generators():
        return made_of(facts)


@contextmanager
def keeping_generators() -> Iterator[None]:
    """After the block, restore the random generators of Python, numpy and torch to their state before it."""
    numpy: Any = sys.modules.get("numpy")
    kind = started_kind()
    devices = range(torch.accelerator.device_count()) if kind else ()
    python = random.getstate()
    arrays = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices, device_type=kind or "cpu"):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)
