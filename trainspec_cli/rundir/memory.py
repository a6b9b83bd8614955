"""Where a run keeps copies of its state in a host's memory: a folder that outlives its processes, but not the host."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir

MEMORY = Path("/dev/shm")


def newest_copy(run: RunDir) -> int:
    """The newest step that any rank of this host holds a copy of; 0 where there is none."""
    told = memory_folder(run).glob("slot*/rank*.json") if run.run_json.is_file() else ()
    return max((read_json(path)["about"]["step"] for path in told), default=0)


def memory_folder(run: RunDir) -> Path:
    """The same for every start of a run, on every host; of no other run, not even one made later in its place."""
    key = json.dumps([str(run.root.resolve()), read_json(run.run_json).get("created_at")], allow_nan=False)
    return MEMORY / f"trainspec-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
