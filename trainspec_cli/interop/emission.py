"""The record of an emission: what is said exactly, what nearly, and what is not carried."""

from __future__ import annotations

from trainspec_cli.interop.run_values import RunValues
from trainspec_cli.interop.target import NotCarried, Said, Spoken, Target
from trainspec_cli.json_value import JsonObject, JsonValue

EMITTED = "emitted.json"


def emitted_json(target: Target, spoken: Spoken, run: RunValues, files: list[str]) -> JsonObject:
    """Return the record that lies beside the files."""
    said = [_said(one) for one in spoken.said]
    fixed: list[JsonValue] = [{"theirs": one.theirs, "value": one.value, "why": one.why} for one in spoken.fixed]
    return {
        "recipe": run.recipe,
        "engine": target.name,
        "engine_version": target.version,
        "files": [*files],
        "exact": [one for one in said if not one["reason"]],
        "approximate": [one for one in said if one["reason"]],
        "fixed": fixed,
        "not_carried": [_not_carried(one) for one in spoken.not_carried],
    }


def _said(one: Said) -> JsonObject:
    return {
        "ours": one.ours,
        "value": one.value,
        "theirs": one.theirs,
        "their_value": one.their_value,
        "place": one.place,
        "reason": one.approximate,
    }


def _not_carried(one: NotCarried) -> JsonObject:
    """`value` is null for a section."""
    return {"ours": one.ours, "value": one.value, "why": one.why}
