"""`python tied_worker.py FILE RANK`: a tied model's losses in one process, and cut in two by each schedule."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.tools.certify_worker import drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan

STEPS = 3
SCHEDULES = ("zero_bubble", "zbv")


def losses(plan: Plan) -> list[float]:
    built = build_train_state(plan, torch.device("cpu"))
    return [
        float(
            train_step(
                built,
                drawn_batch(plan.spec, built, even_division_of(plan).of_rank(0, 8 * step, 8)),
                global_tokens=plan.tokens_per_step,
                clip_norm=0.5,
            ).loss
        )
        for step in range(STEPS)
    ]


def plan_of(layout: Layout) -> Plan:
    return build_plan(Case("tied", layout, micro_batch_size=2), "cpu")


def main() -> None:
    torch.set_num_threads(1)
    file, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{file}.{rank}", rank=0, world_size=1)
    found = {"one process": losses(plan_of(Layout()))}
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    found |= {schedule: losses(plan_of(Layout(pp=2, pipeline_schedule=schedule))) for schedule in SCHEDULES}  # type: ignore[arg-type]
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
