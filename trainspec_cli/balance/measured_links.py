"""Measure the links of a simulated run as in a live run: with occasional noisy samples.

Only links that an event slows are tracked. The other links of a tier define the tier's usual speed. If events slow all
links, each is compared with its own past."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

import numpy as np

from trainspec_cli.balance.cluster import LEAST_S, Cluster
from trainspec_cli.balance.decisions.links import (
    FIRST_SAMPLE_STEPS,
    LEAST_INTERVAL_STEPS,
    TOLD_STEPS,
    LinkPaces,
    LinkTracker,
    SampleTimes,
    Transfer,
)
from trainspec_cli.balance.disturbance import Disturbance, Event, NarrowLink
from trainspec_cli.planner.time.samples import Tier

Place = tuple[Tier, int]
"""A node's links in a tier."""


class MeasuredLinks:
    def __init__(self, disturbance: Disturbance, num_nodes: int, devices_per_node: int, change: float):
        """`change`: the smallest relative change that is confirmed."""
        self._noise = disturbance.noise
        self._change = change
        self._random = np.random.default_rng([disturbance.seed, 1])  # independent of the noise in compute times
        self._num_nodes = num_nodes
        self._per_node = devices_per_node
        self._places: tuple[Place, ...] = tuple(
            dict.fromkeys(
                (event.tier, node)
                for event in disturbance.events
                if isinstance(event, NarrowLink)
                for node in (range(num_nodes) if event.node is None else [event.node])
            )
        )
        self._usual: dict[Tier, float] = {}
        self._known: dict[Place, float] = {}
        self._due = 1 + FIRST_SAMPLE_STEPS
        self.begin()

    def begin(self) -> None:
        """Start to learn the speeds, initially and after a layout change. Known paces are kept until new ones have been
        learnt."""
        self._trackers = {place: LinkTracker((node,), self._change) for place in self._places for _, node in [place]}
        self._times = SampleTimes(self._change)

    def note(self, step: int, step_s: float, interval: int, cluster: Cluster, events: Sequence[Event]) -> None:
        """Record a step of `step_s`, including a sample if one is due. `interval`: number of steps between two reports
        of the ranks' speeds."""
        if not self._places:
            return
        if step < self._due:
            if self._times.note_step(step_s * self._random.normal(1.0, self._noise)):
                self._due = min(self._due, step + TOLD_STEPS)
            return
        paces = cluster.link_paces(events)
        for (tier, node), tracker in self._trackers.items():
            true = (paces.scaleup if tier == "scaleup" else paces.network)[node * self._per_node]
            tracker.note(step, [Transfer(1.0, max(LEAST_S, true * self._random.normal(1.0, self._noise)))])
        is_undecided = any(tracker.is_undecided for tracker in self._trackers.values())
        wait = self._times.steps_to_next(LEAST_INTERVAL_STEPS, interval, is_undecided=is_undecided)
        self._due = step + TOLD_STEPS + wait
        for tier in dict.fromkeys(tier for tier, _ in self._places):
            self._compare(tier)

    def _compare(self, tier: Tier) -> None:
        """Update the pace of each link of a tier whose speed is known."""
        known = {node: link.confirmed for (own, node), link in self._trackers.items() if own == tier}
        rates = {node: speed.bytes_per_s for node, speed in known.items() if speed is not None}
        if not rates:
            return
        others = self._num_nodes - len(known)
        usual = self._usual.setdefault(tier, median_high([*rates.values(), *[1.0] * others]))
        for node, rate in rates.items():
            self._known[tier, node] = usual / rate if usual / rate - 1 > self._change else 1.0

    @property
    def paces(self) -> LinkPaces:
        """Return the paces of the devices' links; 1 if unknown."""
        scaleup, network = (
            tuple(
                pace
                for node in range(self._num_nodes)
                for pace in [self._known.get((tier, node), 1.0)] * self._per_node
            )
            for tier in ("scaleup", "network")
        )
        return LinkPaces(scaleup, network)
