"""The true step times of a simulated, disturbed cluster, by data-parallel rank and pipeline stage."""

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
"""Lower bound on the time of a sample whose compute time is hidden entirely behind kernel launches."""


@dataclass(frozen=True)
class Condition:
    """Slowdown factors for the parts of a step, as arrays with the shape (stages, data-parallel ranks)."""

    compute: Floats
    scaleup: Floats
    network: Floats
    sends: Floats
    """Slowdown factors for the messages in the pipeline of each data-parallel rank."""
    gradients: float


@dataclass(frozen=True)
class StepSeconds:
    """The true durations of the parts of a step."""

    computed_s: Floats
    """(stages, ranks): compute time over all micro-batches as a rank measures it, excluding exchanges and waits."""
    passes_s: Floats
    """The same compute time, including the exchanges inside layers."""
    updates_s: Floats
    """Time of the rank's update, if no other rank waits for it; otherwise 0."""
    ranks_s: Floats
    """Time of each data-parallel rank's pipeline, including filling and draining, plus its update if no other rank
    waits for it."""
    exchanged_s: float
    """Duration of the exchanges between ranks."""
    total_s: float

    def waited_s(self, rows: slice) -> float:
        """Return the exchange time of the rank in `rows` that waits least."""
        return self.exchanged_s + float((self.passes_s - self.computed_s)[:, rows].min())


class Cluster:
    def __init__(self, parts: StepParts, layout: Layout, num_nodes: int, devices_per_node: int, replica_groups: int):
        """`layout`: the combined layout of all replica groups, with devices numbered group by group."""
        self.parts = parts
        self._layout = layout
        self.ranks, self._stages = layout.data_parallel_size, len(parts.stages)
        self._num_nodes = num_nodes
        self._per_node = devices_per_node
        self._groups = replica_groups
        apart = layout.ep * layout.etp // (layout.cp * layout.tp)
        self._exchanging_rows = max(1, apart)
        """Number of neighbouring ranks that exchange tokens for their experts in every layer, and therefore wait for
        the slowest of them."""
        speeds = [[stage.compute, stage.scaleup, stage.network] for stage in parts.stages]
        self._fixed_s = np.array([[speed.fixed_s for speed in stage] for stage in speeds])
        self._per_sample_s = np.array([[speed.per_sample_s for speed in stage] for stage in speeds])
        self._launch_s = np.array([[stage.launch_s] for stage in parts.stages])

    def with_parts(self, parts: StepParts) -> Cluster:
        """Return the same cluster with other planned step times."""
        return Cluster(parts, self._layout, self._num_nodes, self._per_node, self._groups)

    def paces(self, events: Sequence[Event]) -> Floats:
        """Return the slowdown of each device's compute. The factors of overlapping events are multiplied."""
        paces = np.ones(self._num_nodes * self._per_node)
        for event in events:
            if isinstance(event, SlowDevice):
                paces[event.device] *= event.factor
            elif isinstance(event, SlowNode):
                paces[self._devices_of(event.node)] *= event.factor
        return paces

    def condition(self, events: Sequence[Event]) -> Condition:
        """Return the combined effect of these events. Devices that compute a micro-batch together are as slow as the
        slowest of them."""
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
        """Return the slowdown of each device's exchanges."""
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
        """Return a value for each device, taken from its stage and data-parallel rank."""
        own = of_places.reshape(self._stages, self._groups, -1).swapaxes(0, 1)
        return np.repeat(own.ravel(), self._layout.cp * self._layout.tp)

    def seconds(
        self, condition: Condition, counts: Floats, micro_batches: Floats, *, in_step: bool = False
    ) -> StepSeconds:
        """Return a step's durations, given each rank's samples and micro-batches; a rank with 0 of both is absent.
        `in_step`: ranks have whole numbers of samples, process their larger micro-batches first, and wait for one
        another in each micro-batch. Otherwise they wait only at the end of the step, as if all of a rank's
        micro-batches took the same time."""
        parts = self.parts
        factors = np.stack([condition.compute, condition.scaleup, condition.network], axis=1)  # (stages, 3, ranks)
        computed_s = condition.compute * (self._fixed_s[:, :1] * micro_batches + self._per_sample_s[:, :1] * counts)
        fixed_s = np.einsum("skr,sk->sr", factors, self._fixed_s)
        growing_s = np.einsum("skr,sk->sr", factors, self._per_sample_s)
        device_s = fixed_s * micro_batches + growing_s * counts
        device_s = self._with_experts(device_s)
        # Kernels cannot run before they are launched, no matter how fast the device is.
        computed_s, passes_s = (np.maximum(own_s, self._launch_s * micro_batches) for own_s in (computed_s, device_s))
        # Avoid a division by 0, because an absent rank has 0 micro-batches.
        turns = np.maximum(micro_batches, 1)
        waits_s = (device_s.sum(0) - device_s.max(0)) / turns * parts.bubble
        sends_s = condition.sends * (parts.sends.fixed_s * micro_batches + parts.sends.per_sample_s * counts)
        updates_s = parts.optimizer_s * condition.compute * (micro_batches > 0)
        gathered_s = 0.0
        if in_step or self._layout.dp_shard > 1:
            # The next step begins by gathering the updated parameters, and therefore waits for the slowest update.
            gathered_s = float(updates_s.max())
            updates_s = np.zeros_like(passes_s)
        ranks_s = (passes_s + updates_s).max(0) + waits_s + sends_s
        most = float(micro_batches.max())
        exchanged_s = condition.gradients * (most * parts.gradients_each_s + parts.gradients_once_s)
        slowest_s = self._in_step_s(fixed_s, growing_s, counts, micro_batches) if in_step else float(ranks_s.max())
        total_s = slowest_s + exchanged_s + gathered_s + parts.rest_s
        return StepSeconds(computed_s, passes_s, updates_s, ranks_s, exchanged_s, total_s)

    def _in_step_s(self, fixed_s: Floats, growing_s: Floats, counts: Floats, micro_batches: Floats) -> float:
        """Return the slowest rank's time, summed over all micro-batches, for a pipeline with one stage."""
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
        # Ranks that exchange tokens for their experts synchronise in every layer, so they are all as slow as the
        # slowest one.
        blocks = device_s.reshape(self._stages, -1, together).max(2)
        return np.repeat(blocks, together, axis=1)

    def lines(self, condition: Condition, micro_batches: int, samples: float) -> tuple[Floats, Floats]:
        """Return a linear model of each rank's time for this number of micro-batches: the time without samples and the
        time per sample. The line is exact at `samples`."""
        turns = np.full(self.ranks, float(micro_batches))
        # The true time is not linear, because a stage is never faster than its kernel launches. The line is exact near
        # the usual number of samples, and the actual shares are close to it.
        empty_s = self.seconds(condition, np.zeros(self.ranks), turns).ranks_s
        full_s = self.seconds(condition, np.full(self.ranks, samples), turns).ranks_s
        return empty_s, np.maximum((full_s - empty_s) / samples, LEAST_S)
