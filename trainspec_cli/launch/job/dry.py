"""A job that is shown and not started."""

from __future__ import annotations

from typing import Any

from trainspec_cli.launch.job.job import Job
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.results.plan import Plan


def describe(job: Job, plan: Plan) -> dict[str, Any]:
    """What `launch` would do, as JSON holds it."""
    return {
        "run": str(job.root),
        "command": list(job.command),
        "environment": dict(job.environment),
        "plan": to_plain(plan),
    }
