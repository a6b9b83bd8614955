"""The shell script that starts an emitted run, with the environment that belongs to it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from trainspec_cli.json_value import JsonValue

FOLDER = '"$(dirname "$0")"'
"""The folder of the script, which holds the other files."""
USER_SCRIPT = ': "${SCRIPT:?set SCRIPT to your training script, such as SCRIPT=train.py}"'


def shell_script(
    about: str, command: Iterable[str], environment: Mapping[str, JsonValue], *, needs: Iterable[str] = ()
) -> str:
    """Return a bash script; the words of `command` are shell text already."""
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in environment.items()]
    lines = ["#!/usr/bin/env bash", f"# {about}", "set -euo pipefail", *needs, *exports]
    return "\n".join([*lines, "exec " + " \\\n  ".join(command) + ' "$@"', ""])


def options(keys: Mapping[str, JsonValue]) -> list[str]:
    """Return `--name value` words; true is a flag alone, false and null are left out, a list is several words."""
    return [words for name, value in keys.items() if (words := option(name, value))]


def option(name: str, value: JsonValue) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return name
    items = value if isinstance(value, list) else [value]
    return " ".join([name, *(shlex.quote(number(item)) for item in items)])


def number(value: JsonValue) -> str:
    """Return a value as programs read it back."""
    return repr(value) if isinstance(value, float) else str(value)


RENDEZVOUS = '--rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?the first node, as HOST:PORT}"'


def torchrun(nodes: int, devices: int) -> list[str]:
    """Return the words of torchrun for so many nodes."""
    if nodes == 1:
        return ["torchrun", f"--standalone --nproc-per-node {devices}"]
    return ["torchrun", f"--nnodes {nodes} --nproc-per-node {devices}", RENDEZVOUS]
