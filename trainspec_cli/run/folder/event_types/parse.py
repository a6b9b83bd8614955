"""Reads the event that a line of a file holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from trainspec_cli.core.wings import Point, parts_of
from trainspec_cli.recipe.records import FieldError, read_record
from trainspec_cli.run.folder.event_types.events import (
    AchievedEvent,
    BucketsEvent,
    CadenceEvent,
    CheckpointEvent,
    CountersEvent,
    DirectiveEvent,
    EndedMark,
    EndEvent,
    EvalEvent,
    Event,
    FailureMark,
    FirstTextEvent,
    HangEvent,
    LaunchMark,
    LinkEvent,
    LinksEvent,
    LookEvent,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
    RecoveryEvent,
    RetryEvent,
    SampleEvent,
    StallEvent,
    StartEvent,
    StepEvent,
    UnknownEvent,
    UsageEvent,
    VerdictEvent,
    WarningEvent,
)

EVENT_TYPES_OF_WINGS: Point[Mapping[str, type[Event]]] = Point("event_types")
"""Types of events of a wing, each by its name. Where the wing is missing they are read as UnknownEvent."""
EVENT_TYPES: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "eval": EvalEvent,
    "checkpoint": CheckpointEvent,
    "cadence": CadenceEvent,
    "hang": HangEvent,
    "sample": SampleEvent,
    "first_text": FirstTextEvent,
    "warning": WarningEvent,
    "retry": RetryEvent,
    "recovery": RecoveryEvent,
    "directive": DirectiveEvent,
    "achieved": AchievedEvent,
    "buckets": BucketsEvent,
    "memory": MemoryEvent,
    "nodes": NodesEvent,
    "nodes_achieved": NodesAchievedEvent,
    "links": LinksEvent,
    "link": LinkEvent,
    "counters": CountersEvent,
    "stall": StallEvent,
    "usage": UsageEvent,
    "verdict": VerdictEvent,
    "look": LookEvent,
    "end": EndEvent,
    "launch": LaunchMark,
    "failure": FailureMark,
    "ended": EndedMark,
}


ONE_OF = {
    "step": ("tokens", "samples", "steps"),
    "eval": ("heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"),
}
"""Fields of which an event of each type has at least one."""


@cache
def event_types() -> Mapping[str, type[Event]]:
    """Return all types of events by name, with those of the wings, which are loaded for that."""
    return {name: kind for types in (EVENT_TYPES, *parts_of(EVENT_TYPES_OF_WINGS)) for name, kind in types.items()}


def parse_event(plain: Mapping[str, object]) -> Event:
    """Return the event that a line holds. Raises FieldError where a field that readers count on is missing, or one is
    not of its kind."""
    for key in ("type", "time"):
        if key not in plain:
            raise FieldError(f"it has no `{key}`")
    kind = plain["type"]
    found = None
    if isinstance(kind, str):  # wings are loaded only where the trunk has no event of that type
        found = EVENT_TYPES.get(kind) or event_types().get(kind)
    event = read_record(found or UnknownEvent, plain)
    choices = ONE_OF.get(event.type)
    if choices and not any(choice in plain for choice in choices):
        raise FieldError(f"it has none of {', '.join(f'`{choice}`' for choice in choices)}")
    return event
