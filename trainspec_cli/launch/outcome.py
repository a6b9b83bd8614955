"""What the end of the processes means for the run: done, stopped or failed, and `result.json` where none was left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainspec_cli.errors import Interrupted, Stopped, WorkerError
from trainspec_cli.launch.failure import Explanation, explain_end, find_failures
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.supervise import Ending
from trainspec_cli.rundir.accounting import account_run, goodput
from trainspec_cli.rundir.events import read_sound
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.memory import newest_copy, remove_copies
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.recoveries import read_recoveries


@dataclass(frozen=True)
class Outcome:
    result: dict[str, Any]
    """What `result.json` holds."""
    explanation: Explanation | None = None
    """What went wrong, where something did."""

    @property
    def exit_code(self) -> int:
        return int(self.result["exit_code"])


def conclude(job: Job, ending: Ending) -> Outcome:
    """How the run ended, with what its failures cost. Copies in this host's memory are dropped where the run has ended
    and the disk has as much."""
    outcome = _conclude(job, ending)
    if outcome.result["status"] != "failed" and max(job.run.checkpoint_steps(), default=0) >= newest_copy(job.run):
        remove_copies(job.run)
    recoveries = read_recoveries(read_sound(job.run.events(0)))
    outcome.result["recoveries"] = recoveries
    write_json(job.run.result_json, outcome.result)
    return outcome


def _conclude(job: Job, ending: Ending) -> Outcome:
    """The workers' own result counts where they left one; else it is told from what remains, and written down.

    Workers that stopped though nobody had wanted it have failed. A worker that fails after the run was done changes
    nothing, unless it told of an error of its own; one that fails while the others stop because torchrun asked them to
    is a failure, and no stop on request.
    """
    if ending.given_up:
        result = _write_result(job.run, "failed", WorkerError.exit_code)
        return Outcome(result, Explanation(ending.given_up))
    failures = find_failures(job)
    causes = [failure for failure in failures if not failure.consequence]
    explanation = explain_end(job, ending.exit_code, failures) if failures or ending.exit_code else None
    if job.run.result_json.is_file():
        result = read_json(job.run.result_json)
        own_words = any(failure.own_words for failure in causes)
        if not own_words if result["status"] == "done" else ending.stop_requested and not causes:
            return Outcome(result, explanation)
    elif ending.stop_requested and not causes:
        exit_code = Stopped.exit_code if job.run.checkpoint_steps() else Interrupted.exit_code
        return Outcome(_write_result(job.run, "stopped", exit_code))
    result = _write_result(job.run, "failed", causes[0].exit_code if causes else WorkerError.exit_code)
    return Outcome(result, explanation or explain_end(job, ending.exit_code, failures))


def _write_result(run: RunDir, status: str, exit_code: int) -> dict[str, Any]:
    """As far as the events of rank 0 reach; what only the workers could know is null."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for event in read_sound(run.events(0)):
        if event["type"] == "step":
            step = event
        elif event["type"] == "eval":
            evaluation = event
    result: dict[str, Any] = {
        "status": status,
        "exit_code": exit_code,
        "steps": step.get("step", 0),
        "final_loss": step.get("loss"),
        "heldout_bits_per_byte": evaluation.get("heldout_bits_per_byte"),
        "xz_bits_per_byte": evaluation.get("xz_bits_per_byte"),
        "tokens_per_s": None,
        "mfu": None,
        "peak_memory_bytes": None,
        "weights_sha256": None,
    }
    time_s = account_run(run)
    result |= {"goodput": goodput(time_s), "time_s": time_s}
    write_json(run.result_json, result)
    return result
