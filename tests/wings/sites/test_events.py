"""Events of sites are written, read back, published and described as those of the trunk are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.records import FieldError
from trainspec_cli.report.text import describe_event
from trainspec_cli.run.folder.event_types.event import Event
from trainspec_cli.run.folder.event_types.parse import event_types, parse_event
from trainspec_cli.run.folder.events import EventWriter, read_log
from trainspec_cli.wings.sites.events import EVENT_TYPES, ExchangeEvent, IntervalEvent

EXCHANGE = ExchangeEvent(
    step=8, round=2, sites=(0, 2), members=(0, 1, 2), waited_s=0.5, sent_bytes=4096, received_bytes=8192
)
INTERVAL = IntervalEvent(
    step=18,
    round=4,
    interval_steps=40,
    delay_steps=20,
    before_interval_steps=8,
    before_delay_steps=2,
    reason="exchanges take 17.8 steps",
)
SCHEMA = Path(__file__).parents[3] / "conf" / "schema" / "event.json"


@pytest.mark.parametrize("event", [EXCHANGE, INTERVAL], ids=["exchange", "interval"])
def test_an_event_is_read_back_as_it_was_written(tmp_path: Path, event: Event) -> None:
    assert EVENT_TYPES[event.type] is type(event)
    writer = EventWriter(tmp_path / "rank00002.jsonl", 2)
    writer.write(event)
    writer.close()
    (found,) = read_log(tmp_path / "rank00002.jsonl")
    assert replace(found, time=0.0, rank=-1) == event
    plain = to_plain(event)
    for key in plain.keys() - {"type", "time", "rank"}:
        with pytest.raises(FieldError, match=f"`{key}`"):
            parse_event({name: value for name, value in plain.items() if name != key})
        with pytest.raises(FieldError, match=f"^`{key}`"):
            parse_event({**plain, key: {"a": "b"}})


def test_the_published_schema_has_them() -> None:
    cases = json.loads(SCHEMA.read_text())["allOf"]
    names = [case["if"]["properties"]["type"]["const"] for case in cases]
    assert {*EVENT_TYPES} <= {*names} and names == [*event_types()]


def test_a_new_interval_is_described_and_an_exchange_is_not() -> None:
    assert describe_event(EXCHANGE) == ""
    assert describe_event(INTERVAL) == (
        "step 18: from here sites exchange each fragment every 40 steps and apply it 20 steps late, where it was 8 and "
        "2: exchanges take 17.8 steps"
    )
