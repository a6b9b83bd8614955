"""The entry point of the command line: it runs a command and exits with its code. This file also contains the table of
commands and the help. A command's module is imported only when the command is called. User and machine errors are shown
without a traceback. Exit codes in addition to those in `core/errors.py`: 1 for a bug in the program (the traceback goes
to a file), and 141 if the reader of a pipe has closed it, as in a shell."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from trainspec_cli import __version__
from trainspec_cli.core.errors import (
    EXIT_CODES,
    Interrupted,
    MachineError,
    Problem,
    RecipeError,
    Stopped,
    TrainspecError,
)
from trainspec_cli.core.intentions import FORMER_FLAGS, closest, key_of
from trainspec_cli.core.printable import Style, printing_safely
from trainspec_cli.core.wings import Command, find_wings
from trainspec_cli.reporter.problems import render_json, render_problems

EXIT_FAULT = 1
EXIT_BROKEN_PIPE = 141
SHOWN_CHARS = 200
NEW_OBJECTS = 50_000
"""Number of allocated objects after which Python's cyclic garbage collector runs. It is high because a plan allocates
many objects, but creates hardly any cycles."""
GROUPS = ("train", "plan", "look at runs", "recipes", "clusters", "other engines")
"""The headings of the help, in order."""
_TRUNK = {
    "launch": Command("train", "train a recipe on this machine", takes_keys=True),
    "sbatch": Command(
        "train",
        "train a recipe, or run your own training command, as a Slurm job",
        takes_keys=True,
        takes_command=True,
    ),
    "resume": Command("train", "continue a run from its newest checkpoint", takes_keys=True, takes_run=True),
    "stop": Command("train", "checkpoint and stop a run, from another terminal", takes_run=True),
    "plan": Command("plan", "rank the layouts of a run, and forecast its time and cost", takes_keys=True),
    "budget": Command("plan", "compare buying and renting machines for a portfolio of runs"),
    "backtest": Command("plan", "predict a table of measured runs, and show the errors"),
    "calibrate": Command("plan", "fit the planner to your own cluster, from a few measured steps", takes_keys=True),
    "runs": Command("look at runs", "list the runs of this folder"),
    "watch": Command("look at runs", "show a run in progress, from another terminal", takes_run=True),
    "logs": Command("look at runs", "print the output of a run, and follow it (-f)", takes_run=True),
    "report": Command("look at runs", "show how a run went, and where its time was spent", takes_run=True),
    "diagnose": Command(
        "look at runs", "find what is slowing a run: cause, place, cost, evidence and remedy", takes_run=True
    ),
    "list": Command("recipes", "list recipes and the options of every group: models, clusters, optimizers, ..."),
    "show": Command("recipes", "print a composed recipe, or what differs from another", takes_keys=True),
    "new": Command("recipes", "describe your own model, accelerator, cluster or recipe in a commented file"),
    "validate": Command("recipes", "find all problems in a recipe", takes_keys=True),
    "explain": Command("recipes", "explain a key of a recipe: its meaning and allowed values"),
    "schema": Command("recipes", "print the JSON Schema that editors use to check and complete recipes"),
    "migrate": Command("recipes", "convert files from earlier versions of the training spec"),
    "get": Command("recipes", "download a model from the Hugging Face Hub"),
    "data": Command("recipes", "prepare text for training, and inspect it"),
    "completion": Command("recipes", "print the script for shell completion: bash, zsh or fish"),
    "kernels": Command("clusters", "measure which kernels are fastest here, for a recipe", takes_keys=True),
    "export": Command("other engines", "write a run's weights as a Hugging Face folder", takes_run=True),
}
_OF_WINGS = {
    name: replace(command, folder=f"trainspec_cli.wings.{wing}.commands")
    for wing, found in find_wings().items()
    for name, command in found.commands.items()
}
_ALL = _TRUNK | _OF_WINGS
COMMANDS = {name: command for group in GROUPS for name, command in _ALL.items() if command.group == group}
"""The commands by name, in the order that the help lists them."""
COMPLETE = "complete"
"""Prints the possible completions of a command line's last word, for shells (see `completion`)."""
HELP_OPTIONS = ("--help", "-h", "help")


def main() -> None:
    gc.set_threshold(NEW_OBJECTS)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Errors are reported as text that is safe on a terminal."""
    try:
        with printing_safely(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(arguments)
    except BrokenPipeError:
        # Redirect closed streams to /dev/null, because Python would otherwise report the closed pipe again at exit.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return EXIT_BROKEN_PIPE


def _run(arguments: Sequence[str]) -> int:
    try:
        code = dispatch(arguments, Style.of(sys.stdout))
        sys.stdout.flush()
        return code
    except TrainspecError as error:
        _report(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:
            _report_bug(error)
            return EXIT_FAULT
        refused = MachineError(f"{_show(error.filename)}: {error.strerror}", code="refused_by_the_system")
        _report(refused, as_json="--json" in arguments)
        return refused.exit_code
    except Exception as error:
        _report_bug(error)
        return EXIT_FAULT


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning like an error, without the line of trainspec's source that raised it."""
    print(f"{Style.of(sys.stderr).bold('warning')}: {message}", file=sys.stderr)


def _show(name: str | bytes | int) -> str:
    """Return a file name, shortened to fit on one line."""
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _report(error: TrainspecError, *, as_json: bool) -> None:
    if as_json:
        print(render_json(error.problems))
        return
    label = "stopped" if isinstance(error, (Stopped, Interrupted)) else "error"
    print(render_problems(error.problems, Style.of(sys.stderr), label), file=sys.stderr)


def _report_bug(error: Exception) -> None:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="trainspec-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    summary = "".join(traceback.format_exception_only(error)).strip()
    print(f"trainspec failed because of a bug: {summary}\nthe traceback is in {file.name}", file=sys.stderr)


def dispatch(arguments: Sequence[str], style: Style) -> int:
    """Run one command line; return the exit code. Raises TrainspecError."""
    name, *rest = arguments or ("--help",)
    if name in HELP_OPTIONS:
        width = max(map(len, COMMANDS))
        commands = []
        for group in GROUPS:
            listed = [(name, command) for name, command in COMMANDS.items() if command.group == group]
            commands += ["", style.bold(group)] if listed else []
            commands += [f"  {style.bold(name.ljust(width))}  {command.summary}" for name, command in listed]
        codes = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
        print(
            "\n".join(
                [
                    "Launcher, planner and engine for training large models under an open training spec.",
                    "",
                    f"{style.bold('usage')}: trainspec COMMAND [recipe=NAME key=value ...] [--options]",
                    *commands,
                    "",
                    "  trainspec COMMAND --help describes one; trainspec --version prints the version.",
                    "",
                    style.bold("to begin"),
                    "  trainspec launch recipe=quickstart",
                    "  trainspec list recipe",
                    "",
                    style.bold("exit codes"),
                    *codes,
                ]
            )
        )
        return 0
    if name == "--version":
        print(f"trainspec {__version__}")
        return 0
    if name == COMPLETE:
        # A shell waits for `complete` each time Tab is pressed, so this command runs before typer is imported.
        from trainspec_cli.cli.complete import complete

        print("\n".join(complete(" ".join(rest), COMMANDS)))
        return 0
    if name not in COMMANDS:
        if name.startswith("recipe="):
            hint = f"such as trainspec launch {' '.join((name, *rest))}"
            problem = Problem(code="usage", message="a command comes first", hint=hint)
        else:
            from trainspec_cli.recipe.compose.folders import RECIPE, find_folders  # the help does not need it

            folders = find_folders(Path.cwd())
            listed_as = next((one for one in (RECIPE, *folders.groups) if name in (one, f"{one}s")), None)
            if name in folders.recipe_names():
                hint = f"did you mean trainspec launch recipe={name}?"
            elif listed_as:
                hint = f"did you mean trainspec list {listed_as}?"
            else:
                near = closest(name, COMMANDS)
                hint = f"did you mean trainspec {near}?" if near else f"commands: {', '.join(COMMANDS)}"
            kind = "option" if name.startswith("-") else "command"
            problem = Problem(code="usage", message=f"there is no {kind} `{name}`", hint=hint)
        raise RecipeError(problem)
    import typer

    command = load_command(name)
    try:
        # `command()` would end the process, and print errors in click's wording.
        with command.make_context(f"trainspec {name}", list(rest)) as context:
            result = command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    # Handle Ctrl-C at a prompt like Ctrl-C anywhere else.
    except typer.Abort as aborted:
        raise KeyboardInterrupt from aborted
    except _usage_error() as error:
        raise RecipeError(_usage_problem(name, error)) from error
    return result if isinstance(result, int) else 0


def load_command(name: str) -> Any:
    """Import a command as a click object; `data` has an `app` with subcommands. Its help has boxes only on a terminal,
    because boxes are padded with spaces."""
    import typer

    entry = COMMANDS[name]
    module = importlib.import_module(f"{entry.folder}.{entry.function or name}")
    app = getattr(module, "app", None) or typer.Typer(add_completion=False)
    # Without this, rich would also draw boxes in output that goes to a pipe.
    if not sys.stdout.isatty():
        app.rich_markup_mode = None
    if not app.registered_commands:
        app.command(cls=getattr(module, "COMMAND_CLASS", None))(getattr(module, entry.function or name))
    return typer.main.get_command(app)


def _usage_error() -> type[Exception]:
    """Return click's class for usage errors, found by way of a class that typer exports, because typer may bundle its
    own copy of click."""
    import typer

    # Look for a base class instead of a module, because typer has moved click into its package and may move it again.
    return typer.BadParameter.__mro__[1]


def _usage_problem(name: str, error: Any) -> Problem:
    if type(error).__name__ == "NoArgsIsHelpError":
        if error.message:  # on a terminal, the message has already been shown
            print(error.message)
        return Problem(code="usage", message=f"trainspec {name} needs a command", hint=f"see trainspec {name} --help")
    hint = f"see trainspec {name} --help"
    option = getattr(error, "option_name", "").lstrip("-")
    # Users of argparse programs may pass --optim.lr=3e-4.
    if option == "recipe" or "." in option:
        hint = f"values are set without dashes: {option}=<value>"
    elif type(error).__name__ == "NoSuchOption":
        meant = _meant_option(error.ctx, option)
        if COMMANDS[name].takes_command:
            own = f"{meant or hint}; your own command, with its options, goes after --"
            # Suggest what to type in place of a Slurm `sbatch` option.
            from trainspec_cli.recipe.rules.run import KEYS, OF_SCRIPT, PREFIX

            if name != "sbatch" or option not in {*KEYS, *OF_SCRIPT, "gres", "gpus-per-node", "mail-type"}:
                slurm_hint = ""
            else:
                key = {"nodes": "cluster.num_nodes", "output": "--dir"}.get(option)
                if key is None and option in KEYS:
                    key = f"{PREFIX}.{KEYS[option]}"
                elif option in ("gres", "gpus-per-node"):
                    key = f"{PREFIX}.gpus_per_node"
                slurm_hint = (
                    f"set {key}=<value>"
                    if key
                    else f"see trainspec explain slurm, and {PREFIX}.sbatch_lines for everything else"
                )
            hint = slurm_hint or own
        else:
            hint = meant or hint
    elif type(error).__name__ == "MissingParameter" and error.param.name == "arguments":
        hint = f"such as trainspec {name} recipe=quickstart; trainspec list recipe shows all"
    return Problem(code="usage", message=error.format_message(), hint=hint)


def _meant_option(context: Any, option: str) -> str:
    """Return what to type instead of an option that a command does not have: another option, or a recipe value; empty
    if nothing is similar."""
    from trainspec_cli.recipe.records import only_key_named  # the help does not need it

    if option in FORMER_FLAGS:
        remedy = FORMER_FLAGS[option]
        return f"{'pass' if remedy.startswith('--') else 'set'} {remedy}"
    parameters = context.command.params
    # Take the options from the parser, so that a hint never names an option that does not exist.
    near = closest(f"--{option}", [opt for parameter in parameters for opt in parameter.opts if opt.startswith("--")])
    meant = f"did you mean {near}?" if near else ""
    if any(parameter.name == "arguments" for parameter in parameters):
        if key := key_of(option) or only_key_named(option.replace("-", "_")):
            meant += f"{' V' if meant else 'v'}alues of a recipe are given without dashes: {key}=<value>"
        elif option in ("config", "config-file", "config-name", "yaml"):
            meant += f"{' A' if meant else 'a'} recipe is given without dashes: recipe=NAME, or recipe=FILE.yaml"
    return meant
