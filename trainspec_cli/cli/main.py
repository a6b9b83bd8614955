"""The table of commands, and the help that is printed from it. A command's module is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainspec_cli import __version__
from trainspec_cli.core.errors import EXIT_CODES, Problem, RecipeError
from trainspec_cli.core.intentions import FORMER_FLAGS, closest, key_of
from trainspec_cli.core.wings import Command, find_wings
from trainspec_cli.reporter.style import Style

GROUPS = ("train", "plan", "look at runs", "recipes", "clusters", "other engines")
"""The headings of the help, in order."""


_TRUNK = {
    "launch": Command("train", "train a recipe on this machine", takes_keys=True),
    "sbatch": Command(
        "train",
        "train a recipe, or run a training command of your own, as a Slurm job",
        takes_keys=True,
        takes_command=True,
    ),
    "resume": Command("train", "continue a run from its newest checkpoint", takes_keys=True, takes_run=True),
    "stop": Command("train", "let a run write a checkpoint and end, from another terminal", takes_run=True),
    "plan": Command("plan", "rank the layouts of a run, and forecast its time and cost", takes_keys=True),
    "budget": Command("plan", "set buying machines beside renting them, for a portfolio of runs"),
    "backtest": Command("plan", "predict a table of measured runs, and show the errors"),
    "calibrate": Command("plan", "fit the planner to your own cluster, from a few measured steps", takes_keys=True),
    "runs": Command("look at runs", "list the runs of this folder"),
    "watch": Command("look at runs", "show a run that goes on, from another terminal", takes_run=True),
    "logs": Command("look at runs", "print what a run has shown, and what comes (-f)", takes_run=True),
    "report": Command("look at runs", "show how a run went, and where its time was spent", takes_run=True),
    "diagnose": Command("look at runs", "name what slows a run: cause, place, cost, proof and remedy", takes_run=True),
    "list": Command("recipes", "list recipes and the options of every group: models, clusters, optimizers, ..."),
    "show": Command("recipes", "print a composed recipe, or what differs from another", takes_keys=True),
    "validate": Command("recipes", "find all problems of a recipe at once", takes_keys=True),
    "explain": Command("recipes", "say what a key of a recipe means, and what it may be"),
    "schema": Command("recipes", "print the JSON Schema by which editors check and complete recipes"),
    "migrate": Command("recipes", "bring files of earlier versions of the training spec to the current one"),
    "data": Command("recipes", "prepare text for training, and inspect it"),
    "completion": Command("recipes", "print what makes a shell complete words: bash, zsh or fish"),
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
"""The commands by name, in the order of the help."""
COMPLETE = "complete"
"""Print the words that may end a command line; for shells (see `completion`), not for people."""
HELP_OPTIONS = ("--help", "-h", "help")


def dispatch(arguments: Sequence[str], style: Style) -> int:
    """Run one command line; -> exit code. Raises TrainspecError, and typer's own errors of usage."""
    name, *rest = arguments or ("--help",)
    if name in HELP_OPTIONS:
        print(render_help(style))
        return 0
    if name == "--version":
        print(f"trainspec {__version__}")
        return 0
    if name == COMPLETE:
        # A shell waits for this at each press of Tab, so it is answered before typer is imported.
        from trainspec_cli.cli.complete import complete

        print("\n".join(complete(" ".join(rest), COMMANDS)))
        return 0
    if name not in COMMANDS:
        raise RecipeError(_unknown_command(name, rest))
    return _run(name, rest)


def _run(name: str, arguments: Sequence[str]) -> int:
    import typer

    command = load_command(name)
    try:
        # Not `command()`: that would end the process by itself, and print errors in click's words.
        with command.make_context(f"trainspec {name}", list(arguments)) as context:
            result = command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    # Ctrl-C at a question is the same interruption as Ctrl-C anywhere else.
    except typer.Abort as aborted:
        raise KeyboardInterrupt from aborted
    except _usage_error() as error:
        raise RecipeError(_usage_problem(name, error)) from error
    return result if isinstance(result, int) else 0


def load_command(name: str) -> Any:
    """Import a command, as an object of click's; `data` has an `app` with commands of its own. Its help has boxes on a
    terminal alone: they are padded with spaces."""
    import typer

    entry = COMMANDS[name]
    module = importlib.import_module(entry.module_of(name))
    app = getattr(module, "app", None) or typer.Typer(add_completion=False)
    # rich would draw boxes into a pipe, for programs to read.
    if not sys.stdout.isatty():
        app.rich_markup_mode = None
    if not app.registered_commands:
        app.command(cls=getattr(module, "COMMAND_CLASS", None))(getattr(module, entry.function or name))
    return typer.main.get_command(app)


def _usage_error() -> type[Exception]:
    """Typer may carry a click of its own, so its error of usage is reached through one that Typer exports."""
    import typer

    # The class is found by its place, since typer has moved click into itself and may do so again.
    return typer.BadParameter.__mro__[1]


def _usage_problem(name: str, error: Any) -> Problem:
    if type(error).__name__ == "NoArgsIsHelpError":
        if error.message:  # on a terminal it was shown before
            print(error.message)
        return Problem(code="usage", message=f"trainspec {name} needs a command", hint=f"see trainspec {name} --help")
    hint = f"see trainspec {name} --help"
    option = getattr(error, "option_name", "").lstrip("-")
    # People who come from argparse type --optim.lr=3e-4.
    if option == "recipe" or "." in option:
        hint = f"values are given without dashes: {option}=<value>"
    elif type(error).__name__ == "NoSuchOption":
        meant = _meant_option(error.ctx, option)
        if COMMANDS[name].takes_command:
            own = f"{meant or hint}; a command of your own, with its options, stands after --"
            hint = _hint_of_option(name, option) or own
        else:
            hint = meant or hint
    elif type(error).__name__ == "MissingParameter" and error.param.name == "arguments":
        hint = f"such as trainspec {name} recipe=quickstart; trainspec list recipe shows all"
    return Problem(code="usage", message=error.format_message(), hint=hint)


def _meant_option(context: Any, option: str) -> str:
    """Return what to type for an option that a command does not have: another option, or a value of the recipe; empty
    where nothing is near."""
    from trainspec_cli.recipe.records import only_key_named  # the help does without

    if option in FORMER_FLAGS:
        return f"type {FORMER_FLAGS[option]}"
    parameters = context.command.params
    # The options are those of the parser, so that a hint never names one that does not exist.
    near = closest(f"--{option}", [opt for parameter in parameters for opt in parameter.opts if opt.startswith("--")])
    meant = f"did you mean {near}?" if near else ""
    if any(parameter.name == "arguments" for parameter in parameters):
        if key := key_of(option) or only_key_named(option.replace("-", "_")):
            meant += f"{' V' if meant else 'v'}alues of a recipe are given without dashes: {key}=<value>"
        elif option in ("config", "config-file", "config-name", "yaml"):
            meant += f"{' A' if meant else 'a'} recipe is given without dashes: recipe=NAME, or recipe=FILE.yaml"
    return meant


def _hint_of_option(name: str, option: str) -> str:
    """Return what is typed in the place of an option of Slurm's own sbatch; empty for any other."""
    from trainspec_cli.recipe.rules.run import KEYS, OF_SCRIPT, PREFIX

    if name != "sbatch" or option not in {*KEYS, *OF_SCRIPT, "gres", "gpus-per-node", "mail-type"}:
        return ""
    key = {"nodes": "cluster.num_nodes", "output": "--dir"}.get(option)
    if key is None and option in KEYS:
        key = f"{PREFIX}.{KEYS[option]}"
    elif option in ("gres", "gpus-per-node"):
        key = f"{PREFIX}.gpus_per_node"
    return f"type {key}=<value>" if key else f"see trainspec explain slurm, and {PREFIX}.sbatch_lines for all else"


def _unknown_command(name: str, rest: Sequence[str]) -> Problem:
    # The recipe is there, and what is to be done with it was left out.
    if name.startswith("recipe="):
        hint = f"such as trainspec launch {' '.join((name, *rest))}"
        return Problem(code="usage", message="a command comes first", hint=hint)
    from trainspec_cli.recipe.compose.folders import (
        RECIPE,
        find_folders,  # the help does without
    )

    folders = find_folders(Path.cwd())
    group = next((group for group in (RECIPE, *folders.groups) if name in (group, f"{group}s")), None)
    if name in folders.recipe_names():
        hint = f"did you mean trainspec launch recipe={name}?"
    elif group:
        hint = f"did you mean trainspec list {group}?"
    else:
        near = closest(name, COMMANDS)
        hint = f"did you mean trainspec {near}?" if near else f"commands: {', '.join(COMMANDS)}"
    kind = "option" if name.startswith("-") else "command"
    return Problem(code="usage", message=f"there is no {kind} `{name}`", hint=hint)


def render_help(style: Style) -> str:
    width = max(map(len, COMMANDS))
    commands = []
    for group in GROUPS:
        listed = [(name, command) for name, command in COMMANDS.items() if command.group == group]
        commands += ["", style.bold(group)] if listed else []
        commands += [f"  {style.bold(name.ljust(width))}  {command.summary}" for name, command in listed]
    codes = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join([
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
    ])  # fmt: skip
