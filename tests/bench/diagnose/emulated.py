"""The diagnosis of runs on emulated devices with virtual time, where the cause, its place and its size are exact.

    python -m tests.bench.diagnose.emulated --layouts dp,zero3 --rounds 2 --out FILE

A run of four ranks is disturbed again and again, each time for some steps by another cause, with healthy steps in
between. A case is the evidence of one disturbance: the run's first healthy steps, and the steps that it disturbed. Each
healthy stretch is a case, too. Prints how many verdicts have the right cause and place, and each that does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.evidence import RunEvidence
from trainspec_cli.reporter.diagnosis.gather import read_run
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

sys.path.insert(0, str(Path(__file__).parents[2]))  # `lab`, as in the tests
from lab.ports import free_port

NODES = 2
"""Of the layouts on several nodes; each node is a launch of its own."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp": ("cluster.devices_per_node=4", "layout.dp_replicate=4"),
    "zero3": ("cluster.devices_per_node=2", "layout.dp_shard=2", "layout.zero_stage=3"),
    "tp": ("cluster.devices_per_node=2", "layout.tp=2"),
    "pp": ("cluster.devices_per_node=2", "layout.pp=2", "model.num_layers=2"),
    "experts": ("cluster.devices_per_node=2", "model=moe_tiny", "layout.ep=2", "layout.dp_shard=2"),
    "dp_nodes": ("cluster.devices_per_node=2", "layout.dp_replicate=4"),
    "tp_dp_nodes": ("cluster.devices_per_node=2", "layout.tp=2", "layout.dp_replicate=2"),
    "pp_dp_nodes": ("cluster.devices_per_node=2", "layout.pp=2", "layout.dp_replicate=2", "model.num_layers=2"),
}


def node_ranks_of(layout: str) -> int:
    return int(LAYOUTS[layout][0].rpartition("=")[2])


def nodes_of(layout: str) -> int:
    return NODES if layout.endswith("_nodes") else 1


SMALL = ("recipe=tiny", "batching.global_batch_size=4", "run.preflight=false", "observe.deeper_look=false")
WRITTEN_STEPS = 8
SYNC = (f"checkpoint.interval_steps={WRITTEN_STEPS}", "checkpoint.mode=sync", "checkpoint.keep_last=1")
CHIP = """\
name: Bench
vendor: nvidia
bf16_tflops: 100
fp32_tflops: 100
load_store_tb_per_s: 1
cache_mb: 0
memory_gb: 16
memory_tb_per_s: 0.00005
link_gb_per_s: 12.5
link_kind: nvswitch
tdp_w: 70
sources:
  default: "made up"
"""
"""A chip on which a tiny model's kernels take as long as a large model's."""
STEP_S = {"pp": 0.6, "pp_dp_nodes": 0.6, "experts": 0.6}
USUAL_STEP_S = 0.33
HEALTHY_STEPS = 26
"""Healthy steps at the beginning; speeds of links are known after 8 samples."""
GAP_STEPS = 4
LEAST_STEPS = 8
"""A disturbance of fewer steps is not judged: the run ended in it."""
CAUSES = (
    "slow_device", "slow_node", "narrow_link", "delayed_link", "slow_loader", "checkpoint_writing", "host_bound",
    "memory_pressure", "uneven_lengths", "noise",
)  # fmt: skip


@dataclass(frozen=True)
class Disturbed:
    cause: str
    settings: str
    longer_s: float
    """About how much longer a step takes."""
    steps: int = 10
    rank: int | None = None
    node: int | None = None
    node_ranks: int = 1
    from_s: float = 0.0
    until_s: float = 0.0

    def is_named_by(self, verdict: RunVerdict) -> bool:
        if verdict.cause != self.cause:
            return False
        if self.cause in ("narrow_link", "delayed_link"):
            # A link is named by its ranks, one of which is at the place.
            return any(
                self.rank in (None, rank) and self.node in (None, rank // self.node_ranks)
                for rank in verdict.link or ()
            )
        return (verdict.rank, verdict.node) == (self.rank, self.node)


def draw(
    source: random.Random,
    cause: str,
    layout: str,
    step_s: float,
    node_ranks: int,
    transfer_s: float = 0.03,
    delays: float = 20.0,
    attention_s: float = 3e-5,
) -> Disturbed | None:
    """Return a disturbance of a random size at a random place; None if the layout does not have the place. `transfer_s`
    and `delays`: by how much a step grows for twice the transfer time, and for a second of delay. `attention_s`: how
    long a step attends, if all pairs of tokens do."""
    has_nodes = nodes_of(layout) > 1
    rank = source.randrange(nodes_of(layout) * node_ranks)
    node = source.randrange(NODES)
    factor = source.uniform(1.4, 2.5)
    longer_s = source.uniform(0.3, 1.0) * step_s
    computes_s = 0.75 * step_s
    match cause:
        case "slow_device" if source.random() < 0.5:
            return Disturbed(cause, f"slowness={factor:.2f},slow_rank={rank}", (factor - 1) * computes_s, rank=rank)
        case "slow_device":  # it comes and goes
            settings = f"slowness={factor + 0.5:.2f},slow_rank={rank},slow_every_s={4 * step_s:.3g}"
            return Disturbed(cause, settings, 0.6 * (factor - 0.5) * computes_s, 16, rank=rank)
        case "slow_node" if has_nodes:
            return Disturbed(cause, f"slowness={factor:.2f},slow_node={node}", (factor - 1) * computes_s, node=node)
        case "narrow_link" if source.random() < 0.5:
            where = f"slow_node={node}" if has_nodes else f"slow_rank={rank}"
            place = {"node": node} if has_nodes else {"rank": rank}
            return Disturbed(cause, f"link_slowness={1 + longer_s / transfer_s:.2f},{where}", longer_s, 13, **place)
        case "narrow_link":  # all links
            return Disturbed(cause, f"link_slowness={1 + longer_s / transfer_s:.2f}", longer_s, 13)
        case "delayed_link":
            return Disturbed(cause, f"link_delay_us={longer_s / delays * 1e6:.0f}", longer_s, 12)
        case "slow_loader":
            # Steps are longer once the batches that were read ahead are used up.
            settings = f"read_ms={(step_s + longer_s) * 1e3:.0f},slow_rank={rank}"
            return Disturbed(cause, settings, longer_s, 20, rank=rank)
        case "checkpoint_writing":
            writes_s = source.uniform(2.0, 5.0) * step_s
            return Disturbed(cause, f"write_ms={writes_s * 1e3:.0f}", writes_s / WRITTEN_STEPS, 2 * WRITTEN_STEPS + 2)
        case "host_bound":
            slowness = source.uniform(6, 9)
            return Disturbed(cause, f"host_slowness={slowness:.2f},slow_rank={rank}", step_s, rank=rank)
        case "memory_pressure":
            # On all ranks: they do the same work, with the same memory.
            place = {} if source.random() < 0.5 else {"rank": rank}
            retries = source.randint(2, 6)
            settings = f"retry_ms={longer_s / retries * 1e3:.1f},retry_every_ms={step_s / retries * 1e3:.1f}"
            settings += f",slow_rank={rank}" if place else ""
            steps = 4 + round(9 / (step_s + longer_s))
            return Disturbed(cause, settings, longer_s, max(10, steps), **place)
        case "uneven_lengths":
            return Disturbed(cause, f"attention_slowness={1 + 2 * longer_s / attention_s:.0f}", longer_s, 20)
        case "noise":
            steps = 4 + round(9 / (factor * step_s))
            return Disturbed(cause, f"slowness={factor:.2f}", (factor - 1) * computes_s, max(10, steps))
    return None


def schedule(layout: str, rounds: int, seed: int) -> tuple[str, list[Disturbed], int]:
    """Return the device's settings, the disturbances with their times, and the number of steps."""
    source = random.Random(f"{layout}/{seed}")
    step_s = STEP_S.get(layout, USUAL_STEP_S)
    now_s = HEALTHY_STEPS * step_s
    steps = HEALTHY_STEPS
    jitter = source.uniform(0.02, 0.05)
    groups = [
        f"time=bench,launch_us=400,jitter={jitter:.3f},link_jitter={jitter:.3f},read_ms=5,write_ms=2,link_slowness=500"
    ]
    placed = []
    for _ in range(rounds):
        for cause in source.sample(CAUSES, len(CAUSES)):
            one = draw(source, cause, layout, step_s, node_ranks_of(layout))
            if one is None or cause == "uneven_lengths":  # these runs have no documents
                continue
            until_s = now_s + one.steps * (step_s + one.longer_s)
            placed.append(replace(one, node_ranks=node_ranks_of(layout), from_s=now_s, until_s=until_s))
            if "slow_every_s" in one.settings:  # three steps of four
                every_s = 4 * step_s
                for turn in range(int((until_s - now_s) / every_s)):
                    begun_s = now_s + turn * every_s
                    times = f"slow_from_s={begun_s:.3f},slow_until_s={begun_s + 0.75 * every_s:.3f}"
                    groups.append(",".join(part for part in (*one.settings.split(",")[:2], times)))
            else:
                groups.append(f"{one.settings},slow_from_s={now_s:.3f},slow_until_s={until_s:.3f}")
            now_s = until_s + GAP_STEPS * step_s
            steps += one.steps + GAP_STEPS
    return ";".join(groups), placed, steps


def launch(layout: str, settings: str, steps: int, folder: Path) -> RunDir:
    """Run to the end. Raises CalledProcessError."""
    chips = folder / "conf" / "accelerator"
    chips.mkdir(parents=True)
    (chips / "bench.yaml").write_text(CHIP)
    environment = os.environ | {
        "TRAINSPEC_DEVICE": "emulated", "TRAINSPEC_EMULATED": settings, "TRAINSPEC_PROBE": "off"
    }  # fmt: skip
    command = [sys.executable, "-m", "trainspec_cli", "launch", "run.dir=run", f"train.max_steps={steps}", *SMALL]
    command += [*SYNC, *(() if "num_layers" in str(LAYOUTS[layout]) else ("model.num_layers=1",)), *LAYOUTS[layout]]
    nodes = nodes_of(layout)
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank"]
    with (folder / "printed.txt").open("w") as printed:
        started = [
            subprocess.Popen(
                [*command, *([str(node)] if nodes > 1 else [])], cwd=folder, env=environment, stdout=printed,
                stderr=printed,
            )
            for node in range(nodes)
        ]  # fmt: skip
        codes = [one.wait() for one in started]
    if any(codes):
        raise SystemExit(f"{layout}: {(folder / 'printed.txt').read_text()[-2000:]}")
    return RunDir(folder / "run")


def cases_of(run: RunDir, placed: Sequence[Disturbed]) -> Iterator[tuple[Disturbed | None, RunEvidence]]:
    """Yield each disturbance, and None for each healthy stretch, with its evidence; those that the run has not reached
    are left out."""
    events = [event for event in read_events(run.events(0)) if event["type"] in ("step", "counters")]
    lasted_s = {event["step"]: event["step_time_s"] for event in events if event["type"] == "step"}
    ended_s: dict[int, float] = {}
    for event in events:
        if event["type"] == "counters":  # an accelerator's clock starts at 0
            ended_s[event["step"]] = event["left_at"]
    for step in sorted(lasted_s):
        ended_s.setdefault(step, ended_s.get(step - 1, 0.0) + lasted_s[step])
    evidence = read_run(run).evidence()
    ends = np.array([ended_s[step] for step in evidence.steps.tolist()])
    begins = ends - np.array([lasted_s[step] for step in evidence.steps.tolist()])
    first = ends < placed[0].from_s
    for one in placed:
        # The host is up to a step ahead of the device, and a step is read when the next one has begun.
        disturbed = (ends > one.from_s) & (begins < one.until_s - lasted_s[2])
        if disturbed.sum() >= LEAST_STEPS:
            yield one, part_of(evidence, first | disturbed)
    for before, after in itertools.pairwise(placed):
        healthy = (begins > before.until_s + lasted_s[2]) & (ends < after.from_s)
        if healthy.any():
            yield None, part_of(evidence, first | healthy)


def part_of(evidence: RunEvidence, steps: np.ndarray) -> RunEvidence:
    kept = set(evidence.steps[steps].tolist())
    return replace(
        evidence,
        steps=evidence.steps[steps],
        parts_s={name: series[steps] for name, series in evidence.parts_s.items()},
        counters={name: series[steps] for name, series in evidence.counters.items()},
        link_changes=tuple(one for one in evidence.link_changes if one.since_step in kept),
    )


def judge(case: Disturbed | None, verdicts: Sequence[RunVerdict]) -> bool:
    found = [one for one in verdicts if one.cause != "as_planned"]
    return case.is_named_by(found[0]) if case is not None and found else case is None and not found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=1, help="how often each cause comes in a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs; those in it are judged again")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    for layout in options.layouts.split(","):
        folder = options.out / f"{layout}-{options.rounds}-{options.seed}"
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=options.out, prefix="made-") as made:
                settings, placed, steps = schedule(layout, options.rounds, options.seed)
                launch(layout, settings, steps, Path(made))
                (Path(made) / "placed.json").write_text(json.dumps([asdict(one) for one in placed]))
                Path(made).rename(folder)
                Path(made).mkdir()
    print_found(options.out.glob("*-*-*"))


def print_found(folders: Iterable[Path]) -> None:
    counts: dict[str, Counter[bool]] = {}
    for folder in sorted(folders):
        if not (folder / "placed.json").exists():
            continue
        placed = [Disturbed(**one) for one in json.loads((folder / "placed.json").read_text())]
        for case, evidence in cases_of(RunDir(folder / "run"), placed):
            verdicts = conclude(evidence)
            is_right = judge(case, verdicts)
            counts.setdefault(case.cause if case else "healthy", Counter())[is_right] += 1
            if not is_right:
                steps = f"steps {evidence.steps[0]}-{evidence.steps[-1]}, {len(evidence.steps)} of them"
                print(
                    f"{folder.name} {case and (case.cause, case.settings)} {steps}: {[brief(one) for one in verdicts]}"
                )
    for name, counted in sorted(counts.items()):
        print(f"{name}: {counted[True]} of {counted.total()}")
    disturbed = [counted for name, counted in counts.items() if name != "healthy"]
    print(f"all: {sum(one[True] for one in disturbed)} of {sum(one.total() for one in disturbed)}")


def brief(one: RunVerdict) -> dict[str, Any]:
    brief: dict[str, Any] = {"cause": one.cause, "rank": one.rank, "node": one.node, "link": one.link}
    return {name: value for name, value in brief.items() if value is not None} | {"cost_s": round(one.cost_s, 3)}


if __name__ == "__main__":
    main()
