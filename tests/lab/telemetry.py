"""Generated telemetry: what the ranks of a run would write down, healthy or disturbed, as evidence for a diagnosis.

Each rank computes for `compute_s` with noise, waits for the last one, and then all transfer for `transfer_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trainspec_cli.reporter.diagnosis.evidence import COUNTERS, Connection, Figures, RunEvidence
from trainspec_cli.run.folder.event_types.events import StallEvent


@dataclass
class Telemetry:
    """A run of `steps` steps; a test adds disturbances and takes the evidence."""

    ranks: int = 8
    steps: int = 120
    ranks_of_node: int = 4
    stages: int = 1
    compute_s: float = 0.2
    transfer_s: float = 0.05
    noise: float = 0.02
    seed: int = 0
    stalls: Mapping[int, StallEvent] = field(default_factory=dict)
    resent: dict[tuple[int, int], float] = field(default_factory=dict)
    """Segments sent again a step, by pair of ranks, from the middle of the run on."""
    resent_until: int | None = None
    """The step from which on no more are."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        shape = self.steps, self.ranks
        self.parts_s: dict[str, Figures] = {
            "data_wait": self.noisy(1e-4, shape),
            "forward": self.noisy(self.compute_s / 3, shape),
            "backward": self.noisy(self.compute_s * 2 / 3, shape),
            "optimizer": self.noisy(self.compute_s / 20, shape),
            "checkpoint": np.zeros(shape),
            "other": self.noisy(self.compute_s / 50, shape),
        }
        self.transfers_s = self.noisy(self.transfer_s, (self.steps,))
        self.counters: dict[str, Figures] = {name: np.zeros(shape) for name in COUNTERS}
        self.counters["cpu_s"] += self.compute_s
        self.counters["queued_s"] += self.noisy(self.compute_s / 50, shape)
        self.counters["tokens"] += 4096
        self.counters["attended"] += 4096 * 512
        self.counters["agreed_s"] += self.noisy(2e-4, shape)
        self.counters["rss_bytes"] += 1e9
        self.counters["available_bytes"] += 1e10
        self.rates = dict.fromkeys(self.pairs, 1e9)
        self.rtts_s = dict.fromkeys(self.pairs, 2e-4)

    def noisy(self, level: float, shape: tuple[int, ...]) -> Figures:
        """Return the level with noise: a normal part, and now and then a step that takes half as long again."""
        spikes = (self.random.random(shape) < 0.01) * 0.5
        drawn: Figures = level * np.maximum(0.2, 1 + self.noise * self.random.standard_normal(shape) + spikes)
        return drawn

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The neighbours of a ring."""
        return [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(rank // self.ranks_of_node for rank in range(self.ranks))

    def slow(self, rank: int, factor: float, first: int = 60, last: int | None = None, **counters: float) -> Telemetry:
        """Let a rank compute this many times as long; its counters show these seconds per step."""
        for name in ("forward", "backward"):
            self.parts_s[name][first:last, rank] *= factor
        for name, seconds in counters.items():
            self.counters[name][first:last, rank] += seconds
        return self

    def add(self, part: str, rank: int | slice, seconds: float, first: int = 60) -> Telemetry:
        self.parts_s[part][first:, rank] += seconds
        return self

    def narrow(self, pairs: list[tuple[int, int]], factor: float, first: int = 60) -> Telemetry:
        self.transfers_s[first:] *= factor
        self.rates |= dict.fromkeys(pairs, 1e9 / factor)
        return self

    def delay(self, pair: tuple[int, int], seconds: float, first: int = 60) -> Telemetry:
        self.transfers_s[first:] += 10 * seconds
        self.counters["agreed_s"][first:] += seconds
        self.rtts_s[pair] += seconds
        return self

    def evidence(self) -> RunEvidence:
        own_s = np.sum(list(self.parts_s.values()), axis=0)
        exposed_s = own_s.max(axis=1, keepdims=True) - own_s + self.transfers_s[:, None]
        stage = max(1, self.ranks // self.stages)
        return RunEvidence(
            steps=np.arange(1, self.steps + 1),
            parts_s={**self.parts_s, "exposed_comm": exposed_s},
            counters=self.counters,
            nodes=self.nodes,
            kinds=tuple(rank // stage for rank in range(self.ranks)),
            connections=tuple(self.connection(pair) for pair in self.pairs) if self.ranks <= 64 else (),
            stalls=self.stalls,
        )

    def connection(self, pair: tuple[int, int]) -> Connection:
        late = np.arange(self.steps) >= 60
        loses = late & (np.arange(self.steps) < (self.resent_until or self.steps))
        sent = np.full(self.steps, 1e7)
        return Connection(
            pair,
            sent_bytes=sent,
            segments=np.full(self.steps, 1000.0),
            resent=np.where(loses, self.resent.get(pair, 0.0), 0.0),
            timeouts=np.zeros(self.steps),
            busy_s=sent / np.where(late, self.rates[pair], 1e9),
            rtt_s=np.where(late, self.rtts_s[pair], 2e-4),
        )
