"""What the user's processes use, as it is read from outside."""

from __future__ import annotations

import pytest
from lab.gpus.machines import play

from trainspec_cli.wings.own_script import watches


def test_use_of_gpus_that_do_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches.os.path, "exists", lambda path: True)
    for name, uses in (("busy", {4194301}), ("lost", set()), ("mismatched_driver", set())):
        with monkeypatch.context() as patch:
            play(name, patch)
            assert set(watches.gpu_uses()) == uses
