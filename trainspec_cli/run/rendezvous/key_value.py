"""The server side of the key-value store that builds process groups (torch.distributed's Store)."""

from __future__ import annotations

import asyncio
import time

from trainspec_cli.core.wire import rendezvous as messages

STORE_BYTES = 2**30
"""Maximum size of the store; requests that would exceed it are rejected."""


class KeyValueStore:
    """The store. Keys and values are text; the client encodes bytes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._changed: dict[str, asyncio.Event] = {}

    async def wait(self, request: messages.WaitRequest) -> messages.KeyValues | messages.MissingKey:
        """Wait until all keys in the request exist, and return their values if the request asks for them."""
        deadline = time.monotonic() + request.timeout_s
        for key in request.keys:
            while key not in self._values:
                changed = self._changed.setdefault(key, asyncio.Event())
                try:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await changed.wait()
                except TimeoutError:
                    return messages.MissingKey(key)
        wanted = request.keys if isinstance(request, messages.GetKeys) else ()
        return messages.KeyValues(tuple(self._values.get(key, "") for key in wanted))

    def answer(self, request: messages.KeyRequest) -> messages.StoreAnswer:
        """Answer a request. Raises ValueError if the store would grow too large, or if the value to add to is not a
        number."""
        value: str | int | bool | None = None
        match request:
            case messages.SetKey(key, new):
                self._put(key, new)
            case messages.AppendToKey(key, new):
                self._put(key, self._values.get(key, "") + new)
            case messages.AddToKey(key, amount):
                value = int(self._put(key, str(int(self._values.get(key, "0")) + amount)))
            case messages.CompareAndSetKey(key, expected, new):
                is_expected = self._values.get(key, "") == expected
                value = self._put(key, new) if is_expected else self._values.get(key, expected)
            case messages.DeleteKey(key):
                value = key in self._values
                if value:
                    self._bytes -= len(key) + len(self._values.pop(key))
            case messages.CountKeys():
                value = len(self._values)
            case messages.CheckKeys(keys):
                value = all(key in self._values for key in keys)
        return messages.StoreAnswer(value)

    def _put(self, key: str, value: str) -> str:
        grown = self._bytes + len(key) + len(value) - (len(self._values[key]) + len(key) if key in self._values else 0)
        if grown > STORE_BYTES:
            raise ValueError(f"the store would hold more than {STORE_BYTES} bytes")
        self._bytes, self._values[key] = grown, value
        if changed := self._changed.pop(key, None):
            changed.set()
        return value
