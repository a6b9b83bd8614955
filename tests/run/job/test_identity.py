"""The identity that distinguishes a machine from others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainspec_cli.run.job import job as identity
from trainspec_cli.run.job.job import machine_identity


def test_it_stays_the_same_differs_between_systems_and_does_not_show_what_it_is_made_of(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1" * 32 + "\n")
    other.write_text("2" * 32 + "\n")
    found = machine_identity((one,))
    assert re.fullmatch("[0-9a-f]{32}", found) and "1" * 32 not in found
    assert machine_identity((tmp_path / "none", one)) == found != machine_identity((other,))


def test_without_an_identity_of_the_system_the_address_of_its_network_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setattr(identity.uuid, "getnode", lambda: 0x02_42_AC_11_00_02)
    found = machine_identity((tmp_path / "empty",))
    monkeypatch.setattr(identity.uuid, "getnode", lambda: 0x02_42_AC_11_00_03)
    assert machine_identity((tmp_path / "empty",)) not in ("", found)


def test_an_address_that_was_drawn_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity.uuid, "getnode", lambda: 0x03_00_00_00_00_01)
    assert machine_identity(()) == ""
