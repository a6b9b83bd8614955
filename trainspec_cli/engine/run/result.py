"""How a run ended: result.json, written by rank 0 when every rank has agreed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.build.train_state import Machinery
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.observe.device import Peak, peak_memory_bytes
from trainspec_cli.errors import EXIT_DONE, Stopped
from trainspec_cli.rundir import record
from trainspec_cli.rundir.accounting import account_run, measure_throughput
from trainspec_cli.rundir.event_types import StepEvent
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import RunResult
from trainspec_cli.rundir.stops import may_stop
from trainspec_cli.spec.canonical import ABSENT
from trainspec_cli.spec.results.plan import Plan

Figures = dict[str, Any]
"""Fields of an `eval` event, as a source of data fills them."""

EXIT_CODES = {"done": EXIT_DONE, "stopped": Stopped.exit_code}


@dataclass
class RunTally:
    """What the result needs of a run, gathered on the way."""

    peak: Peak = field(default_factory=lambda: Peak(0.0, "unknown"))
    steps: list[StepEvent] = field(default_factory=list)
    """This start's step events."""
    heldout: Figures | None = None
    """Of the last look at what was held out."""


def write_result(
    run_dir: RunDir,
    built: Machinery,
    plan: Plan,
    tally: RunTally,
    *,
    status: str,
    step: int,
    heldout: Figures,
) -> str:
    """Called by every rank together: weights are gathered for their digest, memory is compared; -> the digest.

    That the run has stopped is left to its supervisor to say where nobody had asked for it: it may start again.
    """
    sha256 = weights_sha256(built.shares, built.mesh.group("pp"))
    memory = torch.tensor(peak_memory_bytes(built.device), dtype=torch.int64, device=built.device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    throughput = measure_throughput(
        tally.steps,
        flops_per_token=plan.flops_per_token,
        peak_flops=tally.peak.flops,
        world_size=plan.world_size,
    )
    time_s = account_run(run_dir, now=time.time())
    if dist.get_rank() == 0 and (status == "done" or may_stop(run_dir)):
        Fence.of_worker(run_dir).check()
        text = plan.spec.data.unit == "tokens"
        result = RunResult(
            status=status,
            exit_code=EXIT_CODES[status],
            steps=step,
            final_loss=tally.steps[-1].loss if tally.steps else None,
            tokens_per_s=throughput.tokens_per_s if text else ABSENT,
            samples_per_s=ABSENT if text else throughput.tokens_per_s,
            mfu=throughput.mfu,
            peak_memory_bytes=int(memory),
            weights_sha256=sha256,
            goodput=time_s.goodput,
            time_s=time_s,
            **heldout,
        )
        record.write_result(run_dir, result)
    return sha256
