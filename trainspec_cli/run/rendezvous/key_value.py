"""The key-value store that process groups are built with (torch.distributed's Store), on the server's side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from trainspec_cli.core.wire import rendezvous as messages

STORE_BYTES = 2**30
"""The largest size of the store; requests beyond it are refused."""


class KeyValueStore:
    """The store. Keys and values are text; the client encodes bytes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._changed: dict[str, asyncio.Event] = {}

    async def wait(self, request: messages.WaitRequest) -> messages.KeyValues | messages.MissingKey:
        """Wait until all keys of the request exist, and return their values where it asks for them."""
        missing = await self._await_keys(request.keys, request.timeout_s)
        if missing is not None:
            return messages.MissingKey(missing)
        wanted = request.keys if isinstance(request, messages.GetKeys) else ()
        return messages.KeyValues(tuple(self._values.get(key, "") for key in wanted))

    def answer(self, request: messages.KeyRequest) -> messages.StoreAnswer:
        """Raises ValueError where the store would grow too large, or a value to add to is no number."""
        return messages.StoreAnswer(self._carry_out(request))

    def _carry_out(self, request: messages.KeyRequest) -> str | int | bool | None:
        match request:
            case messages.SetKey(key, value):
                self._put(key, value)
            case messages.AppendToKey(key, value):
                self._put(key, self._values.get(key, "") + value)
            case messages.AddToKey(key, amount):
                return int(self._put(key, str(int(self._values.get(key, "0")) + amount)))
            case messages.CompareAndSetKey(key, expected, value):
                if self._values.get(key, "") != expected:
                    return self._values.get(key, expected)
                return self._put(key, value)
            case messages.DeleteKey(key):
                return self._delete(key)
            case messages.CountKeys():
                return len(self._values)
            case messages.CheckKeys(keys):
                return all(key in self._values for key in keys)
        return None

    async def _await_keys(self, keys: Sequence[str], timeout_s: float) -> str | None:
        """Return the first key that did not come in time."""
        deadline = time.monotonic() + timeout_s
        for key in keys:
            while key not in self._values:
                changed = self._changed.setdefault(key, asyncio.Event())
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await changed.wait()
                except TimeoutError:
                    return key
        return None

    def _put(self, key: str, value: str) -> str:
        grown = self._bytes + len(key) + len(value) - (len(self._values[key]) + len(key) if key in self._values else 0)
        if grown > STORE_BYTES:
            raise ValueError(f"the store would hold more than {STORE_BYTES} bytes")
        self._bytes, self._values[key] = grown, value
        if changed := self._changed.pop(key, None):
            changed.set()
        return value

    def _delete(self, key: str) -> bool:
        if key not in self._values:
            return False
        self._bytes -= len(key) + len(self._values.pop(key))
        return True
