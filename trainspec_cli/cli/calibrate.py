"""`trainspec calibrate`: fit the planner to a cluster, for all later plans and launches on it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.tables import ClusterProfile
from trainspec_cli.reporter.console import make_console

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="recipe=NAME key=value|TABLE.csv|RUN...",
        help="A recipe, for short runs; or a table of measured runs; or folders of finished runs.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="Cluster that a table was measured on, as in `cluster.name`.")
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the profile to this file instead of the cache.")
]
Show = Annotated[bool, typer.Option("--show", help="Print the stored profiles.")]
Forget = Annotated[bool, typer.Option("--forget", help="Remove the stored profiles, or only the one for --cluster.")]
Layouts = Annotated[int, typer.Option("--layouts", min=1, metavar="N", help="Number of a recipe's layouts to run.")]
Steps = Annotated[int, typer.Option("--steps", min=8, metavar="N", help="Number of steps to run with each layout.")]


def calibrate(
    sources: Sources = None,
    cluster: Cluster = "",
    output: Output = None,
    layouts: Layouts = 3,
    steps: Steps = 20,
    show: Show = False,
    forget: Forget = False,
    as_json: AsJson = False,
) -> None:
    """Fit the planner to a cluster from a few measured steps. Later plans and launches on the cluster use the resulting
    profile, and say so.

    Parameters that the measurements do not determine keep their shipped values. With cluster.profile=off, the profile
    is ignored."""
    if show or forget:
        from trainspec_cli.session.recipe.load import profile_path, read_profile

        stored = sorted(profile_path(cluster).parent.glob("*.yaml"))
        paths = [path for path in stored if not cluster or path == profile_path(cluster)]
        if forget:
            for path in paths:
                path.unlink(missing_ok=True)
            print(json_text([str(path) for path in paths]) if as_json else f"{len(paths)} profiles removed")

        else:
            profiles = [read_profile(path) for path in paths]
            if as_json:
                print(json_text([to_plain(profile) for profile in profiles]))
            else:
                print(
                    "\n\n".join(map(_render, profiles)) or "no profiles; `trainspec calibrate recipe=tiny` creates one"
                )
        return
    profile = _measure(sources or [], cluster, layouts, steps, as_json=as_json)
    from trainspec_cli.session.recipe.load import profile_path, write_profile

    path = output or profile_path(profile.cluster)
    write_profile(path, profile)
    if as_json:
        print(json_text({"file": str(path), **to_plain(profile)}))
    else:
        print(f"{_render(profile)}\n\nprofile     {path}")


def _measure(sources: list[str], cluster: str, layouts: int, steps: int, *, as_json: bool) -> ClusterProfile:
    from trainspec_cli.session.calibration import (
        calibrate as session,
    )  # import here: takes half a second, and the help does not need it

    # A source's kind follows from its form: key=value is a recipe, .csv a table, anything else a run folder.
    tables = [source for source in sources if source.endswith(".csv") and "=" not in source]
    keys = [source for source in sources if "=" in source]
    runs = [Path(source) for source in sources if source not in tables and source not in keys]
    if (bool(tables) + bool(keys) + bool(runs)) != 1 or len(tables) > 1:
        one = "trainspec calibrate recipe=tiny"
        two = "trainspec calibrate rows.csv --cluster h100"
        hint = f"such as {one}, {two}, or trainspec calibrate runs/a runs/b"
        raise RecipeError(Problem("usage", "a calibration needs one recipe, one table, or folders of runs", hint=hint))
    if tables and not cluster:
        hint = "specify the cluster as in recipes: --cluster h100"
        raise RecipeError(Problem("usage", "a table needs --cluster", "--cluster", hint))
    if tables:
        return session.calibrate(session.measure_table(Path(tables[0]), cluster))
    if runs:
        return session.calibrate(session.measure_runs(runs))
    folder = Path("runs") / "calibrate" / f"{datetime.now():%Y%m%d-%H%M%S}"
    console = make_console(as_json=as_json)
    return session.calibrate(session.measure_recipe(keys, layouts, steps, folder, console.report))


def _render(profile: ClusterProfile) -> str:
    lines = [
        f"{profile.cluster} ({profile.device}), {profile.date}, {profile.rows} measured steps",
        f"error of these steps  {profile.error_before:.1%} as shipped, {profile.error_after:.1%} calibrated",
        f"steps like these      within {profile.known_within - 1:.0%}, nine in ten",
        "times the shipped value, nine in ten within",
    ]
    for name, found in profile.parameters.items():
        if found.informed:
            lines.append(f"  {name:22s} {found.factor:6.3f}   {found.low:.3f} to {found.high:.3f}")
    if profile.kept:
        lines.append(f"not determined, kept as shipped: {', '.join(profile.kept)}")
    return "\n".join(lines)
