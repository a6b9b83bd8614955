"""`trainspec get`: download a model from the Hugging Face Hub."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.environment_names import HUB_MIRROR
from trainspec_cli.core.errors import Interrupted, Problem, RecipeError
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.core.reading.files import expand
from trainspec_cli.core.reading.hub_cache import HubName, parse_hub_name
from trainspec_cli.recipe.json_text import json_text

REFRESH_S = 1.0


def get(
    model: Annotated[str, typer.Argument(metavar="hf:ORG/NAME", help="The model, by its name on the Hub.")],
    output: Annotated[
        Path | None,
        typer.Option(help=f"Folder for the files. [default: NAME, or ${HUB_MIRROR}/ORG/NAME]", show_default=False),
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    code: Annotated[
        bool, typer.Option("--code", help="Also download Python files, which trainspec never runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Download weights (safetensors), config and tokenizer; a second call continues. HF_TOKEN is the access token."""
    named = parse_hub_name(model.removeprefix("hf:"))
    if named is None:
        message = f"{model!r} is not the name of a model on the Hub"
        raise RecipeError(Problem("wrong_type", message, "hf:ORG/NAME", "type trainspec get hf:ORG/NAME"))
    if revision != "main":
        named = HubName(named.name, revision)
    folder = (output.expanduser() if output else _default(named)).absolute()
    from trainspec_cli.session.recipe.download import fetch  # deferred: loads the readers of weights

    try:
        fetched = fetch(named, folder, _DownloadLine().show, code=code)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        hint = "run the same command again: it continues where it stopped"
        raise Interrupted(Problem("interrupted", f"{folder}: the files so far are kept", hint=hint)) from None
    size = sum(file.bytes for file in fetched.files)
    if as_json:
        print(
            json_text(
                {
                    "path": str(folder),
                    "model": named.name,
                    "revision": named.revision,
                    "commit": fetched.commit,
                    "files": [file.name for file in fetched.files],
                    "bytes": size,
                    "received_bytes": fetched.received_bytes,
                }
            )
        )
        return
    received = f"{format_bytes(fetched.received_bytes)} received" if fetched.received_bytes else "nothing to download"
    print(f"{folder}: {named.name} at {fetched.commit[:12]}, {format_bytes(size)}, {received}, all files checked")
    print(f"train it    trainspec launch recipe=finetune_chat init.from=hf:{folder} data.path=FILE")


def _default(named: HubName) -> Path:
    """Return the mirror's folder, where `hf:ORG/NAME` finds the model, or a folder named after the model."""
    mirror = os.environ.get(HUB_MIRROR)
    if mirror and named.revision == "main":
        return expand(mirror) / named.name
    return Path(named.name.rpartition("/")[2])


class _DownloadLine:
    """A line of progress on stderr, with the time left. In a file or pipe, one line per file."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._name = ""

    def show(self, name: str, here: int, total: int, received: int) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty()
        is_new = name != self._name
        if not is_new and (not on_terminal or (now - self._shown_s < REFRESH_S and here < total)):
            return
        self._shown_s = now
        self._name = name
        speed = received / max(now - self._started_s, 1e-9)
        left = f", {(total - here) / speed:,.0f} s left" if received else ""
        text = f"{100 * here / max(total, 1):5.1f}%  {format_bytes(here)} of {format_bytes(total)}{left}  {name}"
        print(f"\r{text}\x1b[K" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True)
        if on_terminal and here >= total:
            print(file=sys.stderr)
