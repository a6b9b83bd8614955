"""A run that is written down as a launch leaves it, and a machine that is always the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import write_launch
from trainspec_cli.run.job.job import build_job, versions
from trainspec_cli.session.recipe.load import load, plan_on

HERE = Machine("here", cpu_cores=2, memory_bytes=2**34)
installed = cache(versions)


@pytest.fixture(autouse=True)
def versions_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start writes the versions of all installed packages, which takes longer than the rest of it."""
    monkeypatch.setattr("trainspec_cli.run.job.folder.versions", installed)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """This machine, as every session finds it, where nobody else trains."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    for module in ("run.job.machine", "session.launching.resume"):
        monkeypatch.setattr(f"trainspec_cli.{module}.detect", lambda **_: HERE)
    return HERE


@pytest.fixture
def shown() -> StringIO:
    return StringIO()


@pytest.fixture
def console(shown: StringIO) -> RunConsole:
    return RunConsole(file=shown, width=200)


@pytest.fixture
def make_run(here: Machine, tmp_path: Path) -> Callable[..., RunDir]:
    """A run of `recipe=tiny` that has stopped with a checkpoint at step 10; step 0: it was never started."""

    def make(*arguments: str, step: int = 10) -> RunDir:
        root = tmp_path / "run"
        loaded = load(["recipe=tiny", *arguments, f"run.dir={root}"])
        plan = plan_on(loaded, here)
        root.mkdir()
        write_launch(build_job(plan, root, here), plan, loaded.origin, tmp_path)
        run = RunDir(root)
        if step:
            generations.begin(run)
            run.checkpoint(step).mkdir(parents=True)
        return run

    return make
