"""`trainspec sbatch`: a run as a Slurm job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Force, RecipeArguments, Site, SitesEndpoint, SitesSecret, Sweeps
from trainspec_cli.session.sweep import read_sweep
from trainspec_cli.spec.json_text import json_text

Submit = Annotated[bool, typer.Option("--submit", help="Give it to sbatch, and print the job's number.")]
AllowSetup = Annotated[
    bool,
    typer.Option(
        "--allow-setup", help="Submit shell lines of a recipe's file that another user owns or everyone may write."
    ),
]


def sbatch(
    arguments: RecipeArguments,
    submit: Submit = False,
    allow_setup: AllowSetup = False,
    sweep: Sweeps = None,
    force: Force = False,
    site: Site = None,
    sites_endpoint: SitesEndpoint = None,
    sites_secret: SitesSecret = None,
    as_json: AsJson = False,
) -> None:
    """Make a run's folder and the script that trains it on Slurm, and print or submit that.

    The folder must be where every node sees it (run.dir). What the job asks of Slurm is cluster.slurm.
    With --sweep, its runs are the tasks of one array.
    Lines of shell that a recipe brings (cluster.slurm.setup) are shown on the error output.
    The script may be submitted again: the run goes on.
    """
    from trainspec_cli.session import submit as session  # half a second, which the help does without
    from trainspec_cli.session.sites import SiteOptions

    options = SiteOptions(site, sites_endpoint, sites_secret)
    runs = session.plan_runs(arguments, [read_sweep(one) for one in sweep or []], options)
    first = runs[0].loaded
    print(session.render_shell_lines(first), end="", file=sys.stderr)
    if submit and not allow_setup:
        session.check_own_lines(runs)
    warnings = session.warnings(runs)
    submission = session.write_submission(runs, force=force)
    job_id = session.submit(submission) if submit else None
    folders = [str(root) for root in submission.roots]
    if as_json:
        made = {"script": str(submission.script), "runs": folders, "job_id": job_id, "warnings": warnings}
        print(json_text({**made, **session.shell_lines(first.spec)}))
    elif submit:
        print(job_id)
    else:
        print(submission.text, end="")
    lines = [*(f"run folder  {folder}" for folder in folders), f"script      {submission.script}"]
    lines += [f"warning     {warning}" for warning in warnings]
    print("\n".join(lines), file=sys.stderr)
