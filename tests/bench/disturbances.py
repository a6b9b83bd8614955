"""Every preset of conf/disturb on data-parallel ranks of llama3_8b: speeds, what is won back, and how long it takes.

    python tests/bench/disturbances.py [ranks ...]

Replica groups are there for `node_leaves` alone. The last lines time the decision itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.balance import best_division, solve_counts
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.capacity import plan_on_what_divides
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.session.planning.disturbance import load_disturbance
from trainspec_cli.session.recipe.load import load_for_planning

RANKS = (256, 4096)
EACH = 32
"""Samples of a rank in a step."""


def arguments_of(ranks: int, preset: str) -> list[str]:
    recipe = ["recipe=llama3_8b", "cluster=h100", f"cluster.num_nodes={ranks // 8}"]
    recipe += [f"batching.global_batch_size={ranks * EACH}", f"disturb={preset}"]
    if preset == "node_leaves":
        return [*recipe, "resilience=elastic", "resilience.replica_groups=8", f"layout.dp_shard={ranks // 8}"]
    return [*recipe, f"layout.dp_shard={ranks}"]


def simulate_preset(ranks: int, preset: str) -> None:
    arguments = arguments_of(ranks, preset)
    spec, capacity = plan_on_what_divides(load_for_planning(arguments).spec)
    named = load_disturbance(arguments)
    assert named is not None and capacity.best is not None
    begun_s = time.process_time()
    found = named.simulate(spec, capacity.best, None)
    taken_s = time.process_time() - begun_s
    rates = [pace.samples_per_s for pace in (found.off, found.on, found.ideal, found.ideal_real)]
    won = ["-" if part is None else f"{part:.1%}" for part in (found.won_back, found.won_back_of_real)]
    cells = [f"{rate:10.1f}" for rate in rates] + [f"{part:>7}" for part in won]
    print(f"{ranks:6,} {preset:12}", *cells, f"{len(found.decisions):3} decisions {taken_s:6.1f} s")


def time_decision(ranks: int) -> None:
    speeds = [Speed(0.01, 0.9 * (1 + rank % 13 / 130)) for rank in range(ranks)]
    even = Division((1.0,) * ranks, 1)
    for name, decide in (
        ("shares of one number of micro-batches", lambda: solve_counts(ranks * EACH, EACH, speeds, 2 * EACH)),
        ("the whole decision", lambda: best_division(even, ranks * EACH, speeds, 1, 0.0)),
    ):
        took_s = []
        for _ in range(5):
            begun_s = time.process_time()
            decide()
            took_s.append(time.process_time() - begun_s)
        print(f"{ranks:6,} ranks, {name}: {1e3 * min(took_s):.1f} ms")


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or RANKS
    print(f"{'ranks':>6} {'preset':12} {'off':>10} {'on':>10} {'whole':>10} {'real':>10} {'won':>7} {'of real':>7}")
    for ranks in sizes:
        for preset in find_folders(Path.cwd()).options("disturb"):
            simulate_preset(ranks, preset)
        time_decision(ranks)


if __name__ == "__main__":
    main()
