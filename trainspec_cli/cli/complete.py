"""`trainspec complete LINE`: print the possible completions of a command line's last word, one per line. Shells call it
whenever Tab is pressed.

It must be fast, so it does not import typer, hydra or rich: options are read from the commands' source code, and keys
from the recipe's dataclasses."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainspec_cli.core.wings import Command

PACKAGE = Path(__file__).parents[1]
RUNS_AFTER = (("runs", "compare"), ("runs", "rm"))
"""Subcommands that take several runs."""
RUNS = "runs"
RUN_FILE = "run.json"
LAST = "last"
MOST_FOLDERS = 2_000
"""Maximum number of folders below ./runs to read."""


def complete(line: str, commands: Mapping[str, Command]) -> list[str]:
    """Return the completions for the last word of `line`, which is the text up to the cursor."""
    *before, word = line.split(" ")
    before = [other for other in before if other]
    found = _candidates(before[1:], word, commands)
    return list(dict.fromkeys(candidate for candidate in found if candidate.startswith(word)))


def _candidates(before: Sequence[str], word: str, commands: Mapping[str, Command]) -> Iterator[str]:
    """Yield candidates for a word; `before` contains the words between the program and that word."""
    if not before:
        yield from commands
        return
    command, *rest = before
    if command not in commands:
        return
    entry = commands[command]
    given = [other for other in rest if not other.startswith("-")]
    # Importing the command would load typer and rich each time Tab is pressed.
    folder = PACKAGE.joinpath(*entry.folder.split(".")[1:])
    module = _parse(folder / f"{entry.function or command}.py")
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    below = [one.name for one in functions if any("app.command" in ast.unparse(each) for each in one.decorator_list)]
    if below and not given:
        yield from _options(module, command) if word.startswith("-") else below
    elif word.startswith("-"):
        yield from _options(module, given[0] if below else entry.function or command)
    elif (entry.takes_run and not given) or (command, *given[:1]) in RUNS_AFTER:
        yield from (LAST, *_runs(Path(RUNS)))
    elif command == "list":
        from trainspec_cli.recipe.compose.folders import DISTURB, RECIPE, find_folders

        yield from (RECIPE, *find_folders(Path.cwd()).groups, DISTURB)
    elif command == "completion":
        yield from ("bash", "zsh", "fish")
    elif command == "explain":
        yield from (key.removesuffix("=") for key in _keys(word, takes_recipe=False))
    elif command == "schema" and not given:
        from trainspec_cli.recipe.compose.folders import DISTURB, RECIPE, find_folders
        from trainspec_cli.run.folder.file_schemas import FILE_SCHEMAS

        yield from (RECIPE, DISTURB, *FILE_SCHEMAS, *find_folders(Path.cwd()).groups)
    elif entry.takes_keys:
        yield from _values(word) if "=" in word else _keys(word, takes_recipe=not entry.takes_run)


def _runs(folder: Path) -> Iterator[str]:
    for number, (root, below, files) in enumerate(os.walk(folder)):
        # A home folder may have millions of entries, and slow completion is worse than no completion.
        if number >= MOST_FOLDERS:
            return
        if RUN_FILE in files:
            below.clear()
            yield root


def _keys(word: str, *, takes_recipe: bool) -> Iterator[str]:
    """Yield recipe keys level by level: `optim=`, `optim.`, and below that `optim.lr=`."""
    from trainspec_cli.recipe.compose.folders import find_folders
    from trainspec_cli.recipe.keys.run import RunSpec
    from trainspec_cli.recipe.records import known_paths

    if takes_recipe:
        yield "recipe="
    yield from (f"{group}=" for group in find_folders(Path.cwd()).groups)
    depth = word.count(".")
    paths = {path: path.split(".") for path in known_paths(RunSpec)}
    sections = {path.rpartition(".")[0] for path in paths}
    for path, parts in paths.items():
        if len(parts) == depth + 1:
            yield f"{path}." if path in sections else f"{path}="


def _values(word: str) -> Iterator[str]:
    """Yield `key=value` for each known value."""
    from trainspec_cli.recipe.compose.folders import NAMED_SECTIONS, find_folders

    key = word.partition("=")[0]
    folders = find_folders(Path.cwd())
    if key == "recipe":
        values: Iterable[str] = folders.recipe_names()
    elif options := folders.options(NAMED_SECTIONS.get(key, key)):
        values = options
    else:
        from trainspec_cli.recipe.keys.run import RunSpec
        from trainspec_cli.recipe.records import known_choices

        values = known_choices(RunSpec, key)
    yield from (f"{key}={value}" for value in values)


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _options(module: ast.Module, command: str) -> Iterator[str]:
    """Yield the options of the function `command`: each argument's explicit `--name`, or typer's default name."""
    shared = _parse(Path(__file__).with_name("options.py"))
    aliases = {
        target.id: node.value
        for source in (shared, module)
        for node in source.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    yield "--help"
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == command:
            for argument in (*node.args.args, *node.args.kwonlyargs):
                hint = argument.annotation
                hint = aliases.get(hint.id, hint) if isinstance(hint, ast.Name) else hint
                yield from _names(argument.arg, hint)


def _names(argument: str, hint: ast.expr | None) -> Iterator[str]:
    for node in ast.walk(hint) if hint else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option":
            given = [text.value for text in node.args if isinstance(text, ast.Constant)]
            yield from (str(name) for name in given) if given else [f"--{argument.replace('_', '-')}"]
