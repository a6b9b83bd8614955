"""Finds the run that a script is part of."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainspec_cli.core.environment_names import LAUNCH_ID, PROGRESS
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script.attachment.run import AttachedRun


def connect(checkpoints: str | Path | None) -> AttachedRun:
    """Return the run that `trainspec run` has started this process for; outside of one, a run without a folder, which
    is said once."""
    launch, _, progress = os.environ.get(PROGRESS, "").partition(":")
    inside = bool(launch) and launch == os.environ.get(LAUNCH_ID) and Path(progress).is_dir()
    run = RunDir(Path(progress).parents[1]) if inside else None
    if run is None and os.environ.get("RANK", "0") == "0":
        kept = f"; checkpoints are in {checkpoints}" if checkpoints else ", and no checkpoint is written"
        print(f"trainspec: not started by `trainspec run`: no events are written{kept}", file=sys.stderr)
    if checkpoints is None and run is not None:
        checkpoints = run.own_checkpoints
    return AttachedRun(run, Path(checkpoints).absolute() if checkpoints else None, Path(progress) if inside else None)
