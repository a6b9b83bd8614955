"""README.md and the pages of docs/: the commands they show are run, and what they name exists.

A block of `console` holds commands (`$ ...`) and the lines that they print; `...` matches any lines.
Comments before a block say how it is read:

    <!-- output varies -->          numbers are not compared
    <!-- exit 2 -->                 the exit code; `exit 0 or 4` allows two
    <!-- slow -->                   run by `pytest -m slow`
    <!-- not run: REASON -->        checked for its options alone
    <!-- needs the checkout -->     run in the checkout instead of an empty folder
    <!-- file PATH -->              the block is a file, which is written first
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from lab.drawing import slow_after

from trainspec_cli.cli.main import COMMANDS, load_command
from trainspec_cli.recipe.keys.run import RunSpec

CHECKOUT = Path(__file__).parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
README_WORDS = 900


@dataclass(frozen=True)
class Block:
    language: str
    remarks: tuple[str, ...]
    text: str

    def remark(self, name: str) -> str | None:
        """What follows `name` in a remark; None where no remark begins with it."""
        return next((remark[len(name) :].strip(": ") for remark in self.remarks if remark.startswith(name)), None)

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines that it prints."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


BLOCK = re.compile(r"(?P<remarks>(?:^<!--.*?-->\n)*)^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def blocks(page: Path) -> list[Block]:
    return [
        Block(match["language"], tuple(re.findall(r"<!-- (.*?) -->", match["remarks"])), match["text"])
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def is_run(block: Block, *, slow: bool) -> bool:
    wanted = (block.remark("slow") is not None) == slow
    return block.language == "console" and wanted and block.remark("not run") is None


def run_page(page: Path, folder: Path, cache: Path, *, slow: bool) -> None:
    for block in blocks(page):
        if (path := block.remark("file")) is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(block.text, encoding="utf-8")
        elif is_run(block, slow=slow):
            where = CHECKOUT if block.remark("needs the checkout") is not None else folder
            for command, printed in block.commands():
                check_command(command, printed, block, where, cache)


def check_command(command: str, printed: list[str], block: Block, folder: Path, cache: Path) -> None:
    name, *arguments = shlex.split(command)
    assert name == "trainspec", command
    places = {"PYTHONPATH": str(CHECKOUT), "TRAINSPEC_CACHE": str(cache)}
    ran = subprocess.run(
        [sys.executable, "-m", "trainspec_cli", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"} | places,
        capture_output=True,
        text=True,
        timeout=900,
    )
    allowed = [int(code) for code in (block.remark("exit") or "0").split(" or ")]
    assert ran.returncode in allowed, f"{command} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
    varies = block.remark("output varies") is not None
    missing = missing_line(printed, (ran.stdout + ran.stderr).splitlines(), varies=varies)
    assert missing is None, f"{command} does not print\n{missing}\nbut\n{ran.stdout}\n{ran.stderr}"


def missing_line(printed: list[str], actual: list[str], *, varies: bool) -> str | None:
    """The first line of the page that the command does not print after the ones before it; None where all come.

    Lines that follow one another without `...` on the page follow one another in the output.
    """
    masked = [mask(line, varies=varies) for line in actual]
    at, may_skip = 0, False
    for line in printed:
        if line == "...":
            may_skip = True
            continue
        wanted = mask(line, varies=varies)
        end = len(masked) if may_skip else at + 1
        found = next((index for index in range(at, min(end, len(masked))) if masked[index] == wanted), None)
        if found is None:
            return line
        at, may_skip = found + 1, False
    return None


def mask(line: str, *, varies: bool) -> str:
    line = line.rstrip()
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "#", line)) if varies else line


def page_name(page: Path) -> str:
    return page.stem


def pages_with_commands(*, slow: bool) -> list[Path]:
    return [page for page in PAGES if any(is_run(block, slow=slow) for block in blocks(page))]


@pytest.mark.parametrize("page", slow_after(1, pages_with_commands(slow=False)), ids=page_name)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path, measured_cache: Path) -> None:
    """Those of all pages but the README take two minutes."""
    run_page(page, tmp_path, measured_cache, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_commands(slow=True), ids=page_name)
def test_the_long_commands_of_a_page_too(page: Path, tmp_path: Path, measured_cache: Path) -> None:
    run_page(page, tmp_path, measured_cache, slow=True)


def commands_on(page: Path) -> list[str]:
    """Every command of trainspec that the page names, in a block or within a sentence."""
    shown = [command for block in blocks(page) if block.language == "console" for command, _ in block.commands()]
    return shown + re.findall(r"`(trainspec [^`]+)`", prose_of(page))


def prose_of(page: Path) -> str:
    """The page without its blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_and_options_exist(page: Path) -> None:
    for command in commands_on(page):
        name, *arguments = command.replace("...", "").split()[1:]
        if name.startswith("-") or name == "COMMAND":
            continue
        assert name in COMMANDS, command
        options = options_of(name, arguments)
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        given = {argument.partition("=")[0] for argument in own if argument.startswith("--")}
        assert given <= options, f"`{command}`: there is {sorted(options)}"


def options_of(name: str, arguments: list[str]) -> set[str]:
    command = load_command(name)
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    return {"--help", *(option for parameter in command.params for option in parameter.opts)}


SECTIONS = {field.name for field in fields(RunSpec)}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_keys_exist(page: Path) -> None:
    text = prose_of(page)
    named = {match[1] for match in re.finditer(r"[` ]((?:" + "|".join(SECTIONS) + r")(?:\.[a-z_0-9]+)+)[=`]", text)}
    assert sorted(key for key in named if not is_key(RunSpec, key.split("."))) == []


def is_key(kind: Any, path: list[str]) -> bool:
    """Return whether a value of type `kind` (a dataclass, or a union with some) may hold the key `path`."""
    if not path:
        return True
    if path[0] == "from":
        path = ["from_", *path[1:]]
    kinds = [kind, *get_args(kind)]
    hints = [get_type_hints(one) for one in kinds if is_dataclass(one)]
    return any(path[0] in known and is_key(known[path[0]], path[1:]) for known in hints)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_files_exist(page: Path) -> None:
    """A file that a heading names is written by its section (tests/engine/models/test_new_family.py does so)."""
    text = page.read_text(encoding="utf-8")
    written = re.findall(r"^## .*: `([^`]+)`$", text, re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(r"`(?:python |pytest -m slow )?((?:tests|conf|recipes|trainspec_cli|docs)/[\w./-]+)", text)
    missing += [path for path in paths if path not in written and not (CHECKOUT / path).exists()]
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_a_line_that_is_not_printed_is_found() -> None:
    actual = ["one 1", "two 2", "three 3"]
    assert missing_line(["one 1", "...", "three 3"], actual, varies=False) is None
    assert missing_line(["...", "three 7"], actual, varies=True) is None
    assert missing_line(["...", "three 7"], actual, varies=False) == "three 7"
    assert missing_line(["one 1", "three 3"], actual, varies=False) == "three 3"
    assert missing_line(["...", "three 3", "...", "one 1"], actual, varies=False) == "one 1"
