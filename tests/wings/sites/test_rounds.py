"""The rounds of distant sites on disk."""

from __future__ import annotations

from pathlib import Path

from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.files import write_versioned
from trainspec_cli.wings.sites.meeting import MeetingState, RoundRecord, SiteExchange, SitePieces
from trainspec_cli.wings.sites.meeting_point import Rounds

RECORD = RoundRecord(
    SiteExchange(1, (0,), 4, 6), SiteExchange(2, (1,), 8, 10), (0, 1), (0.5, 0.5), (SitePieces(0, ((0, 4), (4, 4))),)
)
STATE = MeetingState(1, 8, ((2, 1),), (RECORD,), merged_at=((0, 4), (1, 4)), misses=((1, 1),))


def test_a_meeting_continues_from_its_files(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path / "sites")
    assert rounds.load() == MeetingState()
    rounds.keep(STATE, {0: {0: b"zero"}, 1: {0: b"one"}})
    assert rounds.load() == STATE
    assert rounds.read(1, 0) == {0: b"zero", 1: b"one"}


def test_a_meeting_of_an_earlier_version_continues(tmp_path: Path) -> None:
    plain = to_plain(STATE)
    cadence = {"interval_steps": 8, "delay_steps": 2}
    plain |= {"held": [{"site": 0, "held_s": 0.5}], "needs": [3.5]}
    plain["records"] = [{**record, "cadence": cadence, "changed": None} for record in plain["records"]]  # type: ignore[union-attr]
    write_versioned(tmp_path / "meeting.json", plain)
    assert Rounds(tmp_path).load() == STATE
