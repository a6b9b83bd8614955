"""The completions that a shell shows when Tab is pressed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.cli.complete import complete
from trainspec_cli.cli.completion import BASH
from trainspec_cli.cli.main import COMMANDS, load_command


@pytest.mark.parametrize(
    ("line", "some", "others"),
    [
        ("trainspec ", ["launch", "plan", "completion"], ["complete", "--help"]),
        ("trainspec la", ["launch"], ["plan"]),
        ("trainspec launch rec", ["recipe=", "recompute="], ["optim="]),
        ("trainspec launch recipe=quick", ["recipe=quickstart"], ["recipe=tiny"]),
        ("trainspec launch recipe=tiny op", ["optim=", "optim."], ["optim.lr="]),
        ("trainspec plan recipe=tiny optim.", ["optim.lr=", "optim.schedule."], ["optim.schedule.kind="]),
        ("trainspec plan recipe=tiny optim.schedule.kind=c", ["optim.schedule.kind=cosine"], []),
        ("trainspec plan cluster=h1", ["cluster=h100"], ["cluster=h200"]),
        ("trainspec plan cluster.accelerator=rtx", ["cluster.accelerator=rtx_4090"], ["cluster.accelerator=l4"]),
        ("trainspec validate compile=", ["compile=true", "compile=false"], []),
        ("trainspec launch --no", ["--node-rank"], ["--force"]),
        ("trainspec data pre", ["prepare"], ["info"]),
        ("trainspec data info --", ["--verify"], ["--source"]),
        ("trainspec fabric --", ["--topology", "--json"], ["--html"]),
        ("trainspec runs ", ["compare", "prune"], ["--memory"]),
        ("trainspec runs --", ["--memory"], ["--yes"]),
        ("trainspec runs compare a la", ["last"], ["launch"]),
        ("trainspec explain optim.l", ["optim.lr"], ["optim.lr="]),
        ("trainspec completion ", ["bash", "zsh", "fish"], []),
        ("trainspec resume some/run train.max", ["train.max_steps="], ["recipe="]),
    ],
)
def test_words_that_fit_are_offered(line: str, some: list[str], others: list[str]) -> None:
    found = complete(line, COMMANDS)
    assert set(some) <= set(found)
    assert not set(others) & set(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("line", ["trainspec nothing ", "trainspec launch data.path=", "trainspec launch a.b.c=", "x"])
def test_where_nothing_is_known_the_shell_offers_files(line: str) -> None:
    assert complete(line, COMMANDS) == []


def test_runs_and_own_recipes_are_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/tiny/one", "runs/tiny/one/inside", "recipes"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/tiny/one/run.json").touch()
    (tmp_path / "runs/tiny/one/inside/run.json").touch()
    (tmp_path / "recipes/mine.yaml").touch()
    for command in ("report", "diagnose"):
        assert complete(f"trainspec {command} ", COMMANDS) == ["last", "runs/tiny/one"]
    assert complete("trainspec launch recipe=min", COMMANDS) == ["recipe=mine"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_are_those_that_the_command_takes(name: str) -> None:
    """They are read from the sources; here typer says which there are."""
    command = load_command(name)
    below = getattr(command, "commands", None)
    for sub, one in below.items() if below else (("", command),):
        taken = {option for parameter in one.params for option in parameter.opts if option.startswith("--")}
        line = f"trainspec {name} {f'{sub} ' if sub else ''}--"
        assert set(complete(line, COMMANDS)) == {*taken, "--help"}


def test_it_needs_no_slow_import() -> None:
    slow = {"torch", "hydra", "omegaconf", "rich", "typer", "click", "numpy"}
    lines = ["trainspec launch recipe=q", "trainspec plan op", "trainspec plan compile=", "trainspec plan --"]
    asked = "\n".join(f"run(['complete', {line!r}])" for line in lines)
    code = f"import sys\nfrom trainspec_cli.__main__ import run\n{asked}\nprint(sorted({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def complete_in_bash(line: str) -> list[str]:
    """What bash offers, with the answers of the program in place of the program."""
    answers = "\n".join(complete(line, COMMANDS))
    setting = f"""
trainspec() {{ printf '%s\\n' {" ".join(repr(one) for one in answers.splitlines())}; }}
compopt() {{ :; }}
COMP_LINE={line!r}; COMP_POINT={len(line)}; _trainspec; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", BASH + setting], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_replaces_what_follows_the_last_equals_sign() -> None:
    assert complete_in_bash("trainspec launch recipe=quick") == ["quickstart"]
    assert complete_in_bash("trainspec laun") == ["launch"]


def test_each_shell_has_a_script_that_asks_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert run(["completion", shell]) == 0
        assert "trainspec complete " in capsys.readouterr().out
    assert run(["completion", "tcsh"]) == 2
