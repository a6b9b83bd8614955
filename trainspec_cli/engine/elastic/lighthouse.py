"""`python -m trainspec_cli.engine.elastic.lighthouse ADDRESS HEARTBEAT_MS JOIN_MS`: keeps which groups are there.

It has no authentication, so it listens on the job's own interface alone.
"""

from __future__ import annotations

import signal
import sys

TICK_MS = 50
"""Between looks at who has gone silent."""


def main() -> None:
    from torchft.coordination import LighthouseServer

    address, heartbeat_ms, join_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    server = LighthouseServer(
        bind=address, min_replicas=1, join_timeout_ms=join_ms, quorum_tick_ms=TICK_MS, heartbeat_timeout_ms=heartbeat_ms
    )
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    main()
