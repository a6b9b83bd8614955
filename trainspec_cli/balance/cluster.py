"""The true step times of a disturbed cluster, by data-parallel rank and pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.disturbance import Event, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.planner.time.samples import StepParts, Tier
from trainspec_cli.recipe.keys.layout import Layout

Floats = NDArray[np.float64]
LEAST_S = 1e-12
"""Minimum time of a sample if kernel launches hide all of its compute time."""


@dataclass(frozen=True)
class Condition:
    """Slowdown factors of the parts of a step. Arrays have the shape (stages, data-parallel ranks)."""

    compute: Floats
    scaleup: Floats
    network: Floats
    sends: Floats
    """Factors of the messages in each data-parallel rank's pipeline."""
    gradients: float

    @property
    def over_usual_links(self) -> Condition:
        """Return the same condition with exchanges of usual duration."""
        usual = np.ones(self.compute.shape)
        return Condition(self.compute, usual, usual, usual[0], 1.0)


@dataclass(frozen=True)
class StepSeconds:
    """The true times of a step."""

    passes_s: Floats
    """(stages, ranks): compute and exchanges inside layers, over all micro-batches."""
    ranks_s: Floats
    """Each data-parallel rank's pipeline, including filling and draining."""
    exchanged_s: float
    """Duration of the exchanges between ranks."""
    total_s: float


class Cluster:
    def __init__(self, parts: StepParts, layout: Layout, num_nodes: int, devices_per_node: int, replica_groups: int):
        """`layout`: of all replica groups together, whose devices are numbered group by group."""
        self.parts = parts
        self._layout = layout
        self.ranks, self._stages = layout.data_parallel_size, len(parts.stages)
        self._num_nodes = num_nodes
        self._per_node = devices_per_node
        self._groups = replica_groups
        apart = layout.ep * layout.etp // (layout.cp * layout.tp)
        self._exchanging_rows = max(1, apart)
        """Number of neighbouring ranks that exchange tokens of experts in every layer, and wait for their slowest."""
        speeds = [[stage.compute, stage.scaleup, stage.network] for stage in parts.stages]
        self._fixed_s = np.array([[speed.fixed_s for speed in stage] for stage in speeds])
        self._per_sample_s = np.array([[speed.per_sample_s for speed in stage] for stage in speeds])
        self._launch_s = np.array([[stage.launch_s] for stage in parts.stages])

    def with_parts(self, parts: StepParts) -> Cluster:
        """Return the same cluster with other times of a step."""
        return Cluster(parts, self._layout, self._num_nodes, self._per_node, self._groups)

    def paces(self, events: Sequence[Event]) -> Floats:
        """Return the slowdown of each device's compute; factors of several events multiply."""
        paces = np.ones(self._num_nodes * self._per_node)
        for event in events:
            if isinstance(event, SlowDevice):
                paces[event.device] *= event.factor
            elif isinstance(event, SlowNode):
                paces[self._devices_of(event.node)] *= event.factor
        return paces

    def condition(self, events: Sequence[Event]) -> Condition:
        """Return the joint effect of these events. Devices that compute one micro-batch together wait for the slowest
        of them."""
        links = self.link_paces(events)
        by_place = self._by_place
        of_tier: dict[Tier, Floats] = {"scaleup": by_place(links.scaleup), "network": by_place(links.network)}
        return Condition(
            compute=by_place(self.paces(events)),
            scaleup=of_tier["scaleup"],
            network=of_tier["network"],
            sends=of_tier[self.parts.sends_tier].max(0),
            gradients=float(of_tier[self.parts.gradients_tier].max()),
        )

    def link_paces(self, events: Sequence[Event]) -> LinkPaces:
        """Return the slowdown of the exchanges of each device."""
        usual = np.ones(self._num_nodes * self._per_node)
        paces: dict[Tier, Floats] = {"scaleup": usual, "network": usual.copy()}
        for event in events:
            if isinstance(event, NarrowLink):
                devices = range(len(usual)) if event.node is None else self._devices_of(event.node)
                paces[event.tier][devices] *= event.factor
        return LinkPaces(tuple(paces["scaleup"].tolist()), tuple(paces["network"].tolist()))

    def _devices_of(self, node: int) -> range:
        return range(node * self._per_node, (node + 1) * self._per_node)

    def _by_place(self, paces: Sequence[float] | Floats) -> Floats:
        """Return the pace of the slowest device of each stage and data-parallel rank."""
        rows: Floats = np.asarray(paces).reshape(self._groups, self._stages, self.ranks // self._groups, -1).max(3)
        return rows.swapaxes(0, 1).reshape(self._stages, self.ranks)

    def of_devices(self, of_places: Floats) -> Floats:
        """Return for each device the value of its stage and data-parallel rank."""
        own = of_places.reshape(self._stages, self._groups, -1).swapaxes(0, 1)
        return np.repeat(own.ravel(), self._layout.cp * self._layout.tp)

    def seconds(
        self, condition: Condition, counts: Floats, micro_batches: Floats, *, in_step: bool = False
    ) -> StepSeconds:
        """Return a step's times, given each rank's samples and micro-batches; a rank with 0 of both is absent.

        `in_step`: ranks have whole samples and wait for one another in each micro-batch, the larger ones first.
        Otherwise they wait at the end of the step, like ranks whose micro-batches all take the same time.
        """
        parts = self.parts
        factors = np.stack([condition.compute, condition.scaleup, condition.network], axis=1)  # (stages, 3, ranks)
        fixed_s = np.einsum("skr,sk->sr", factors, self._fixed_s)
        growing_s = np.einsum("skr,sk->sr", factors, self._per_sample_s)
        device_s = fixed_s * micro_batches + growing_s * counts
        device_s = self._with_experts(device_s)
        # Kernels cannot run before they are launched, however fast the device is.
        passes_s = np.maximum(device_s, self._launch_s * micro_batches)
        # An absent rank has 0 micro-batches, which must not be a divisor.
        turns = np.maximum(micro_batches, 1)
        waits_s = (device_s.sum(0) - device_s.max(0)) / turns * parts.bubble
        sends_s = condition.sends * (parts.sends.fixed_s * micro_batches + parts.sends.per_sample_s * counts)
        ranks_s = passes_s.max(0) + waits_s + sends_s
        most = float(micro_batches.max())
        exchanged_s = condition.gradients * (most * parts.gradients_each_s + parts.gradients_once_s)
        slowest_s = self._in_step_s(fixed_s, growing_s, counts, micro_batches) if in_step else float(ranks_s.max())
        return StepSeconds(passes_s, ranks_s, exchanged_s, slowest_s + exchanged_s + parts.rest_s)

    def _in_step_s(self, fixed_s: Floats, growing_s: Floats, counts: Floats, micro_batches: Floats) -> float:
        """Return the sum over micro-batches of the slowest rank's time, in a pipeline of one stage."""
        each, larger = np.divmod(counts, np.maximum(micro_batches, 1))
        passes_s = 0.0
        for turn in range(int(micro_batches.max())):
            sizes = each + (turn < larger)
            device_s = self._with_experts(fixed_s * (turn < micro_batches) + growing_s * sizes)
            passes_s += float(np.maximum(device_s, self._launch_s * (turn < micro_batches)).max())
        return passes_s

    def _with_experts(self, device_s: Floats) -> Floats:
        together = self._exchanging_rows
        if together == 1:
            return device_s
        # Ranks that exchange tokens of experts synchronise in every layer, so all are as slow as the slowest one.
        blocks = device_s.reshape(self._stages, -1, together).max(2)
        return np.repeat(blocks, together, axis=1)

    def lines(self, condition: Condition, micro_batches: int, samples: float) -> tuple[Floats, Floats]:
        """Return a linear model of each rank's time for this number of micro-batches: the time without samples, and the
        time per sample. The line is exact at `samples`."""
        turns = np.full(self.ranks, float(micro_batches))
        # The true time is not linear, since a stage is never faster than its kernel launches. The line is exact near
        # the usual number of samples, where shares lie.
        empty_s = self.seconds(condition, np.zeros(self.ranks), turns).ranks_s
        full_s = self.seconds(condition, np.full(self.ranks, samples), turns).ranks_s
        return empty_s, np.maximum((full_s - empty_s) / samples, LEAST_S)
