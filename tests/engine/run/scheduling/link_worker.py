"""`link_worker.py FILE RANK`: one of four ranks (two of dp_shard, two of tp) that sample their links as a run does.

Exchanges and computing take as long as is set, on clocks that only they move. In a second part of the run one rank
computes for longer; in a third the line of another along tp is ten times as slow. Prints, on rank 0, what was written
down in each part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lab.engine_runs import KeptEvents, run_of

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.balance.decisions.links import TOLD_STEPS
from trainspec_cli.engine import digest
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.observe import links
from trainspec_cli.engine.parallel import data_parallel
from trainspec_cli.engine.run.scheduling import links as step_links
from trainspec_cli.engine.run.scheduling.links import StepLinks
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.step_report import StepReport
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.families import SAMPLES

RANKS = 4
_all_reduce = dist.all_reduce
LINK_S, MEETING_S, SLOW_FACTOR = 0.03, 0.001, 10
LATE_RANK, LATE_S = 3, 0.1
SLOW_RANK = 1
PARTS = {"healthy": 9, "late": 5, "slow": 4}
"""Samples of each part of the run."""


class Network:
    """Stands in for the clock and the meetings of timed exchanges. Each rank has a separate clock, which moves on by
    the set times when it exchanges and computes; ranks that meet continue from the latest of their clocks."""

    def __init__(self) -> None:
        self.line_s: dict[str, float] = {}
        self.compute_s = 0.0
        """Seconds that this rank computes between two timed exchanges."""
        self._now_s, self._met = 0.0, ""
        self._due_s = 0.0
        """Computing that begins once the end of the exchange before it is taken down."""
        digest.time = links.dist = self  # type: ignore[assignment]
        for module, name in ((exchange, "all_gather"), (exchange, "start_reduce_scatter"), (dist, "all_reduce")):
            setattr(module, name, self._over_line(getattr(module, name)))
        data_parallel.all_gather = exchange.all_gather

    def perf_counter(self) -> float:
        now_s, due_s, self._due_s = self._now_s, self._due_s, 0.0
        self._now_s += due_s
        return now_s

    def barrier(self, group: dist.ProcessGroup) -> None:
        now_s = torch.tensor(self._now_s, dtype=torch.float64)
        _all_reduce(now_s, dist.ReduceOp.MAX, group=group)
        self._now_s = now_s.item() + MEETING_S
        first, second = dist.get_process_group_ranks(group)
        self._met = "tp" if second == first + 1 else "dp_shard"

    def _over_line(self, collective: Any) -> Any:
        def slowed(*tensors: Any, **options: Any) -> Any:
            axis, self._met = self._met, ""
            work = collective(*tensors, **options)
            if axis:
                self._now_s, self._due_s = self._now_s + self.line_s[axis], self.compute_s
            return work

        return slowed


class Run:
    def __init__(self) -> None:
        self.plan = build_plan(Case("dense", Layout(dp_shard=2, tp=2), micro_batch_size=8), "cpu")
        self.state: TrainState = build_train_state(self.plan, torch.device("cpu"))
        own = even_division_of(self.plan).of_rank(self.state.mesh.data_rank, 0, SAMPLES)
        self.batch = drawn_batch(self.plan.spec, self.state, own)
        self.log = KeptEvents()
        run = run_of(self.plan, self.state, RunDir("unused"), self.log)
        self.links = StepLinks(run, SimpleNamespace())  # type: ignore[arg-type]
        self.step = 0

    def make(self, steps: int) -> None:
        for step in range(self.step, self.step + steps):
            self.links.begin(step)
            outcome = train_step(
                self.state,
                self.batch,
                global_tokens=self.plan.tokens_per_step,
                clip_norm=1.0,
                make_report=lambda: StepReport(steps_to_sample=self.links.steps_to_sample, links=self.links.report),
            )
            assert outcome is not None
            self.links.finish(self.batch)
            reported = [one.links for one in outcome.reports() if one.links is not None]
            said = int(outcome.steps_to_sample)
            self.links.note_step(step + 1, sum(self.state.clock.cut().parts_s().values()), reported, said)
        self.step += steps


def main(file: str, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    for interval in ("sampling_interval", "reporting_interval"):
        setattr(step_links, interval, lambda *_: 1)
    network, found = Network(), {}
    network.line_s = {"tp": LINK_S, "dp_shard": LINK_S}
    run = Run()
    run.make(step_links.FIRST_SAMPLE_STEPS)  # type: ignore[attr-defined]
    for part, samples in PARTS.items():
        network.compute_s = LATE_S if part == "late" and rank == LATE_RANK else 0.0
        if part == "slow" and rank == SLOW_RANK:
            network.line_s["tp"] = SLOW_FACTOR * LINK_S
        run.make((TOLD_STEPS + 1) * samples)
        run.links.write_speeds(run.step)
        found[part] = [to_plain(event) for event in run.log.events]
        run.log.events.clear()
    if rank == 0:
        print(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), int(sys.argv[2]))
