"""`connected_worker.py RANK`: a worker that reports what its supervisor says, each message as a file of that name.

It tells the others that its memory ran out when the file `short` is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainspec_cli.recipe.results.verdict import LookOrder
from trainspec_cli.run.channel.messages import ExpectGroups, ShortageNote
from trainspec_cli.run.channel.worker import SupervisorConnection

RANK = int(sys.argv[1])
FOLDER = Path(sys.argv[2])


def main() -> None:
    supervisor = SupervisorConnection.of_worker(RANK)
    is_short = False
    while True:
        time.sleep(0.01)
        for kind in (ExpectGroups, LookOrder, ShortageNote):
            for message in supervisor.receive(kind):
                (FOLDER / f"{RANK}-{message}").touch()
        if not is_short and (FOLDER / f"short{RANK}").exists():
            is_short = True
            supervisor.send(ShortageNote(RANK, step=7))


if __name__ == "__main__":
    main()
