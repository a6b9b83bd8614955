"""Report how a run has ended, to a command or to a web address. If reporting fails, there is only a warning."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile

from trainspec_cli.core.environment_names import MESSAGE, RUN, STATUS
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult

COMMAND_S, WEB_S = 30.0, 10.0
"""Maximum time in seconds to wait for a command or a server."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://\S+")
"""Matches an address and nothing else. A shell line that mentions an address contains other words too."""


@dataclass(frozen=True)
class Notify:
    """The recipient of the report."""

    whom: str = ""
    """A shell line, or an http or https address; empty for no report."""

    def __post_init__(self) -> None:
        found = _ADDRESS.fullmatch(self.whom)
        if found and found[1].lower() not in ("http", "https"):
            message = (
                f"--notify is `{self.whom}`; expected a command, or an address that starts with https:// or http://"
            )
            raise RecipeError(Problem("usage", message, "--notify", "such as --notify https://hooks.example.org/T0/B0"))

    @property
    def options(self) -> list[str]:
        """Return the command-line options that specify this recipient."""
        return ["--notify", self.whom] if self.whom else []


NOBODY = Notify()


def notify(wanted: Notify, run: RunDir, recipe: str, result: RunResult, reason: str) -> Iterator[str]:
    """Report how the run has ended; yield a line if the report failed. `reason`: why the run failed, if it did."""
    if not wanted.whom:
        return
    reach = _post if _ADDRESS.fullmatch(wanted.whom) else _call
    # Chat services show the value of `text`.
    host = socket.gethostname()
    text = f"trainspec: {recipe} ({run.root} on {host}): {result.status} after {result.steps} steps"
    about: JsonObject = {
        "text": f"{text}: {reason}" if reason else text,
        "run": str(run.root),
        "host": host,
        "recipe": recipe,
        "status": result.status,
        "exit_code": result.exit_code,
        "steps": result.steps,
        "loss": result.final_loss,
    }
    if why := reach(wanted.whom, about):
        yield f"warning: --notify {wanted.whom}: {why}"


def _call(command: str, about: JsonObject) -> str:
    """Run a shell line with the JSON on its standard input; return why it failed, or "". Input and output are files,
    not pipes, so that background processes of the command do not block this process."""
    facts = {RUN: str(about["run"]), STATUS: str(about["status"]), MESSAGE: str(about["text"])}
    try:
        with TemporaryFile() as given, TemporaryFile() as said:
            given.write(json_text(about).encode())
            given.seek(0)
            shell = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env={**os.environ, **facts},
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
            code = _await(shell)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
    except (OSError, ValueError) as error:
        return str(error)
    if code is None:
        return f"it did not end within {COMMAND_S:.0f} s"
    return "" if code == 0 else f"exit code {code}{f': {lines[-1]}' if lines else ''}"


def _await(shell: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a command in a separate session; None if the command and its processes were killed."""
    try:
        return shell.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        return None


def _post(address: str, about: JsonObject) -> str:
    """Post the JSON to the address; return why that failed, or ""."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen  # imported here because it is slow to import and rarely needed

    try:
        request = Request(address, json_text(about).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=WEB_S):
            return ""
    except (OSError, HTTPException, ValueError) as error:  # this includes URLError
        return str(error) or type(error).__name__
