"""Helpers that emit runs for engines and let each engine's own parser read them, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lab.other_frameworks import NOT_IN_CI

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.session.planning.plan import plan_recipe
from trainspec_cli.wings.interop import TARGETS, Container, RunValues, Translation, run_values, translate
from trainspec_cli.wings.interop.commands.emit import resolved

JUDGES = Path(__file__).parent / "judges"
PINNED = (
    "layout=fsdp",
    "recipe=llama3_8b",
    "cluster.num_nodes=2",
    "layout.dp_shard=auto",
    "batching.micro_batch_size=1",
)


@cache
def run_of(*arguments: str) -> RunValues:
    """Return a resolved run: Llama 3 8B on 16 H100 unless the arguments override that."""
    given = {argument.partition("=")[0] for argument in arguments}
    named = [argument for argument in PINNED if argument.partition("=")[0] not in given]
    container = Container("registry/trainspec:1", "shared")
    return run_values("llama3_8b", resolved(plan_recipe([*named, *arguments])), (*named, *arguments), container)


def translated_for(engine: str, *arguments: str) -> Translation:
    return translate(TARGETS[engine], run_of(*arguments))


def config_for(engine: str, *arguments: str) -> dict[str, JsonValue]:
    """Return the dotted keys and values of an engine's configuration."""
    return dict(translated_for(engine, *arguments).keys_of("config"))


def refused_by(engine: str, **changes: JsonValue) -> list[Problem]:
    """Return what an engine refuses in the pinned run with these values, whose keys have `__` for dots."""
    run = run_of()
    values = {**run.values, **{key.replace("__", "."): value for key, value in changes.items()}}
    with pytest.raises(RecipeError) as refused:
        translate(TARGETS[engine], replace(run, values=values))
    return list(refused.value.problems)


def files_in(engine: str, *arguments: str) -> dict[str, str]:
    run = run_of(*arguments)
    return TARGETS[engine].render(translate(TARGETS[engine], run), run)


@dataclass(frozen=True)
class Judgement:
    error: str | None
    """The error of the parser."""
    keys: dict[str, Any] = field(default_factory=dict)
    """The engine's dotted keys with the values that the parser has after reading the files."""


@dataclass(frozen=True)
class Case:
    files: dict[str, str]
    keys: list[str]
    """The keys to look up in the parser's result."""
    world_size: int = 16
    about: dict[str, Any] = field(default_factory=dict)
    """Further input for the parser."""


def judge(engine: str, cases: list[Case], *, package: str | None = None) -> list[Judgement]:
    """Let the engine's own parser read each case, in one process. Skips if the engine is not installed."""
    package = package or engine
    python = judging_python(engine)
    found = subprocess.run([python, "-c", f"import importlib.util as i, sys; sys.exit(not i.find_spec('{package}'))"])
    if found.returncode:
        pytest.skip(f"{package} {NOT_IN_CI}: .ci/interop {engine} installs and asks it")
    ran = subprocess.run(
        [python, "-P", JUDGES / f"{engine}.py"],
        input=json.dumps([vars(case) for case in cases]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return [Judgement(**one) for one in json.loads(ran.stdout.splitlines()[-1])]


def judging_python(engine: str) -> str:
    """Return the Python for the parser: some engines need other packages, or another Python, than trainspec."""
    named = os.environ.get(f"INTEROP_PYTHON_{engine.upper()}") or os.environ.get("INTEROP_PYTHON")
    return named or sys.executable


def mistyped(key: str) -> str:
    """Return a key with its last letter doubled."""
    name, bracket, index = key.partition("[")
    return f"{name}{name[-1]}{bracket}{index}"


def each_mistyped(keys: dict[str, JsonValue], named: Iterable[str]) -> list[dict[str, JsonValue]]:
    """Return copies of `keys`, each with another one of `named` mistyped."""
    return [{mistyped(key) if key == one else key: value for key, value in keys.items()} for one in named]
