"""Relay frames between two TAP devices, each late by the same time: `python relay.py TAP TAP MILLISECONDS`.

Frames keep their order. Prints `ready` once both devices are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65550
AT_ONCE = 64
"""Frames taken from a device before those that are due are sent."""


def open_tap(name: str) -> int:
    """Make a TAP device; it lives as long as the descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def relay(taps: tuple[int, int], delay_s: float) -> None:
    waiting: dict[int, deque[tuple[float, bytes]]] = {tap: deque() for tap in taps}
    """Frames by the device that they go out of, with the time at which they are due."""
    other = dict(zip(taps, reversed(taps), strict=True))
    while True:
        due_s = min((frames[0][0] for frames in waiting.values() if frames), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        for tap in select.select(taps, (), (), wait_s)[0]:
            take(tap, waiting[other[tap]], delay_s)
        now_s = time.monotonic()
        for tap, frames in waiting.items():
            while frames and frames[0][0] <= now_s:
                with contextlib.suppress(OSError):  # a link that is down loses frames
                    os.write(tap, frames.popleft()[1])


def take(tap: int, frames: deque[tuple[float, bytes]], delay_s: float) -> None:
    for _ in range(AT_ONCE):
        try:
            frames.append((time.monotonic() + delay_s, os.read(tap, FRAME_BYTES)))
        except BlockingIOError:
            return
        except OSError:  # the link is not up yet
            time.sleep(0.01)
            return


if __name__ == "__main__":
    first, second, delay_ms = sys.argv[1:]
    opened = open_tap(first), open_tap(second)
    os.nice(-10)  # a cable waits for no processor
    print("ready", flush=True)
    relay(opened, float(delay_ms) / 1e3)
