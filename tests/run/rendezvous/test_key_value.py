"""The key-value store by itself, without a server around it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainspec_cli.core.wire.rendezvous import OPERATIONS, AwaitKeys, GetKeys, KeyValues, MissingKey, SetKey
from trainspec_cli.run.rendezvous import server
from trainspec_cli.run.rendezvous.server import KeyValueStore


def ask(store: KeyValueStore, op: str, **request: Any) -> Any:
    return store.answer(OPERATIONS[op](**request)).value  # type: ignore[arg-type]


def test_a_key_that_is_deleted_or_set_anew_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STORE_BYTES", 8)
    store = KeyValueStore()
    for _ in range(3):
        ask(store, op="set", key="key", value="12345")
        ask(store, op="set", key="key", value="54321")
        with pytest.raises(ValueError, match="more than 8 bytes"):
            ask(store, op="append", key="key", value="6")
        assert ask(store, op="delete", key="key")
    assert not ask(store, op="delete", key="key")


def test_an_absent_key_counts_from_nothing_and_is_set_where_nothing_is_expected() -> None:
    store = KeyValueStore()
    assert [ask(store, op="add", key="n", amount=amount) for amount in (3, -1)] == [3, 2]
    assert ask(store, op="compare_set", key="x", expected="other", value="1") == "other"
    assert ask(store, op="compare_set", key="x", expected="", value="1") == "1"
    assert ask(store, op="compare_set", key="x", expected="", value="2") == "1"
    assert ask(store, op="compare_set", key="x", expected="1", value="2") == "2"
    ask(store, op="append", key="x", value="3")
    ask(store, op="append", key="y", value="4")
    assert asyncio.run(store.wait(GetKeys(("x", "y"), 1.0))) == KeyValues(("23", "4"))
    assert ask(store, op="count") == 3
    assert [ask(store, op="check", keys=keys) for keys in (["x", "y"], ["x", "z"])] == [True, False]


def test_it_is_waited_for_all_keys_and_the_first_that_does_not_come_is_named() -> None:
    async def meet() -> list[Any]:
        store = KeyValueStore()
        waiting = [
            asyncio.create_task(store.wait(operation(("a", "b"), 60.0))) for operation in (GetKeys, AwaitKeys, GetKeys)
        ]
        late = asyncio.create_task(store.wait(AwaitKeys(("a", "c", "d"), 0.01)))
        await asyncio.sleep(0)
        for key in ("b", "a"):
            store.answer(SetKey(key, key.upper()))
        return [*await asyncio.gather(*waiting), await late]

    both = KeyValues(("A", "B"))
    assert asyncio.run(asyncio.wait_for(meet(), 20)) == [both, KeyValues(()), both, MissingKey("c")]


def test_what_does_not_fit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STORE_BYTES", 8)
    store = KeyValueStore()
    ask(store, op="set", key="ab", value="cd")
    ask(store, op="set", key="x", value="yzz")
    with pytest.raises(ValueError, match="more than 8 bytes"):
        ask(store, op="set", key="q", value="")
    assert ask(store, op="count") == 2
