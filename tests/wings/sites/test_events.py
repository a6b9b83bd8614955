"""Events of sites are written, read, published and described like those of the trunk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.recipe.records import FieldError, to_plain
from trainspec_cli.reporter.text import describe_event
from trainspec_cli.run.folder.event_types.events import event_types, parse_event
from trainspec_cli.run.folder.events import EventWriter, read_log
from trainspec_cli.wings.sites.events import EVENT_TYPES, ExchangeEvent

EXCHANGE = ExchangeEvent(
    step=8, round=2, sites=(0, 2), members=(0, 1, 2), waited_s=0.5, sent_bytes=4096, received_bytes=8192
)
SCHEMA = Path(__file__).parents[3] / "conf" / "schema" / "event.json"


def test_an_event_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert EVENT_TYPES[EXCHANGE.type] is ExchangeEvent
    writer = EventWriter(tmp_path / "rank00002.jsonl", 2)
    writer.write(EXCHANGE)
    writer.close()
    (found,) = read_log(tmp_path / "rank00002.jsonl")
    assert replace(found, time=0.0, rank=-1) == EXCHANGE
    plain = to_plain(EXCHANGE)
    for key in plain.keys() - {"type", "time", "rank"}:
        with pytest.raises(FieldError, match=f"`{key}`"):
            parse_event({name: value for name, value in plain.items() if name != key})
        with pytest.raises(FieldError, match=f"^`{key}`"):
            parse_event({**plain, key: {"a": "b"}})


def test_the_published_schema_has_them() -> None:
    cases = json.loads(SCHEMA.read_text())["allOf"]
    names = [case["if"]["properties"]["type"]["const"] for case in cases]
    assert {*EVENT_TYPES} <= {*names} and names == [*event_types()]


def test_an_exchange_is_not_described() -> None:
    assert describe_event(EXCHANGE) == ""
