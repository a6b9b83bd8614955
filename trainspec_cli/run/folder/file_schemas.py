"""The JSON Schemas of the files that a run and a certification write, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.json_schema import events_schema, plan_schema, record_schema
from trainspec_cli.recipe.results.certificate import Certificate
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.events import EVENT_TYPES, ONE_OF, Event, event_types
from trainspec_cli.run.folder.record import RunRecord, RunResult

OF_DIRECTIVES = ("directive", "achieved", "buckets", "memory", "nodes", "nodes_achieved")
"""Types of events that appear as lines of directives.jsonl."""


FILE_SCHEMAS: Mapping[str, Callable[[], JsonObject]] = {
    "plan": lambda: plan_schema("plan.json", Plan),
    "run": lambda: record_schema("run.json", RunRecord, left_out=("others",)),
    "result": lambda: record_schema("result.json", RunResult),
    "event": lambda: events_schema("a line of a file of events", Event, event_types(), ONE_OF),
    "directive": lambda: events_schema(
        "a line of directives.jsonl", Event, {name: EVENT_TYPES[name] for name in OF_DIRECTIVES}, ONE_OF, closed=True
    ),
    "certificate": lambda: record_schema("a certificate", Certificate, is_versioned=False),
}
"""Maps the name of each kind of file to its schema in the current version."""
