"""A name server that records every query and knows no name: `python name_server.py FILE`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

ADDRESS = "127.0.0.1"


def serve_names(file: Path) -> None:
    """Record each queried name, and answer that it does not exist (RFC 1035, 4.1)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((ADDRESS, 53))
        print("ready", flush=True)
        while True:
            asked, sender = server.recvfrom(4096)
            with file.open("a") as names:
                names.write(f"{name_in(asked)}\n")
            server.sendto(asked[:2] + b"\x81\x83" + asked[4:6] + bytes(6) + asked[12:], sender)


def name_in(query: bytes) -> str:
    """Return the name in a query of DNS."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode(errors="replace"))
        at += 1 + length
    return ".".join(labels)


if __name__ == "__main__":
    serve_names(Path(sys.argv[1]))
