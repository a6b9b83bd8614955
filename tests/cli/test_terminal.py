"""Recipes, runs, data and tables of a stranger, shown by the real command line on a terminal and in a pipe.

One process runs all the commands: none of them may let through a byte that a terminal obeys.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.printable import is_printable
from trainspec_cli.run.folder.event_types.events import EVENT_TYPES, PARTS, SetFigures
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir

HOME = Path(__file__).resolve().parents[2]
SEQUENCE = "\x1b]0;owned\x07\x1b[38;5;213m\x9b2J\u202e\b"
HOSTILE = f"{SEQUENCE}[red]marked[/red]"
SHOWN = "\\x1b]0;owned\\x07\\x1b[38;5;213m\\x9b2J\\u202e\\x08[red]marked[/red]"
FILE_NAME = "odd\x1b]0;owned\x07\x9b2J\u202e"
FILE_SHOWN = "odd\\x1b]0;owned\\x07\\x9b2J\\u202e"
IN_YAML = json.dumps(HOSTILE)
"""YAML takes an escape sequence only as JSON writes it; a file's name needs no such care."""

OWN_STYLES = re.compile(r"\x1b\[(0|1|2|31|32|36|1;\d+|\d+)?m")
RUN_ALL = """
import json, sys
from trainspec_cli.__main__ import run
for command in json.loads(sys.stdin.read()):
    code = run(command)
    print(f"<<{code}>>")
    sys.stdout.flush()
"""

COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "runs": (["runs"], 0, SHOWN),
    "report": (["report", "runs/theirs"], 0, SHOWN),
    "report of no run": (["report", HOSTILE], 2, SHOWN),
    "recipes": (["list", "recipe"], 0, SHOWN),
    "recipes, file names": (["list", "recipe"], 0, FILE_SHOWN),
    "show": (["show", "recipe=theirs"], 0, "\\e]0;owned\\a\\e[38;5;213m\\x9B2J\\u202E\\b"),
    "show of a file": (["show", f"recipe={FILE_NAME}"], 0, FILE_SHOWN),
    "show --diff": (["show", "recipe=theirs", "--diff", "tiny"], 0, "description"),
    "validate": (["validate", "recipe=theirs"], 0, f"valid: {SHOWN}"),
    "validate, wrong": (["validate", "recipe=wrong"], 2, SHOWN),
    "validate, no YAML": (["validate", "recipe=noyaml"], 2, SHOWN.replace("\\x1b]", "")[3:9]),
    "validate, command line": (["validate", "recipe=tiny", f"{HOSTILE}=1"], 2, "owned"),
    "an unknown command": ([HOSTILE], 2, SHOWN),
    "a wrong option": (["runs", f"--{HOSTILE}"], 2, "owned"),
    "data info": (["data", "info", FILE_NAME], 2, FILE_SHOWN),
    "plan": (["plan", "recipe=theirs", "cluster=h100", "batching.global_batch_size=16"], 0, "owned"),
    "launch --dry-run": (["launch", "recipe=theirs", "--dry-run"], 0, SHOWN),
    "sbatch": (["sbatch", "recipe=theirs", f"cluster.slurm.partition='{HOSTILE}'"], 2, SHOWN),
    "backtest": (["backtest", "table.csv"], 0, SHOWN[:40]),
    "certify --verify": (["certify", "--verify", "certificate.json"], 2, SHOWN),
}
"""What is run -> its arguments, its exit code, and what it shows of a stranger's text."""

AS_JSON = {
    "runs": ["runs", "--json"],
    "report": ["report", "runs/theirs", "--json"],
    "recipes": ["list", "recipe", "--json"],
    "show": ["show", "recipe=theirs", "--json"],
    "validate": ["validate", "recipe=wrong", "--json"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stranger")
    write_recipes(root / "recipes")
    write_run(root / "runs" / "theirs")
    columns = (HOME / "tests/data/measured/throughput.csv").read_text().splitlines()
    first = columns[1].split(",")
    first[columns[0].split(",").index("source")] = HOSTILE
    (root / "table.csv").write_text("\n".join([columns[0], ",".join(first)]) + "\n")
    write_json(root / "certificate.json", {"schema": HOSTILE, "digest": ""})
    return root


def write_recipes(folder: Path) -> None:
    folder.mkdir()
    head = "defaults: [tiny, _self_]\n"
    (folder / "theirs.yaml").write_text(f"{head}description: {IN_YAML}\nmodel: {{name: {IN_YAML}}}\n")
    (folder / f"{FILE_NAME}.yaml").write_text(f"{head}description: plain\n")
    (folder / "wrong.yaml").write_text(f"{head}train: {{max_steps: {IN_YAML}}}\n{IN_YAML}: 1\n")
    (folder / "noyaml.yaml").write_text(f"description: {HOSTILE}\n")


def write_run(root: Path) -> None:
    run = RunDir(root)
    write_json(run.run_json, {"recipe": HOSTILE, "created_at": 1000.0})
    write_json(run.plan_json, {"spec": {"train": {"max_steps": 20}}})
    write_json(run.result_json, {"status": "done", "exit_code": 0, "weights_sha256": HOSTILE})
    figures = {"world_size": 1, "peak_flops": 1e9, "params": 1500, "flops_per_token": 1e6, "pid": 1}
    events: list[tuple[str, dict[str, Any]]] = [
        ("start", {"step": 0, "device_name": HOSTILE, "peak_source": HOSTILE, "host": HOSTILE, **figures}),
        ("step", {"step": 1, **STEP}),
        ("step", {"step": 2, **STEP}),
        ("eval", {"step": 2, "heldout_loss": 1.0, "heldout_bits_per_byte": 2.0, "sets": {HOSTILE: SET}}),
        ("checkpoint", {"step": 2, "path": HOSTILE, "bytes": 10, "seconds": 1.0}),
        ("warning", {"step": 2, "message": HOSTILE}),
        ("sample", {"step": 2, "prompt": HOSTILE, "text": HOSTILE}),
    ]
    writer = EventWriter(run.events(0), 0)
    for kind, fields in events:
        writer.write(EVENT_TYPES[kind](**fields))
    writer.close()


SET = SetFigures(loss=1.0, bits_per_byte=2.0)
STEP = {
    "loss": 2.0,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 100,
    "samples": 10,
    "step_time_s": 1.0,
    "skipped": False,
    "time_s": dict.fromkeys(PARTS, 0.1),
}


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    return kept | {"TERM": "xterm-256color", "COLUMNS": "300", "PYTHONPATH": str(HOME), "COLORTERM": "truecolor"}


def split(said: str) -> dict[str, tuple[int, str]]:
    """What each of the commands said, and its exit code."""
    texts = re.split(r"<<(\d+)>>\s*", said)
    assert len(texts) == 2 * len(COMMANDS) + 1, said
    return {name: (int(code), text) for name, text, code in zip(COMMANDS, texts[::2], texts[1::2], strict=False)}


def asked() -> bytes:
    return json.dumps([arguments for arguments, *_ in COMMANDS.values()]).encode()


@pytest.fixture(scope="module")
def on_a_terminal(folder: Path) -> dict[str, tuple[int, str]]:
    reader, writer = pty.openpty()
    command = [sys.executable, "-c", RUN_ALL]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=writer, stderr=writer
    ) as process:
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write(asked())
        process.stdin.close()
        said = read_all(reader)
    return split(said.decode(errors="surrogateescape").replace("\r\n", "\n"))


def read_all(reader: int) -> bytes:
    said = b""
    while True:
        try:
            more = os.read(reader, 65536)
        except OSError:  # a terminal whose programs have ended
            more = b""
        if not more:
            os.close(reader)
            return said
        said += more


@pytest.fixture(scope="module")
def in_a_pipe(folder: Path) -> dict[str, tuple[int, str]]:
    command = [sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        command, input=asked(), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return split(done.stdout.decode(errors="surrogateescape"))


@pytest.mark.parametrize("name", COMMANDS)
def test_on_a_terminal_only_own_styles_arrive(name: str, on_a_terminal: dict[str, tuple[int, str]]) -> None:
    code, said = on_a_terminal[name]
    plain = OWN_STYLES.sub("", said)
    assert (code, is_printable(plain)) == (COMMANDS[name][1], True), ascii(said)
    assert COMMANDS[name][2] in plain, ascii(plain)


def test_a_terminal_has_colours_at_all(on_a_terminal: dict[str, tuple[int, str]]) -> None:
    for name in ("recipes", "report", "validate, wrong", "show"):
        assert OWN_STYLES.search(on_a_terminal[name][1]), name


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow
def test_in_a_pipe_nothing_arrives(name: str, in_a_pipe: dict[str, tuple[int, str]]) -> None:
    code, said = in_a_pipe[name]
    assert (code, is_printable(said)) == (COMMANDS[name][1], True), ascii(said)
    assert COMMANDS[name][2] in said, ascii(said)


@pytest.mark.parametrize("arguments", AS_JSON.values(), ids=AS_JSON)
def test_json_is_ascii_and_holds_the_text_as_it_is(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainspec_cli.__main__ import run

    monkeypatch.chdir(folder)
    run(arguments)
    said = capsys.readouterr().out
    assert said.isascii() and is_printable(said)
    assert HOSTILE in "".join(leaves(json.loads(said)))


def leaves(value: Any) -> list[str]:
    found: Callable[[Any], list[str]] = leaves
    if isinstance(value, dict):
        return [text for item in (*value, *value.values()) for text in found(item)]
    if isinstance(value, list):
        return [text for item in value for text in found(item)]
    return [value] if isinstance(value, str) else []
