"""`trainspec migrate`: bring files of earlier versions of the training spec to the current one."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.reading.files import CURRENT, VERSION_KEY
from trainspec_cli.recipe.json_text import json_text

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Run folders, recipes, or files of a run folder.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")]
To = Annotated[str, typer.Option("--to", metavar="VERSION", help="The version that is wanted.")]


def migrate(paths: Paths, dry_run: DryRun = False, to: To = CURRENT, as_json: AsJson = False) -> None:
    """Bring recipes and run folders of earlier versions of the training spec to the current one.

    A file as it was stays beside it, as FILE.VERSION.bak. Comments of recipes stay, too. What is under a digest
    (certificates, checkpoints) is read in its own form, and not touched.
    """
    from trainspec_cli.session.recipe.migrate import apply, find_migrations  # loads what the help does without

    migrations = find_migrations(paths, to)
    backups = {} if dry_run else apply(migrations)
    if as_json:
        files = [
            {
                "path": str(one.path),
                "kind": one.form.kind,
                "from": one.head.version,
                "to": CURRENT,
                "backup": str(backups[one.path]) if one.path in backups else None,
                "diff": one.diff(),
            }
            for one in migrations
        ]
        print(json_text({VERSION_KEY: CURRENT, "dry_run": dry_run, "files": files}))
        return
    changing = [one for one in migrations if one.changes]
    for one in changing:
        print(one.diff() if dry_run else f"{one.path}: {one.head.version} to {CURRENT}, before: {backups[one.path]}")
    print(_summary(len(changing), len(migrations), dry_run=dry_run))


def _summary(changing: int, seen: int, *, dry_run: bool) -> str:
    if not changing:
        return f"nothing to do: {seen} file{'s' * (seen != 1)} seen, of version {CURRENT} or under a digest"
    files = f"{changing} file{'s' * (changing != 1)}"
    return f"{files} would change; nothing was written" if dry_run else f"{files} migrated to version {CURRENT}"
