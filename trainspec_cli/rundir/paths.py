"""One class owns every path of a run folder.

RUN/
  composed.yaml   the composed recipe            run.json     digest, recipe, argv, git state, data folder
  plan.json       what the workers run           versions.json  lock of versions
  command.txt     the command started, to paste  pid.json     the supervisor, while the run is alive
  events/rank00000.jsonl, supervisor.jsonl       errors/rank00000.json  a failing worker's own report
  checkpoints/step_00000020/                     logs/        the workers' output
  result.json     how it ended                   groups.json  the replica groups that a start waits for
  faults/         the injected faults that occurred  huggingface/  config and tokenizer of the folder it began with
  generations/    one file a start: the newest owns the run
  stops/          one file a start that was asked to stop        secrets/     what its processes share, while it lasts
  job.sbatch      the script of the Slurm job    errors/node00001.json  how a node was lost
  slurm.json      the job it was last given to
  kernels.json    the kernels that were measured for `kernels=auto`, and which were chosen
"""

from __future__ import annotations

import re
from pathlib import Path

_STEP_FOLDER = re.compile(r"step_(\d{8,})")


class RunDir:
    def __init__(self, root: Path | str):
        self.root = Path(root)

    @property
    def composed_yaml(self) -> Path:
        return self.root / "composed.yaml"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def plan_json(self) -> Path:
        return self.root / "plan.json"

    @property
    def kernels_json(self) -> Path:
        return self.root / "kernels.json"

    @property
    def versions_json(self) -> Path:
        return self.root / "versions.json"

    @property
    def command_txt(self) -> Path:
        return self.root / "command.txt"

    @property
    def pid_json(self) -> Path:
        return self.root / "pid.json"

    @property
    def result_json(self) -> Path:
        return self.root / "result.json"

    @property
    def events_folder(self) -> Path:
        return self.root / "events"

    def events(self, rank: int) -> Path:
        return self.events_folder / f"rank{rank:05d}.jsonl"

    def group_events(self, group: int, rank: int) -> Path:
        """Return one process's events in a replica group; the run's own are those of the leading group's rank 0."""
        return self.events_folder / f"group{group:05d}" / f"rank{rank:05d}.jsonl"

    @property
    def groups_json(self) -> Path:
        return self.root / "groups.json"

    @property
    def faults_folder(self) -> Path:
        return self.root / "faults"

    @property
    def supervisor_events(self) -> Path:
        return self.events_folder / "supervisor.jsonl"

    @property
    def errors_folder(self) -> Path:
        return self.root / "errors"

    def error(self, rank: int) -> Path:
        return self.errors_folder / f"rank{rank:05d}.json"

    def node_error(self, node: int) -> Path:
        return self.errors_folder / f"node{node:05d}.json"

    @property
    def generations(self) -> Path:
        return self.root / "generations"

    def generation(self, number: int) -> Path:
        return self.generations / f"{number:08d}.json"

    def secret(self, generation: int) -> Path:
        """Return the secret by which the processes of one start authenticate to one another."""
        return self.root / "secrets" / f"{generation:08d}"

    def stop(self, generation: int) -> Path:
        return self.root / "stops" / f"{generation:08d}.json"

    @property
    def job_sbatch(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def slurm_json(self) -> Path:
        return self.root / "slurm.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def huggingface(self) -> Path:
        return self.root / "huggingface"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a whole checkpoint folder, oldest first (a partial one has another name)."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    @property
    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0 where there is none."""
        return max(self.checkpoint_steps(), default=0)
