"""Stands in for Apptainer: obeys `exec` with the options that job scripts use, in a mount namespace of its own where
/opt is empty but for what is bound. The image's files are this machine's; its variables are its own."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "APPTAINERENV_"
OF_IMAGE = {"GREETING": "of the image", "PYTHONPATH": "/of/the/image"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
    parser.add_argument("action", choices=["exec"])
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--pwd", required=True)
    parser.add_argument("image", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if not asked.image.is_file():
        sys.exit(f"FATAL:   could not open image {asked.image}: no such file or directory")
    given = {name.removeprefix(PREFIX): value for name, value in os.environ.items() if name.startswith(PREFIX)}
    os.environ.update({**OF_IMAGE, **given, "APPTAINER_CONTAINER": str(asked.image)})
    script = "\n".join(["set -e", *_mounts(asked.bind), f"cd {shlex.quote(asked.pwd)}", 'exec "$@"'])
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "apptainer", *asked.command])


def _mounts(binds: Sequence[str]) -> Iterator[str]:
    yield "mount --make-rprivate /"
    yield "mount -t tmpfs none /opt"
    for bind in binds:
        source, target, *options = (shlex.quote(part) for part in bind.split(":"))
        if source != target:
            yield f"mkdir -p {target}"
            yield f"mount --bind {source} {target}"
        if options == ["ro"]:
            yield f"mount -o remount,bind,ro {target}"


if __name__ == "__main__":
    main()
