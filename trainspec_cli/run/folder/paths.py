"""The paths of a run folder, all defined in one class.

RUN/
  composed.yaml   the composed recipe            run.json     digest, recipe, argv, git state, data folder
  plan.json       the workers' plan              versions.json  lock of versions
  command.txt     the command line, to paste     pid.json     the supervisor, during the run
  events/rank00000.jsonl, supervisor.jsonl       errors/rank00000.json  the report of a failed worker
  checkpoints/step_00000020/                     logs/        run.log, and the workers' output
  result.json     how it ended
  faults/         injected faults that occurred  huggingface/  config and tokenizer of the initial weights
  generations/    one file per start: the newest owns the run
  stops/          one file per start that was asked to stop      secrets/ of a start's processes, while alive
  job.sbatch      the script of the Slurm job    errors/node00001.json  why a node was lost
  slurm.json      its last Slurm job             own_job.json  the job of a user-defined command
  directives.jsonl  the scheduler's changes, and their measured effect
  verdicts.jsonl  causes of slowdowns, as found during the run
  looks/          a trace of each profile that the supervisor has requested from a rank
  nccl.env        variables of the workers, with reasons     nccl_tuner.csv  a table for NCCL's example tuner
  hosts.txt       the Slurm job's nodes by number, if the plan places them
  plan_all_nodes.json  the plan before nodes were dropped, from which a resume starts
  kernels.json    the kernels measured for `kernels=auto`, and the chosen ones
  progress/       for a user-defined command: a folder per start, where its processes count their steps
  own_checkpoints/  for a user-defined command that has attached itself (`trainspec_cli.attach`)
  sites/          for a run across distant sites: a site's server log, and the rounds
  code.json       the files of user-defined code, with digests  code/  their copies
"""

from __future__ import annotations

import re
from pathlib import Path

RECIPE, COMMAND = "recipe", "command"
"""Kinds of runs: a recipe, which has a plan, or a user-defined training command, which does not."""
CHECKPOINT_MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


class RunDir:
    def __init__(self, root: Path | str):
        self.root = Path(root)
        self.composed_yaml = self.root / "composed.yaml"
        self.run_json = self.root / "run.json"
        self.plan_json = self.root / "plan.json"
        self.plan_of_all_nodes = self.root / "plan_all_nodes.json"
        self.directives = self.root / "directives.jsonl"
        self.verdicts = self.root / "verdicts.jsonl"
        self.looks_folder = self.root / "looks"
        self.code = self.root / "code"
        self.code_json = self.root / "code.json"
        self.kernels_json = self.root / "kernels.json"
        self.versions_json = self.root / "versions.json"
        self.command_txt = self.root / "command.txt"
        self.pid_json = self.root / "pid.json"
        self.result_json = self.root / "result.json"
        self.events_folder = self.root / "events"
        self.faults_folder = self.root / "faults"
        self.supervisor_events = self.events_folder / "supervisor.jsonl"
        self.errors_folder = self.root / "errors"
        self.generations = self.root / "generations"
        self.job_sbatch = self.root / "job.sbatch"
        self.slurm_json = self.root / "slurm.json"
        self.own_job_json = self.root / "own_job.json"
        self.hosts_txt = self.root / "hosts.txt"
        self.nccl_env = self.root / "nccl.env"
        self.nccl_tuner_csv = self.root / "nccl_tuner.csv"
        self.logs = self.root / "logs"
        self.run_log = self.logs / "run.log"
        self.huggingface = self.root / "huggingface"
        self.checkpoints = self.root / CHECKPOINTS
        self.own_checkpoints = self.root / "own_checkpoints"

    def events(self, rank: int) -> Path:
        return self.events_folder / f"rank{rank:05d}.jsonl"

    def group_events(self, group: int, rank: int) -> Path:
        """Return the event file of one process in a replica group. The run's own event file belongs to rank 0 of the
        leading group."""
        return self.events_folder / f"group{group:05d}" / f"rank{rank:05d}.jsonl"

    def look_trace(self, number: int) -> Path:
        """Return the path of a profile's trace."""
        return self.looks_folder / f"{number:04d}.json"

    def error(self, rank: int) -> Path:
        return self.errors_folder / f"rank{rank:05d}.json"

    def node_error(self, node: int) -> Path:
        return self.errors_folder / f"node{node:05d}.json"

    def generation(self, number: int) -> Path:
        return self.generations / f"{number:08d}.json"

    def progress(self, generation: int) -> Path:
        """Return the folder where the processes of one start count their steps."""
        return self.root / "progress" / f"{generation:08d}"

    def secret(self, generation: int) -> Path:
        """Return the file containing the secret that the processes of a start use to authenticate to one another."""
        return self.root / "secrets" / f"{generation:08d}"

    def stop(self, generation: int) -> Path:
        return self.root / "stops" / f"{generation:08d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def manifest(self, step: int) -> Path:
        """Return the file that lists a checkpoint's content."""
        return self.checkpoint(step) / CHECKPOINT_MANIFEST

    def checkpoint_steps(self) -> list[int]:
        """Return the steps with a complete checkpoint folder, oldest first. Incomplete folders have different names."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    @property
    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint, or 0."""
        return max(self.checkpoint_steps(), default=0)
