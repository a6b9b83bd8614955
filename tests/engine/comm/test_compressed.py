"""Sums that travel in few bits: what they lose, what becomes of it, and what goes over the wire between real ranks."""

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

from trainspec_cli.engine.comm import compressed
from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.compressed import RETURNED, CompressedSum, Compression, Feedback

CPU = torch.device("cpu")
WORKER = Path(__file__).with_name("wire_worker.py")
WIRE_BITS = {"full": 32, "bf16": 16, "int8": 8.125, "int4": 4.125}
HEADER_BYTES = 512
"""gloo's own, of each exchange with each other rank, at most."""


# Between threads


@dataclass
class Hall:
    """Where ranks that are threads leave what they send."""

    size: int
    sent: dict[int, Tensor] = field(default_factory=dict)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size)

    def all(self, rank: int, sent: Tensor) -> list[Tensor]:
        self.sent[rank] = sent.clone()
        self.barrier.wait(timeout=600)
        everything = [self.sent[one] for one in range(self.size)]
        self.barrier.wait(timeout=600)
        return everything

    def run(self, of_rank: Any) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(of_rank, range(self.size)))


@dataclass
class ThreadWire:
    hall: Hall
    rank: int

    @property
    def size(self) -> int:
        return self.hall.size

    def swap_rows(self, sent_RB: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self.hall.all(self.rank, sent_RB)])

    def gather_rows(self, own_B: Tensor) -> Tensor:
        return torch.stack(self.hall.all(self.rank, own_B))


def gradient(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank)) * 1e-4


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_over_many_steps_but_what_still_waits(name: str, ranks: int) -> None:
    """The sums of all steps and all that the ranks still hold back are the sums of all gradients."""
    hall, values, steps = Hall(ranks), 1000, 12

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        feedback = Feedback(values, CPU)
        exchange, total = CompressedSum(GRADIENT_CODECS[name], feedback), torch.zeros(values)
        for step in range(steps):
            x = gradient(step, rank, values)
            exchange.all_reduce_(x, ThreadWire(hall, rank))
            feedback.end_step(torch.zeros(()))
            total += x
        return total, feedback.committed.float()

    found = hall.run(of_rank)
    wanted = sum(gradient(step, rank, values) for step in range(steps) for rank in range(ranks))
    waiting = sum(left for _, left in found)
    assert isinstance(wanted, Tensor) and isinstance(waiting, Tensor)
    assert all(torch.equal(total, found[0][0]) for total, _ in found), "every rank gets the same bits"
    missing = float((found[0][0] - wanted).norm())
    assert missing > 1e-6, "the sums alone are not exact"
    rounded = steps * float(waiting.abs().max()) * ranks * 2**-8 * values**0.5
    assert float((found[0][0] + waiting - wanted).norm()) < min(rounded, missing / 10)


def test_the_feedback_adds_little_to_what_a_sum_is_wrong_by() -> None:
    """A sum that returned the entire error in one step would be wrong by a factor of the square root of 2."""
    codec, values = GRADIENT_CODECS["int4"], 2**15
    feedback = Feedback(2 * values, CPU)
    exchange, errors = CompressedSum(codec, feedback), []
    for step in range(60):
        x_2N = gradient(step, 0, 2, values)
        sent: list[Tensor] = []
        wire = SimpleNamespace(size=2, rank=0, swap_rows=lambda rows, sent=sent: sent.append(rows) or rows)
        exchange.reduce_scatter(x_2N, wire)
        feedback.end_step(torch.zeros(()))
        decoded = (codec.decode(rows, values) for rows in (sent[0], codec.encode(x_2N)))
        errors.append([float((one - x_2N)[1].square().mean()) for one in decoded])
    with_feedback, without = torch.tensor(errors[30:]).mean(0).tolist()
    assert with_feedback / without == pytest.approx(1 + RETURNED / (2 - RETURNED), rel=0.05)
    own, others = feedback.committed.float().chunk(2)
    assert not own.any(), "the own row does not travel"
    kept = float(others.square().mean()) / without
    assert kept == pytest.approx(1 / (RETURNED * (2 - RETURNED)), rel=0.05)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_each_rank_gets_the_sum_of_its_row(name: str) -> None:
    hall, values = Hall(3), 515
    rows = [gradient(0, rank, 3, values) for rank in range(3)]

    def of_rank(rank: int) -> Tensor:
        feedback = Feedback(3 * values, CPU) if GRADIENT_CODECS[name].feeds_back else None
        return CompressedSum(GRADIENT_CODECS[name], feedback).reduce_scatter(rows[rank], ThreadWire(hall, rank))

    found, wanted = torch.stack(hall.run(of_rank)), torch.stack(rows).sum(0)
    assert float((found - wanted).norm() / wanted.norm()) < {"bf16": 0.005, "int8": 0.02, "int4": 0.2}[name]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("part", [compressed.ALIGNED, 3 * compressed.ALIGNED])
def test_sums_in_parts_are_those_of_the_whole(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows, and several rows together: the bits of the sums and of the rest for the next step are equal."""
    values = 5000

    def of_rank(hall: Hall, rank: int) -> list[Tensor]:
        found = []
        for length in (3 * values, values):
            feedback = Feedback(length, CPU) if GRADIENT_CODECS[name].feeds_back else None
            exchange = CompressedSum(GRADIENT_CODECS[name], feedback)
            for step in range(2):
                x = gradient(step, rank, length)
                if length == values:
                    exchange.all_reduce_(x, ThreadWire(hall, rank))
                else:
                    x = exchange.reduce_scatter(x.view(3, values), ThreadWire(hall, rank))
                found.append(x)
            found += [] if feedback is None else [feedback.newest]
        return found

    def sums() -> list[list[Tensor]]:
        hall = Hall(3)
        return hall.run(lambda rank: of_rank(hall, rank))

    whole = sums()
    monkeypatch.setattr(compressed, "PART_VALUES", part)
    for one, other in zip(whole, sums(), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_sum_does_not_round_in_the_format_of_the_wire() -> None:
    """One large value and many small ones: added up in bf16, the small ones would be lost."""
    hall = Hall(8)

    def of_rank(rank: int) -> Tensor:
        row = torch.full((8, 128), 256.0 if rank == 0 else 0.5)
        return CompressedSum(GRADIENT_CODECS["bf16"], None).reduce_scatter(row, ThreadWire(hall, rank))

    assert all(found.tolist() == [259.5] * 128 for found in hall.run(of_rank))


def test_an_exchange_of_one_value() -> None:
    hall = Hall(3)

    def of_rank(rank: int) -> float:
        x = torch.tensor(float(rank + 1))
        CompressedSum(GRADIENT_CODECS["int4"], Feedback(1, CPU)).all_reduce_(x, ThreadWire(hall, rank))
        return float(x)

    assert hall.run(of_rank) == [pytest.approx(6.0, rel=0.25)] * 3


# What steps do to the feedback


def test_a_step_that_does_not_count_leaves_the_feedback_as_it_was() -> None:
    feedback = Feedback(3, CPU)
    feedback.keep(0, torch.tensor([1.0, 2.0, 3.0]))
    assert feedback.newest.tolist() == [1.0, 2.0, 3.0], "the step's next exchange takes it"
    assert feedback.committed.tolist() == [0.0] * 3, "a checkpoint of the step's beginning does not hold it"
    feedback.end_step(torch.zeros(()))
    assert feedback.committed.tolist() == [1.0, 2.0, 3.0]
    feedback.keep(0, torch.tensor([float("nan"), 0.0, 0.0]))
    feedback.end_step(torch.ones(()))
    assert feedback.newest.tolist() == [1.0, 2.0, 3.0], "skipped"
    feedback.keep(0, torch.zeros(3))
    feedback.discard()
    assert feedback.newest.tolist() == [1.0, 2.0, 3.0], "made again"
    feedback.end_step(torch.zeros(()))
    assert feedback.committed.tolist() == [1.0, 2.0, 3.0], "nothing was exchanged"
    feedback.clear()
    assert feedback.newest.tolist() == [0.0] * 3


def group(size: int, *, inside: bool) -> Any:
    return SimpleNamespace(size=lambda: size, inside=inside)


def test_the_format_follows_from_where_the_ranks_are() -> None:
    made = Compression(inside="full", across="int4", is_inside=lambda group: group.inside, saved_as="layout.rank1")  # type: ignore[attr-defined]
    assert made.of_group("a", 8, group(2, inside=True)) is None
    assert made.of_group("b", 8, group(1, inside=False)) is None, "one rank exchanges nothing"
    assert made.of_group("c", 0, group(2, inside=False)) is None
    assert not made.feedbacks
    across = made.of_group("d", 8, group(2, inside=False))
    assert across is not None and across.codec is GRADIENT_CODECS["int4"]
    again = made.of_group("d", 8, group(2, inside=False))
    assert again is not None and again.feedback is across.feedback is made.feedbacks["d"]
    assert {name: tensor.shape for name, tensor in made.saved.items()} == {"feedback.layout.rank1.d": (8,)}
    assert Compression(inside="int8").of("e", 8, inside=True) is not None
    assert not Compression(inside="bf16").feedbacks
    unsaved = Compression(inside="int8")
    unsaved.of("e", 8, inside=True)
    assert unsaved.feedbacks and not unsaved.saved


# Between processes


def computed_by(ranks: int, file: Path) -> list[dict[str, Any]]:
    printed = outputs(WORKER, [(file, rank, ranks) for rank in range(ranks)])
    return [json.loads(text.splitlines()[-1]) for text in printed]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return computed_by(request.param, tmp_path_factory.mktemp("wire") / "meeting")


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_sums_are_within_what_the_format_states(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert 0 < rank["formats"][name]["scatter"] < 1
        assert 0 < rank["formats"][name]["reduce"] < 1
    assert len({rank["formats"][name]["reduced"] for rank in found}) == 1, "every rank gets the same bits"


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_the_same_gradients_give_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    assert all(rank["formats"][name]["digest"] == rank["again"][name] for rank in found)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_bytes_that_the_kernel_has_counted(found: list[dict[str, Any]], name: str) -> None:
    """A row to each other rank; an all-reduce sends as much again."""
    values = 2**16
    row_bytes = values * WIRE_BITS[name] / 8 * (len(found) - 1)
    for rank in found:
        scatter, reduce = rank["formats"][name]["bytes"]
        headers_bytes = HEADER_BYTES * (len(found) - 1)
        assert row_bytes <= scatter <= row_bytes + headers_bytes
        assert 2 * row_bytes <= reduce <= 2 * row_bytes + headers_bytes


def test_sums_in_full_are_made_in_the_order_of_ranks(found: list[dict[str, Any]]) -> None:
    """Wherever a value lies; a reduce-scatter sends a row to each other rank, and no more."""
    for rank in found:
        assert rank["in_order"] == [True, True, True]
        row_bytes, headers_bytes = 2**16 * 4 * (len(found) - 1), HEADER_BYTES * (len(found) - 1)
        assert row_bytes <= rank["counted"]["full scatter"] <= row_bytes + headers_bytes
        assert rank["counted"]["reduce in order"] == pytest.approx(2 * row_bytes, abs=headers_bytes)


def test_full_sums_are_counted_too_and_bf16_sends_half_of_them(found: list[dict[str, Any]]) -> None:
    full = sum(rank["counted"]["full reduce"] for rank in found)
    half = sum(rank["formats"]["bf16"]["bytes"][1] for rank in found)
    assert half / full == pytest.approx(0.5, rel=0.002)
    for rank in found:
        gathered = 2**16 * 4 * (len(found) - 1)
        assert gathered <= rank["counted"]["gather"] <= gathered + HEADER_BYTES * (len(found) - 1)
        totals = dict(rank["totals"])
        other = totals.pop("other")
        assert sum(totals.values()) == sum(rank["counted"].values()) + sum(
            sum(one["bytes"]) for one in rank["formats"].values()
        )
        assert other > sum(sum(one["bytes"]) for one in rank["formats"].values()), "made again, for no purpose"
