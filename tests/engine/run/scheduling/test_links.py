"""Links of real ranks: a slow line is named, and a rank that comes late is not taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab.ranks import outputs

from trainspec_cli.recipe.records import read_record
from trainspec_cli.reporter.text import describe_event
from trainspec_cli.run.folder.event_types.events import LinkEvent

WORKER = Path(__file__).with_name("link_worker.py")
RANKS, SLOW_FACTOR = 4, 10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The events of each part of the run."""
    file = tmp_path_factory.mktemp("links") / "meeting"
    printed = outputs(WORKER, [(file, rank) for rank in range(RANKS)])
    return json.loads(printed[0].splitlines()[-1])


def of_type(events: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == wanted]


@pytest.mark.slow
def test_the_slowed_axis_and_its_ranks_are_named_and_no_other(found: dict[str, list[dict[str, Any]]]) -> None:
    (change,) = of_type(found["slow"], "link")
    assert (change["axis"], change["ranks"]) == ("tp", [0, 1])
    assert change["before_bytes_per_s"] / change["now_bytes_per_s"] == pytest.approx(SLOW_FACTOR)
    assert change["since_step"] < change["step"]
    told = describe_event(read_record(LinkEvent, change))
    assert f"ranks 0, 1: {change['now_bytes_per_s'] / 1e9:.3g} GB/s, 0.1 " in told
    slowest = {link["axis"]: link for link in of_type(found["slow"], "links")[-1]["links"]}
    assert set(slowest) == {"tp", "dp_shard"}
    assert slowest["tp"]["ranks"] == [0, 1]
    assert slowest["tp"]["links"] == slowest["dp_shard"]["links"] == 2


@pytest.mark.slow
def test_a_rank_that_computes_for_longer_makes_the_others_wait_and_no_link_slow(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    assert not of_type(found["healthy"], "link")
    assert not of_type(found["late"], "link")
    (late,) = (link for link in of_type(found["late"], "links")[-1]["links"] if link["axis"] == "tp")
    assert late["samples"] == 14, "nine before, and five with a late rank"
    assert late["bytes_per_s"] == pytest.approx(late["sent_bytes"] / 0.03)
