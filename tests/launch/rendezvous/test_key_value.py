"""The key-value store by itself, without a server around it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainspec_cli.launch.rendezvous import key_value
from trainspec_cli.launch.rendezvous.key_value import KeyValueStore


def ask(store: KeyValueStore, **request: Any) -> Any:
    return asyncio.run(store.answer(request))["value"]


def test_a_key_that_is_deleted_or_set_anew_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value, "STORE_BYTES", 8)
    store = KeyValueStore()
    for _ in range(3):
        ask(store, op="set", key="key", value="12345")
        ask(store, op="set", key="key", value="54321")
        with pytest.raises(ValueError, match="more than 8 bytes"):
            ask(store, op="append", key="key", value="6")
        assert ask(store, op="delete", key="key")
    assert not ask(store, op="delete", key="key")
