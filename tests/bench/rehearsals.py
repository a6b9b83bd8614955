"""Rehearsals of random plans beside the plans: `python tests/bench/rehearsals.py [--cases 40] [--seed 0]`.

Draws legal (recipe, cluster, layout) from the shipped recipes and clusters, with fewer layers so that a case takes
seconds, and rehearses one rank of each kind of pipeline stage with eager blocks (`compile=false`). Prints for
each case the arguments with which `trainspec rehearse` repeats it, the planned and rehearsed seconds of each part of a
step, and its planned step time, tensors and reserved memory, each followed by the rehearsed figure divided by the
planned one. The last lines give the share of cases whose step time differs by at most 3% and whose tensors differ by at
most 2%, and by how much each part of the step differs, as a fraction of the planned step.

`published` rehearses rows of the measured tables in place of drawn cases (`--rows` names others than
`ROWS`): trainspec's eager engine in the row's layout. For each row, it prints the measured step time, the planned one
for the row's framework, the planned one for trainspec, and the rehearsed one, with their errors.

`--only WORD` keeps the drawn cases whose arguments contain a word; `--arguments FILE` rehearses the lines of a file in
place of drawn cases; `--more` adds arguments to each case. Takes about 20 seconds per case on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware.rates import Efficiency, build_accelerator, load_group
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.validation.backtest import predict
from trainspec_cli.planner.validation.table import state
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.wings.emulated.planned import PART_NAMES, PlanToRehearse, Rehearsal, plan_to_rehearse, rehearse_ranks
from trainspec_cli.wings.emulated.rehearsal import read_ranks

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("tiny", "chaos", "plan_defaults", "quickstart", "finetune_chat")
"""Beginnings of recipes for a CPU, without a model, or without a cluster."""
NOT_GPUS = ("auto", "cpu", "gaudi2")
UNEVEN = ("nemotron_h_8b", "resnet50", "mri_unet3d")
"""Recipes whose layers differ: they keep their number."""
TIME_WITHIN = 0.03
TENSORS_WITHIN = 0.02
MEASURED = ROOT / "tests" / "data" / "measured"
TABLES = ("throughput.csv", "throughput_unseen.csv")
ROWS = "744,747,569,1104,1105,1106,1128,1129,1130,545,656,1140,1142,895"
"""Dense decoders with gated feed-forwards, a complete layout, and few layers or a whole 8B model: one per layout."""
ROOMY_GB = 2000
"""Memory of a chip that holds any of them: without compiled blocks, they need more than the rows' runs."""


def arguments_of(row: Mapping[str, str]) -> list[str]:
    """Return the arguments of `trainspec rehearse` for a row's model, layout, batch and cluster. Raises ValueError if
    the engine or the command cannot express them."""
    stated = state(row)
    setup: Setup = stated.setup
    model = setup.model
    if not isinstance(model, DecoderModel) or model.experts is not None or model.mla is not None:
        raise ValueError("not a dense decoder")
    if row["act_ckpt"] not in ("none", "full", "selective"):
        raise ValueError(f"act_ckpt is {row['act_ckpt']}")
    if setup.micro_batch_size != int(setup.micro_batch_size):
        raise ValueError("micro-batches are not whole")
    base = ("name", "family", "rope_theta", "norm_eps", "mla", "experts")
    given = {f"model.{one.name}": getattr(model, one.name) for one in fields(model) if one.name not in base}
    fabric = setup.fabric
    chips = load_group("accelerator", build_accelerator)
    given["cluster.accelerator"] = next(name for name, chip in chips.items() if chip.name == fabric.chip.name)
    given["cluster.accelerator.memory_gb"] = ROOMY_GB
    given["cluster.devices_per_node"] = fabric.devices_per_node
    given["cluster.num_nodes"] = -(-fabric.num_devices // fabric.devices_per_node)
    given["cluster.nic_gbit_per_s"] = fabric.nic_gbit_per_s
    given["cluster.nic_kind"] = fabric.nic_kind
    layout = setup.layout
    for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate", "zero_stage", "virtual_stages", "pipeline_schedule"):
        given[f"layout.{axis}"] = getattr(layout, axis)
    given["data.seq_len"] = setup.seq_len
    given["batching.micro_batch_size"] = int(setup.micro_batch_size)
    given["batching.global_batch_size"] = round(stated.samples)
    given["recompute"] = row["act_ckpt"]
    given["precision.matmul"] = "fp8" if setup.matmul == "fp8" else "compute"
    given["compile"] = False
    return ["recipe=llama3_8b", *(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in given.items())]


def rehearse_published(numbers: Sequence[str]) -> None:
    """Rehearse rows of the table, and print how far each forecast is from the measured step time."""
    rows = {}
    for table in TABLES:
        with (MEASURED / table).open(encoding="utf-8") as file:
            rows |= {row["id"]: row for row in csv.DictReader(file)}
    errors: dict[str, list[float]] = {}
    for number in numbers:
        row = rows[number]
        try:
            planned = plan_to_rehearse(arguments_of(row), None)
            done = rehearse_ranks(planned, read_ranks("ends", planned.plan, planned.kinds), 2, lambda _rank: None)
        except (ValueError, TrainspecError) as error:
            print(f"{number} {row['model']}: {error}", flush=True)
            continue
        published = predict(row, Efficiency())
        assert done.step is not None and published.measured_step_time_s and published.step_time_s
        host_s = planned.time.host_s
        forecasts = {
            "plan for its framework": published.step_time_s,
            "plan for trainspec": planned.time.total_s,
            "rehearsal": done.step.step_s + host_s,
        }
        layout = planned.plan.layout.describe()
        name = f"{number} {row['model']} {row['gpu']} {row['dtype']} {layout}"
        print(
            f"{name} recompute {row['act_ckpt']}: measured {published.measured_step_time_s:.3f} s by {row['framework']}"
        )
        for one, seconds in forecasts.items():
            errors.setdefault(one, []).append(seconds / published.measured_step_time_s)
            print(f"  {one} {seconds:.3f} s {errors[one][-1] - 1:+.1%}", flush=True)
    for one, ratios in errors.items():
        summarise(one, ratios, 0.1)


def draw(chance: random.Random) -> list[str]:
    """Draw arguments of `trainspec rehearse`, legal or not."""
    recipes = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    clusters = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml"))
    recipe = chance.choice([name for name in recipes if not name.startswith(LEFT_OUT)])
    cluster = chance.choice([name for name in clusters if name not in NOT_GPUS])
    axes = {"tp": chance.choice((1, 1, 2, 4, 8)), "cp": chance.choice((1, 1, 1, 2, 4))}
    axes |= {"pp": chance.choice((1, 1, 2, 4)), "ep": chance.choice((1, 2, 4, 8))}
    if "8x" not in recipe and "_a" not in recipe and "oss" not in recipe and "deepseek" not in recipe:
        axes["ep"] = 1
    schedule = "1f1b"
    virtual = 1
    if axes["pp"] > 1:
        schedule = chance.choice(("1f1b", "interleaved", "zero_bubble", "gpipe"))
        virtual = 2 if schedule == "interleaved" else 1
    arguments = [f"recipe={recipe}", f"cluster={cluster}", f"cluster.num_nodes={2 ** chance.randrange(6)}"]
    arguments += [f"layout.{axis}={size}" for axis, size in axes.items()]
    arguments += [f"layout.pipeline_schedule={schedule}", f"layout.virtual_stages={virtual}"]
    arguments += [f"layout.zero_stage={chance.choice((1, 2, 3, 3))}"]
    arguments += [f"recompute={chance.choice(('none', 'none', 'selective', 'full'))}"]
    # The recipes' own batches are thousands of samples, each a tensor of a rehearsal.
    arguments.append(f"batching.global_batch_size={chance.choice((16, 64, 256))}")
    layers = axes["pp"] * virtual * chance.choice((1, 2, 3))
    if recipe not in UNEVEN:
        arguments.append(f"model.num_layers={max(layers, 4)}")
    return [*arguments, "compile=false"]


def plans(cases: int, seed: int, only: str, more: Sequence[str] = ()) -> Iterator[tuple[list[str], PlanToRehearse]]:
    """Yield drawn arguments with a plan that fits."""
    chance = random.Random(seed)
    found = 0
    while found < cases:
        arguments = [*draw(chance), *more]
        try:
            planned = plan_to_rehearse(arguments, None)
        except TrainspecError:
            continue  # this layout is not legal or does not fit
        found += 1
        if only in " ".join(arguments):
            yield arguments, planned


def show(done: Rehearsal) -> tuple[dict[str, float], float]:
    """Print the figures of a case. Return by how much each part of the rehearsed step is longer, and all of it (`all`),
    as fractions of the planned step; and the largest ratio of tensors."""
    step = done.step
    apart = {}
    shown = "step -"
    if step is not None:
        both = {part: (step.planned_parts_s[part], rehearsed_s) for part, rehearsed_s in step.parts_s.items()}
        print("; ".join(f"{part} {planned_s:.4f} {rehearsed_s:.4f}" for part, (planned_s, rehearsed_s) in both.items()))
        both["all"] = (step.planned_s, step.step_s)
        apart = {part: (rehearsed_s - planned_s) / step.planned_s for part, (planned_s, rehearsed_s) in both.items()}
        shown = f"  step {step.planned_s:.4f} s {step.step_s / step.planned_s:.3f}"
    memory = []
    for rank in done.ranks:
        tensors = rank.rehearsed.peak_bytes / rank.planned_tensors_bytes
        held = rank.rehearsed.reserved_bytes / rank.planned_allocator_bytes
        memory.append(
            f"rank {rank.rehearsed.rank}: tensors {rank.planned_tensors_bytes / GIB:.2f} GiB {tensors:.4f}, "
            f"reserved {rank.planned_allocator_bytes / GIB:.2f} GiB {held:.3f}"
            + (" OUT OF MEMORY" if rank.rehearsed.failed else "")
        )
    print(f"{shown} | {' | '.join(memory)}")
    worst = max((rank.rehearsed.peak_bytes / rank.planned_tensors_bytes for rank in done.ranks), key=distance)
    return apart, worst


def distance(ratio: float) -> float:
    return abs(ratio - 1)


def summarise(name: str, ratios: Sequence[float], within: float) -> None:
    if ratios:
        good = sum(distance(ratio) <= within for ratio in ratios)
        apart = sorted(map(distance, ratios))
        ninth = apart[math.ceil(0.9 * len(apart)) - 1]
        worst = max(ratios, key=distance)
        print(
            f"{name}: {good} of {len(ratios)} within {within:.0%}; {statistics.median(apart):.1%} apart in the median, "
            f"nine in ten at most {ninth:.1%}, worst {worst - 1:+.1%}"
        )


def summarise_parts(cases: Sequence[dict[str, float]]) -> None:
    """Print how much of the step each part accounts for in the differences."""
    for part in cases[0] if cases else ():
        apart = [case[part] for case in cases]
        farthest = max(apart, key=abs)
        over = sum(abs(one) > TIME_WITHIN for one in apart)
        print(
            f"  {PART_NAMES[part]:24} {statistics.median(map(abs, apart)):6.1%} of the step in the median, "
            f"{statistics.fmean(apart):+7.1%} on average, {farthest:+7.1%} at most; {over} over {TIME_WITHIN:.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("drawn", "published"), default="drawn")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--arguments", type=Path)
    parser.add_argument("--more", nargs="*", default=[])
    given = parser.parse_args()
    if given.what == "published":
        rehearse_published(given.rows.split(","))
        return
    cases = plans(given.cases, given.seed, given.only, given.more)
    if given.arguments is not None:
        lines = [line.split() for line in given.arguments.read_text().splitlines() if line]
        cases = ((arguments, plan_to_rehearse([*arguments, *given.more], None)) for arguments in lines)
    times = []
    tensors = []
    for number, (arguments, planned) in enumerate(cases):
        began_s = time.perf_counter()
        print(f"{number} {' '.join(arguments)}\n  {planned.plan.layout.describe()}", end=" ", flush=True)
        print(f"{planned.plan.micro_batch_size} x {planned.plan.grad_accum_steps}", flush=True)
        try:
            done = rehearse_ranks(planned, read_ranks("ends", planned.plan, planned.kinds), 2, lambda _rank: None)
        except TrainspecError as error:
            print(f"  FAILED {error}")
            continue
        print(end="  ")
        apart, memory = show(done)
        print(f"  {time.perf_counter() - began_s:.0f} s", flush=True)
        tensors.append(memory)
        if apart:
            times.append(apart)
    summarise("step time", [1 + apart["all"] for apart in times], TIME_WITHIN)
    summarise_parts(times)
    summarise("tensors", tensors, TENSORS_WITHIN)


if __name__ == "__main__":
    main()
