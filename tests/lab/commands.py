"""A command of trainspec as in a terminal, in this process: another one imports for seconds what is here already."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from trainspec_cli.__main__ import run

Command = Callable[..., subprocess.CompletedProcess[str]]


def call(*arguments: str | Path, folder: Path, umask: int = -1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call a command in a working directory, with changes to its environment."""
    words = [str(argument) for argument in arguments]
    output = io.StringIO()
    errors = io.StringIO()
    before = os.umask(umask) if umask >= 0 else umask
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            patch.dict(os.environ, environment),
            patch.object(sys, "argv", ["trainspec", *words]),
        ):
            code = run(words)
    finally:
        if umask >= 0:
            os.umask(before)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
