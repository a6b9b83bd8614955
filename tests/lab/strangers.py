"""Another user of this machine, and a folder that both may write."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = 65534
"""nobody"""


def lacking() -> str:
    """Why nothing can be done as another user here; empty where it can."""
    return "" if os.geteuid() == 0 else "only root may act as another user"


def act(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script as the other user; $1, $2, ... are the arguments."""
    command = ["sh", "-c", script, "sh", *map(str, arguments)]
    return subprocess.run(
        command, user=USER, group=USER, extra_groups=[], umask=0, cwd="/", capture_output=True, text=True
    )


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder like /tmp and /dev/shm: everybody creates files in it, and removes only their own."""
    with tempfile.TemporaryDirectory(prefix="trainspec-shared-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)
