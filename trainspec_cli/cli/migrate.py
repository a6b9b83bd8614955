"""`trainspec migrate`: convert files from earlier versions of the training spec to the current version."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.reading.files import CURRENT_VERSION, VERSION_KEY
from trainspec_cli.recipe.json_text import json_text

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Run folders, recipes, or files of a run folder.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")]
To = Annotated[str, typer.Option("--to", metavar="VERSION", help="The target version.")]


def migrate(paths: Paths, dry_run: DryRun = False, to: To = CURRENT_VERSION, as_json: AsJson = False) -> None:
    """Convert recipes and run folders from earlier versions of the training spec to the current version.

    Old files are kept as FILE.VERSION.bak. Comments in recipes are preserved. Files protected by a digest
    (certificates, checkpoints) remain readable, and are not changed."""
    from trainspec_cli.session.recipe.migrate import apply, find_migrations  # the help does not need it

    migrations = find_migrations(paths, to)
    backups = {} if dry_run else apply(migrations)
    if as_json:
        files = [
            {
                "path": str(one.path),
                "kind": one.form.kind,
                "from": one.head.version,
                "to": CURRENT_VERSION,
                "backup": str(backups[one.path]) if one.path in backups else None,
                "diff": one.diff(),
            }
            for one in migrations
        ]
        print(json_text({VERSION_KEY: CURRENT_VERSION, "dry_run": dry_run, "files": files}))
        return
    changing = [one for one in migrations if one.changes]
    for one in changing:
        print(
            one.diff()
            if dry_run
            else f"{one.path}: {one.head.version} to {CURRENT_VERSION}, before: {backups[one.path]}"
        )
    print(_summary(len(changing), len(migrations), dry_run=dry_run))


def _summary(changing: int, seen: int, *, dry_run: bool) -> str:
    if not changing:
        files = f"{seen} file{'s' * (seen != 1)}"
        return f"nothing to do: {files} read, each in version {CURRENT_VERSION} or protected by a digest"
    files = f"{changing} file{'s' * (changing != 1)}"
    return f"{files} would change; nothing was written" if dry_run else f"{files} migrated to version {CURRENT_VERSION}"
