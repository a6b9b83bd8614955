"""Agents' ends of the wire, for tests that poll the hub themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.channel.wire import Wire, call_hub

SECRET = b"s" * 32


def connect_agent(hub: Hub, secret: bytes = SECRET, poll: Callable[[], object] | None = None) -> Wire:
    """Shake hands while the hub is polled. Raises what `call_hub` does."""
    ends: list[Wire | OSError] = []

    def call() -> None:
        try:
            ends.append(call_hub(("127.0.0.1", hub.port), secret))
        except OSError as error:
            ends.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while caller.is_alive():
        (poll or hub.poll)()
        time.sleep(0.005)
    if isinstance(ends[0], OSError):
        raise ends[0]
    return ends[0]
