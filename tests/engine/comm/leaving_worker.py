"""`leaving_worker.py FOLDER`: joins, and leaves with what no teardown of the interpreter would survive."""

import atexit
import os
import sys
from pathlib import Path

from trainspec_cli.engine.comm.joining import join_processes, leave_processes

FOLDER = Path(sys.argv[1])


class Held:
    """What a thread of gloo's does to a process whose interpreter is taken down, done by something that always does."""

    def __del__(self) -> None:
        os.abort()


held = Held()
join_processes("cpu")
atexit.register((FOLDER / "handled").touch)
print("said", end="")
leave_processes()
