"""The blueprint's choice against the best of all on emulated fabrics: `PYTHONPATH=tests python tests/bench/fabrics.py`.

Draws fabrics and layouts, builds each fabric from network namespaces and token buckets (`lab.fabric`), and makes the
exchanges of the layout's step on it with gloo and the engine's own sums: in every order of the axes on the nodes, by
every algorithm. Prints for each fabric the time of what the blueprint has chosen over the time of the best of all, and
how many are within 5%. Needs root.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from lab.exchanges import Groups, Trial, time_trials
from lab.fabric import EmulatedFabric, Tier
from lab.hosts import lacking

from trainspec_cli.engine.mesh import split_by_tier
from trainspec_cli.planner.blueprint import draw_blueprint, exchanges_of, groups_in, node_places, orders, times_of
from trainspec_cli.planner.hardware.cluster import Fabric, cpu_of, with_tiers
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import micro_batch
from trainspec_cli.recipe.keys.cluster import FabricSpec, Machine, TierSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.blueprint import Algorithm, Exchange

EFFICIENCY = Efficiency(link_pcie=0.98, nic=0.98, collective_latency_s=5e-4)
"""gloo over TCP: what of a link's rate is left of the packets' headers and gaps, and what a call takes."""
MESSAGE_MS = 0.3
"""What a message takes between two processes of this machine, whatever the link."""
RELAYED_MBIT_PER_S = 200.0
"""What a relay in Python passes on each way, on a part of a core."""
WITHIN = 1.05


@dataclass(frozen=True)
class Drawn:
    tiers: tuple[Tier, ...]
    setup: Setup

    @property
    def per_node(self) -> int:
        return self.tiers[0].devices


def draw(seed: int) -> Drawn:
    """Draw nodes of one, two or three devices, perhaps leaf switches of two nodes, and a layout that fills them."""
    chance = random.Random(seed)
    per_node, nodes = chance.choice([(1, 4), (2, 2), (2, 3), (2, 4), (2, 4), (3, 2)])
    devices = per_node * nodes
    link = 10 ** chance.uniform(1.8, 2.5)
    tiers = [Tier(per_node, link)]
    network = link * 10 ** chance.uniform(-0.7, 0)
    delay_ms = chance.choice([0.0, 10 ** chance.uniform(-0.3, 1), 10 ** chance.uniform(-0.3, 1)])
    if nodes == 4 and chance.random() < 0.7:
        tiers.append(Tier(2 * per_node, _passable(network, per_node, delay_ms), delay_ms))
        network = tiers[-1].mbit_per_s / 10 ** chance.uniform(0, 0.6)
        delay_ms += chance.choice([0.0, 10 ** chance.uniform(0, 1)])
    network = _passable(max(network, 20.0 / per_node), tiers[-1].devices, delay_ms)
    tiers.append(Tier(devices, network, delay_ms))
    layouts = [Layout(dp_replicate=devices)]
    if nodes % 2 == 0:
        layouts.append(Layout(pp=2, dp_replicate=devices // 2))
        layouts.append(Layout(dp_replicate=2, dp_shard=devices // 2, zero_stage=3))
    layout = chance.choice(layouts)
    model = DecoderModel(chance.choice([2, 4, 8]), 512, 8, 4, 64, 1024, 2048)
    tokens, accum = chance.choice([128, 512]), chance.choice([2, 4, 8]) if layout.pp > 1 else 1
    return Drawn(tuple(tiers), Setup(model, layout, _fabric(tiers), tokens, 1.0, accum))


def _passable(mbit_per_s: float, devices: int, delay_ms: float) -> float:
    """Return a device's share of a network that `devices` share, no more than the relay of a delayed link passes on."""
    return min(mbit_per_s, RELAYED_MBIT_PER_S / devices) if delay_ms else mbit_per_s


def _fabric(tiers: Sequence[Tier]) -> Fabric:
    """Describe the emulated fabric as a recipe does. Computing takes next to nothing, so that a step is exchanges."""
    chip = replace(cpu_of(Machine("emulated", 2, 2**34)), bf16_tflops=1e3, memory_tb_per_s=10.0)
    devices, per_node = tiers[-1].devices, tiers[0].devices
    fabric = Fabric(chip, devices, per_node, per_node, 1.0, 1.0, nic_kind="infiniband")
    described = [
        TierSpec(f"tier {level}", tier.devices, tier.mbit_per_s / 1e3, latency_us=1e3 * (tier.delay_ms + MESSAGE_MS))
        for level, tier in enumerate(tiers)
    ]
    return with_tiers(fabric, described)


@dataclass(frozen=True)
class Order:
    """An order of the axes on the nodes, and a trial of each exchange by each algorithm."""

    exchanges: tuple[Exchange, ...]
    planned: tuple[dict[Algorithm, float], ...]
    trials: tuple[dict[Algorithm, Trial], ...]


def trials_of(drawn: Drawn) -> list[Order]:
    setup, found = drawn.setup, []
    tried = list(orders(setup.layout, drawn.per_node))
    for order in tried:
        groups = groups_in(order, setup.layout, setup.fabric, EFFICIENCY)
        exchanges = exchanges_of(setup, micro_batch(setup, groups, EFFICIENCY), groups, setup.fabric, EFFICIENCY)
        places = node_places(tried[0], order, drawn.per_node)
        planned = [times_of(groups[one.axis], one.operation, one.message_bytes, EFFICIENCY) for one in exchanges]
        trials = [
            {name: trial for name in times if (trial := _trial(drawn, one, name, places))}
            for one, times in zip(exchanges, planned, strict=True)
        ]
        found.append(Order(exchanges, tuple(planned), tuple(trials)))
    return found


def _trial(drawn: Drawn, one: Exchange, algorithm: Algorithm, places: Sequence[int]) -> Trial | None:
    rows = _rows(drawn.setup.layout, one.axis)
    placed = [[places[rank // drawn.per_node] * drawn.per_node + rank % drawn.per_node for rank in row] for row in rows]
    levels: Sequence[Sequence[Sequence[int]]] | None = [placed]
    if algorithm == "hierarchical":
        levels = split_by_tier(placed, lambda device: device, [tier.devices for tier in drawn.tiers])
    if levels is None:
        return None
    frozen: tuple[Groups, ...] = tuple(tuple(tuple(sorted(row)) for row in level) for level in levels)
    sends = drawn.setup.grad_accum if one.operation == "send" else 0
    return Trial(one.operation, algorithm, int(one.message_bytes), frozen, sends)


def _rows(layout: Layout, axis: str) -> list[list[int]]:
    """Return the ranks of each group along an axis; `dp` is all data-parallel axes."""
    members = ("dp_replicate", "dp_shard") if axis == "dp" else (axis,)
    sizes = {name: getattr(layout, name) for name in MESH_AXES}

    def others(rank: int) -> tuple[int, ...]:
        coordinates = {}
        for name in reversed(MESH_AXES):
            rank, coordinates[name] = divmod(rank, sizes[name])
        return tuple(coordinates[name] for name in MESH_AXES if name not in members)

    ranks = sorted(range(prod(sizes.values())), key=others)
    return [list(row) for _, row in groupby(ranks, key=others)]


def compare(seed: int, repeats: int, *, shows_all: bool) -> float:
    """Print and return the time of the blueprint's choice over that of the best."""
    drawn = draw(seed)
    blueprint = draw_blueprint(drawn.setup, FabricSpec(), EFFICIENCY)
    tried = trials_of(drawn)
    trials = list(dict.fromkeys(trial for order in tried for by_name in order.trials for trial in by_name.values()))
    fabric = EmulatedFabric(drawn.tiers)
    try:
        took = dict(zip(trials, time_trials(fabric.devices, trials, repeats), strict=True))
    finally:
        fabric.remove()

    def seconds(order: Order, place: int, name: Algorithm) -> float:
        trial = order.trials[place][name]
        return took[trial] * (1 if trial.operation == "send" else order.exchanges[place].per_step)

    chosen = next(order for order in tried if order.exchanges == blueprint.exchanges)
    chosen_s = sum(seconds(chosen, place, one.algorithm) for place, one in enumerate(chosen.exchanges))
    best_s = min(
        sum(min(seconds(order, place, name) for name in names) for place, names in enumerate(order.trials))
        for order in tried
    )
    shape = " x ".join(f"{tier.devices}@{tier.mbit_per_s:.0f}Mbit+{tier.delay_ms:.1f}ms" for tier in drawn.tiers)
    print(
        f"{seed:3} {shape:62} {drawn.setup.layout.describe():24} {chosen_s:7.3f} s {chosen_s / best_s:6.3f}", flush=True
    )
    if shows_all:
        for order in tried:
            _show(order, took, is_chosen=order is chosen)
    return chosen_s / best_s


def _show(order: Order, took: Mapping[Trial, float], *, is_chosen: bool) -> None:
    """Print the planned and the measured milliseconds of each exchange."""
    for one, names, planned in zip(order.exchanges, order.trials, order.planned, strict=True):
        both = ", ".join(
            f"{name} {planned[name] * 1e3:.1f} -> {took[trial] * 1e3:.1f}" for name, trial in names.items()
        )
        about = f"{one.axis} {one.operation}, {one.per_step:.1f} x {one.message_bytes:,.0f} bytes"
        print(f"    {'*' if is_chosen else ' '} {about}: {both}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each exchange, of which the quickest counts")
    parser.add_argument("--all", action="store_true", help="print planned and measured milliseconds of each exchange")
    options = parser.parse_args()
    if why := lacking():
        raise SystemExit(why)
    seeds = range(options.first, options.first + options.fabrics)
    ratios = [compare(seed, options.repeats, shows_all=options.all) for seed in seeds]
    print(
        f"within 5% of the best: {sum(ratio <= WITHIN for ratio in ratios)} of {len(ratios)}; worst {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
