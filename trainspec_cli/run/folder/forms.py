"""The kinds of files that one trainspec writes and another reads, and how each is converted to the current version.

Each file states its version as `spec_version`: JSON objects and recipes as a key, event files in each writer's first
line. A file protected by a digest states its own schema and is never rewritten. Between two versions, a conversion
turns a file's content into what the next version would have written. Without a conversion, only the stated version
changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import UNSTATED_VERSION, VERSION_KEY, VERSIONS, with_version, without_version

Step = Callable[[JsonObject], JsonObject]


@dataclass(frozen=True)
class Form:
    """One kind of file."""

    kind: str
    patterns: tuple[str, ...]
    """The paths of these files in a run folder, where * matches any part of a name."""
    notation: Literal["json", "jsonl", "yaml"]
    about: str
    steps: Mapping[str, Step] = field(default_factory=dict)
    """The conversions of a file, each from one version to the next."""
    schema: str = ""
    """The schema stated in a file that is protected by a digest, instead of a version."""

    needs: tuple[str, ...] = ()
    """Keys that a JSON file of this kind must have."""

    def holds(self, path: PurePath) -> bool:
        """Return whether a path ends like the path of a file of this kind in a run folder."""
        return any(path.match(pattern) for pattern in self.patterns)


def _without_own_number(content: JsonObject) -> JsonObject:
    """Remove the per-file format version that trainspec 0.1 wrote to some files."""
    return {key: value for key, value in content.items() if key != "version"}


NUMBERED: Mapping[str, Step] = {UNSTATED_VERSION: _without_own_number}
RECIPE = Form("recipe", ("composed.yaml",), "yaml", "a recipe, including a run's composed recipe")
PROFILE = Form("profile", (), "yaml", "what `trainspec calibrate` has learned about a cluster")
FORMS = (
    RECIPE,
    PROFILE,
    Form("run", ("run.json",), "json", "the origin of a run", needs=("recipe", "created_at")),
    Form(
        "plan", ("plan.json", "plan_all_nodes.json"), "json", "the plan that the workers run", needs=("spec", "layout")
    ),
    Form("result", ("result.json",), "json", "how a run ended", needs=("status",)),
    Form("events", ("events/*.jsonl", "events/group*/*.jsonl"), "jsonl", "the events of a run, one per line"),
    Form("directives", ("directives.jsonl",), "jsonl", "changes made by the scheduler"),
    Form("verdicts", ("verdicts.jsonl",), "jsonl", "causes of a run's slowdowns"),
    Form(
        "speeds",
        ("speeds.json",),
        "json",
        "how fast the ranks compute (no longer written)",
        NUMBERED,
        needs=("layout", "samples"),
    ),
    Form(
        "proposal",
        ("proposal.json",),
        "json",
        "the proposed layout (no longer written)",
        NUMBERED,
        needs=("before", "layout"),
    ),
    Form(
        "looks",
        ("looks.json",),
        "json",
        "requests for profiles of ranks (no longer written)",
        NUMBERED,
        needs=("orders",),
    ),
    Form("kernels", ("kernels.json",), "json", "kernels that were measured", needs=("figures",)),
    Form("code", ("code.json",), "json", "files of user-defined code, with digests", needs=("files",)),
    Form(
        "error",
        ("errors/rank*.json", "errors/node*.json"),
        "json",
        "the report of a worker, or of a lost node",
        needs=("host", "message"),
    ),
    Form("own job", ("own_job.json",), "json", "the Slurm job of a user-defined command", needs=("wanted",)),
    Form("job", ("slurm.json",), "json", "the Slurm job of a run", needs=("job_id",)),
    Form("meeting", ("sites/meeting.json",), "json", "the state of distant sites"),
    Form(
        "own checkpoint",
        ("own_checkpoints/step_*/manifest.json",),
        "json",
        "a checkpoint of a user-defined script",
        needs=("step", "ranks"),
    ),
    Form("checkpoint", ("checkpoints/step_*/manifest.json",), "json", "a checkpoint", schema="trainspec.checkpoint"),
    Form("certificate", (), "json", "the measurements of `trainspec certify`", schema="trainspec.certificate"),
)
"""The forms by kind; RECIPE and PROFILE are distinguished by their keys."""


def bring_to_current(form: Form, content: JsonObject) -> JsonObject:
    """Return `content`, whose version is one of `VERSIONS`, as it would be in a file of the current version."""
    for version in VERSIONS[VERSIONS.index(str(content.get(VERSION_KEY, UNSTATED_VERSION))) : -1]:
        if step := form.steps.get(version):
            content = step(content)
    return with_version(without_version(content))
