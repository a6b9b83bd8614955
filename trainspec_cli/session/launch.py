"""`launch`: a session for a recipe, whose run is made; started, or shown without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.launch.job.folder import check_free
from trainspec_cli.launch.job.job import render_command
from trainspec_cli.report.text import describe_plan
from trainspec_cli.session.console import make_console
from trainspec_cli.session.load import Loaded, load, plan_on, this_machine
from trainspec_cli.session.nodes import NodeOptions, join
from trainspec_cli.session.session import Session, rehearse, start
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text


def launch(arguments: Sequence[str], nodes: NodeOptions, *, force: bool, as_json: bool) -> int:
    """Train a recipe, as the first node of the run or as another that joins it; return the run's exit code."""
    loaded = load([*arguments, *nodes.as_arguments])
    wanted = loaded.spec.run.dir
    if nodes.reach(loaded.spec, wanted) and not nodes.is_first:
        return join(wanted, nodes.node_rank, make_console(as_json=False))
    session = _prepare(loaded, nodes, force=force, as_json=as_json)
    check_free(wanted)
    return start(session)


def show_launch(arguments: Sequence[str], nodes: NodeOptions, *, force: bool, as_json: bool) -> str:
    """Return what `launch` would start, and where, as text or as JSON; refused as the launch would be."""
    loaded = load([*arguments, *nodes.as_arguments])
    job, plan = rehearse(_prepare(loaded, nodes, force=force, as_json=as_json))
    if not as_json:
        return f"{describe_plan(plan)}\n\n{render_command(job.command, job.environment, Path.cwd())}"
    shown = {"run": str(job.root), "command": list(job.command), "environment": dict(job.environment)}
    return json_text(shown | {"plan": to_plain(plan)})


def _prepare(loaded: Loaded, nodes: NodeOptions, *, force: bool, as_json: bool) -> Session:
    reach = nodes.reach(loaded.spec, loaded.spec.run.dir)
    machine = this_machine(loaded.spec)
    console = make_console(as_json=as_json)
    return Session(plan_on(loaded, machine), machine, loaded, console, reach, force=force, as_json=as_json)
