"""The key-value store that process groups are built with (torch.distributed's Store), on the server's side."""

from __future__ import annotations

import asyncio
import time
from typing import Any

STORE_BYTES = 2**30
"""The largest size of the store; requests beyond it are refused."""


class KeyValueStore:
    """The store. Keys and values are text; the client encodes bytes.

    Raises KeyError, TypeError or ValueError for a malformed request.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._changed: dict[str, asyncio.Event] = {}
        self._operations = {
            "set": self._set,
            "add": self._add,
            "compare_set": self._compare_set,
            "append": self._append,
            "delete": self._delete,
            "count": self._count,
            "check": self._check,
        }

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request; `get` and `wait` block until their keys exist."""
        operation = request["op"]
        if operation in ("get", "wait"):
            keys = [str(key) for key in request["keys"]]
            missing = await self._await_keys(keys, float(request["timeout_s"]))
            if missing:
                return {"missing": missing}
            return {"values": [self._values.get(key, "") for key in keys] if operation == "get" else []}
        return {"value": self._operations[operation](request)}

    async def _await_keys(self, keys: list[str], timeout_s: float) -> str | None:
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

    def _set(self, request: dict[str, Any]) -> None:
        self._put(str(request["key"]), str(request["value"]))

    def _add(self, request: dict[str, Any]) -> int:
        key = str(request["key"])
        return int(self._put(key, str(int(self._values.get(key, "0")) + int(request["amount"]))))

    def _compare_set(self, request: dict[str, Any]) -> str:
        """Compare and set as torch's stores do: an absent key is set if the expected value is empty."""
        key, expected = str(request["key"]), str(request["expected"])
        if self._values.get(key, "") != expected:
            return self._values.get(key, expected)
        return self._put(key, str(request["value"]))

    def _append(self, request: dict[str, Any]) -> None:
        key = str(request["key"])
        self._put(key, self._values.get(key, "") + str(request["value"]))

    def _delete(self, request: dict[str, Any]) -> bool:
        key = str(request["key"])
        if key not in self._values:
            return False
        self._bytes -= len(key) + len(self._values.pop(key))
        return True

    def _count(self, request: dict[str, Any]) -> int:
        return len(self._values)

    def _check(self, request: dict[str, Any]) -> bool:
        return all(str(key) in self._values for key in request["keys"])
