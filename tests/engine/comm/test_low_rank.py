"""Matrices that travel in low rank: PowerSGD as one process computes it, what is lost and kept, and real ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.ranks import outputs
from torch import Tensor

from trainspec_cli.engine.comm.compressed import Compression
from trainspec_cli.engine.comm.low_rank import LowRankSum, low_rank_sum, places_of

WORKER = Path(__file__).with_name("low_rank_worker.py")
SHAPES = [(40, 24), (24,), (24, 40), (6, 8)]
"""Two matrices that are factored at a rank of 2, a vector, and a matrix whose factors are half of it."""
RANK, STEPS = 2, 8
FACTORED = (slice(0, 960), slice(984, 1944))
VALUES = 1992
HEADER_BYTES = 512
"""gloo's own, of each exchange, at most."""


@dataclass
class ThreadWire:
    """One of two ranks that are threads."""

    rank: int
    sent: dict[int, Tensor]
    barrier: Barrier
    size: int = field(default=2, init=False)

    def _all(self, sent: Tensor) -> list[Tensor]:
        self.sent[self.rank] = sent.clone()
        self.barrier.wait(timeout=600)
        everything = [self.sent[one] for one in range(self.size)]
        self.barrier.wait(timeout=600)
        return everything

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self._all(sent_RB)])

    def gather_rows(self, own_B: Tensor) -> Tensor:
        return torch.stack(self._all(own_B))


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * step + rank)) * 1e-3


def exchange_of(kept: Compression) -> LowRankSum:
    made = low_rank_sum(kept, "block0", SHAPES, SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    assert made is not None
    return made


def new() -> Compression:
    return Compression(inside="low_rank", rank=RANK)


def sum_steps(steps: range, kept: list[Compression]) -> list[list[Tensor]]:
    """Return the sums of each step, by rank."""
    sent, barrier = dict[int, Tensor](), Barrier(2)

    def of_rank(rank: int) -> list[Tensor]:
        sums = []
        for step in steps:
            x = gradient(step, rank)
            exchange_of(kept[rank]).all_reduce_(x, ThreadWire(rank, sent, barrier))
            kept[rank].settle(torch.zeros(()))
            sums.append(x)
        return sums

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def in_one_process(steps: int) -> list[Tensor]:
    """The sums of algorithms 1 and 2, in fp64, from the Q that the exchange begins with."""
    first = exchange_of(new()).warm.settled.double()
    lost = [[torch.zeros(SHAPES[place], dtype=torch.float64) for place in (0, 2)] for _ in range(2)]
    queries = [first[: 24 * RANK].view(24, RANK), first[24 * RANK :].view(40, RANK)]
    sums = []
    for step in range(steps):
        gradients = [gradient(step, rank).double() for rank in range(2)]
        total = gradients[0] + gradients[1]
        for number, (place, part) in enumerate(zip((0, 2), FACTORED, strict=True)):
            wanted = [g[part].view(SHAPES[place]) + e[number] for g, e in zip(gradients, lost, strict=True)]
            p = torch.linalg.qr((wanted[0] + wanted[1]) @ queries[number]).Q
            for rank in range(2):
                lost[rank][number] = wanted[rank] - p @ p.T @ wanted[rank]
            queries[number] = (wanted[0] + wanted[1]).T @ p
            total[part] = (p @ queries[number].T).flatten()
        sums.append(total)
    return sums


def test_the_sum_of_two_ranks_is_that_of_the_algorithm() -> None:
    """Over few steps: what waits grows to several gradients, and is rounded in fp32 each time."""
    found = sum_steps(range(4), [new(), new()])
    for own, other, wanted in zip(*found, in_one_process(4), strict=True):
        assert torch.equal(own, other), "every rank gets the same bits"
        assert float((own - wanted).norm() / wanted.norm()) < 1e-6
        total = wanted[960:984]
        assert float((own[960:984] - total).norm() / total.norm()) < 1e-6


def test_nothing_is_lost_over_many_steps_but_what_still_waits() -> None:
    kept = [new(), new()]
    applied = torch.stack(sum_steps(range(STEPS), kept)[0]).double().sum(0)
    total = sum(gradient(step, rank).double() for step in range(STEPS) for rank in range(2))
    waiting = sum(one.feedbacks["block0"].settled.double() for one in kept)
    assert isinstance(total, Tensor) and isinstance(waiting, Tensor)
    for part in FACTORED:
        assert float((applied[part] - total[part]).norm()) > 0.5 * float(total[part].norm()), "the sums alone lack much"
        assert float((applied[part] + waiting[part] - total[part]).norm() / total[part].norm()) < 1e-6


def test_what_a_checkpoint_holds_is_enough_to_go_on_to_the_bit() -> None:
    alone = sum_steps(range(6), [new(), new()])[0]
    before, after = [new(), new()], [new(), new()]
    sum_steps(range(3), before)
    for one, other in zip(before, after, strict=True):
        exchange_of(other)
        for name, feedback in other.feedbacks.items():
            feedback.settled.copy_(one.feedbacks[name].settled)
    assert all(torch.equal(one, two) for one, two in zip(alone[3:], sum_steps(range(3, 6), after)[0], strict=True))


def test_a_step_that_does_not_count_leaves_q_as_it_was_and_a_new_start_draws_it_again() -> None:
    kept = new()
    warm = exchange_of(kept).warm
    drawn = warm.settled.clone()
    warm.keep(torch.full_like(drawn, torch.nan))
    warm.settle(torch.ones(()))
    assert torch.equal(warm.newest, drawn) and drawn.norm() > 0 and not warm.is_loss
    warm.keep(torch.ones_like(drawn))
    kept.settle(torch.zeros(()))
    assert torch.equal(warm.settled, torch.ones_like(drawn))
    kept.clear()
    assert torch.equal(warm.settled, drawn)
    assert torch.equal(exchange_of(new()).warm.settled, drawn), "on every rank"


def test_vectors_and_small_matrices_travel_in_full() -> None:
    assert [place.is_factored for place in places_of(SHAPES, RANK)] == [True, False, True, False]
    assert low_rank_sum(new(), "norms", [(24,), (6, 8)], SimpleNamespace(size=lambda: 2)) is None  # type: ignore[arg-type]
    assert low_rank_sum(new(), "alone", SHAPES, SimpleNamespace(size=lambda: 1)) is None  # type: ignore[arg-type]
    across = Compression(inside="full", across="low_rank", is_inside=lambda group: True)
    assert low_rank_sum(across, "inside", SHAPES, SimpleNamespace(size=lambda: 2)) is None  # type: ignore[arg-type]
    assert across.feeds_back and not across.feedbacks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("low_rank") / "meeting"
    printed = outputs(WORKER, [(file, rank) for rank in range(2)])
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_two_processes_send_the_factors_alone(trained: list[dict[str, Any]]) -> None:
    """Of two ranks each sends half of what it sums to the other, and half of the sums."""
    for rank in trained:
        headers_bytes = HEADER_BYTES * rank["exchanges"]
        assert rank["wanted_bytes"] <= rank["sent_bytes"] <= rank["wanted_bytes"] + headers_bytes
        assert rank["sent_bytes"] < rank["full_bytes"] / 3


def test_the_planner_counts_the_factors_that_are_sent(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        assert rank["feedback_values"] == rank["planned_values"]


def test_replicas_stay_alike_and_a_tiny_decoder_learns(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["digest"] == trained[1]["digest"]
    first, last = trained[0]["losses"]
    assert last < first
