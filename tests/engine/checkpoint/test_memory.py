"""Copies in memory of a run of one process, and where those of several ranks lie."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.engine.checkpoint import memory
from trainspec_cli.engine.checkpoint.files import Held, TensorPart, file_name
from trainspec_cli.engine.checkpoint.manifest import About, Chunk, FileDigest, TensorEntry, WrittenPart, digest_file
from trainspec_cli.engine.checkpoint.memory import CopyLocation, KeptPart, clear, find_newest, plan_image
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rank", "node", "guest", "keeper"), [(0, 0, 4, 2), (1, 0, 5, 3), (2, 1, 0, 4), (3, 1, 1, 5), (5, 2, 3, 1)]
)
def test_a_rank_keeps_the_copy_of_its_neighbour_of_the_node_before(
    rank: int, node: int, guest: int, keeper: int
) -> None:
    location = CopyLocation(Path("m"), rank, world_size=6, ranks_per_node=2)
    assert (location.node, location.guest, location.keeper) == (node, guest, keeper)
    assert location.slot(1) == Path("m/slot1")


def test_on_a_single_node_nobody_keeps_anothers_copy() -> None:
    assert [CopyLocation(Path("m"), rank, 2, 2).guest for rank in range(2)] == [None, None]


class OneTensor(Held):
    """A rank that holds one tensor, filled with one number."""

    tensor = torch.zeros(5)

    def parts(self) -> list[TensorPart]:
        return [TensorPart.whole("w", self.tensor)]


@pytest.fixture
def held() -> OneTensor:
    OneTensor.tensor = torch.zeros(5)
    return OneTensor([], [], None)  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def location(tmp_path: Path) -> CopyLocation:
    return CopyLocation(tmp_path / "memory", rank=0, world_size=1, ranks_per_node=1)


def copy_step(saver: Saver, held: OneTensor, step: int, *, to_disk: bool = False) -> None:
    held.tensor.fill_(step)
    saver.begin(About(step, 2 * step, 1, "d"), to_disk=to_disk)
    saved = saver.wait()
    assert saved is not None and saved.error is None
    assert (saved.in_memory, saved.about.step) == (not to_disk, step)
    assert 0 <= saved.blocked_s <= saved.written_s
    assert saved.bytes > 20


def steps_in_memory(location: CopyLocation) -> dict[str, int]:
    return {path.parent.name: read_json(path)["about"]["step"] for path in location.folder.glob("slot*/rank*.json")}


@pytest.mark.usefixtures("one_process")
def test_two_slots_take_turns_and_the_newest_copy_is_restored(
    run_dir: RunDir, held: OneTensor, location: CopyLocation
) -> None:
    saver = Saver(run_dir, held, CPU, keep_last=2, memory=location)
    saver.prepare()
    assert load_newest(run_dir, held, CPU, location) is None
    for step, slots in [(4, {"slot0": 4}), (6, {"slot0": 4, "slot1": 6}), (8, {"slot0": 8, "slot1": 6})]:
        copy_step(saver, held, step)
        assert steps_in_memory(location) == slots
    held.tensor.zero_()
    restored = load_newest(run_dir, held, CPU, location)
    assert restored is not None
    assert (restored.manifest.step, restored.manifest.about.samples, restored.slot) == (8, 16, 0)
    assert restored.folder == location.slot(0)
    assert held.tensor.tolist() == [8.0] * 5
    assert run_dir.checkpoint_steps() == []
    clear(location)
    assert not location.folder.exists()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("on_disk", "restored_step"), [(5, 6), (6, 6), (7, 7)])
def test_a_copy_counts_only_where_it_is_newer_than_the_disk(
    run_dir: RunDir, held: OneTensor, location: CopyLocation, on_disk: int, restored_step: int
) -> None:
    copy_step(Saver(run_dir, held, CPU, 2, location), held, 6)
    held.tensor.fill_(on_disk)
    Saver(run_dir, held, CPU, 2).save(About(on_disk, 0, 1, "d"))
    held.tensor.zero_()
    restored = load_newest(run_dir, held, CPU, location)
    assert restored is not None
    assert (restored.manifest.step, restored.slot is None) == (restored_step, on_disk >= 6)
    assert held.tensor.tolist() == [float(restored_step)] * 5
    without = load_newest(run_dir, held, CPU)
    assert without is not None and without.manifest.step == on_disk


@pytest.mark.usefixtures("one_process")
def test_a_resumed_run_leaves_the_copy_that_it_came_from_until_the_next_is_whole(
    run_dir: RunDir, held: OneTensor, location: CopyLocation
) -> None:
    first = Saver(run_dir, held, CPU, 2, location)
    copy_step(first, held, 4)
    resumed = Saver(run_dir, held, CPU, 2, location)
    resumed.slot = 1
    copy_step(resumed, held, 6)
    assert steps_in_memory(location) == {"slot0": 4, "slot1": 6}
    copy_step(resumed, held, 8)
    assert steps_in_memory(location) == {"slot0": 8, "slot1": 6}


@pytest.mark.usefixtures("one_process")
def test_a_copy_that_is_being_filled_does_not_count(run_dir: RunDir, held: OneTensor, location: CopyLocation) -> None:
    saver = Saver(run_dir, held, CPU, 2, location)
    for step in (4, 6):
        copy_step(saver, held, step)
    assert saver._memory is not None
    saver._memory.open(1)
    found = find_newest(location)
    assert found is not None and (found.manifest.step, found.slot) == (4, 0)


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_on_disk_is_a_copy_in_memory_too(run_dir: RunDir, held: OneTensor, location: CopyLocation) -> None:
    copy_step(Saver(run_dir, held, CPU, 2, location), held, 4, to_disk=True)
    assert run_dir.checkpoint_steps() == [4]
    on_disk, copied = (digest_file(folder / file_name(0)) for folder in (run_dir.checkpoint(4), location.slot(0)))
    assert on_disk == copied
    assert (location.slot(0) / file_name(0)).stat().st_mode & 0o777 == 0o600


# Several ranks' copies, of which each node tells the others


def keep_part(location: CopyLocation, slot: int, rank: int, step: int, world_size: int = 2) -> None:
    content = f"{rank} {step}".encode()
    path = location.slot(slot) / file_name(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    entry = TensorEntry((4,), "F32", (Chunk(file_name(rank), (2 * rank,), (2,)),))
    part = WrittenPart(digest_file(path), {"w": entry})
    kept = KeptPart(slot, rank, About(step, step, 1, "d"), world_size, part)
    write_json(path.with_suffix(".json"), asdict(kept))


def find_over(monkeypatch: pytest.MonkeyPatch, *locations: CopyLocation) -> Any:
    """What the ranks at `locations` find together, as the first of them sees it."""

    def gather(own: Any, read: Any) -> Any:
        return [read([to_plain(part) for part in memory._whole_parts(location)]) for location in locations]

    monkeypatch.setattr(memory, "gather_json", gather)
    return find_newest(locations[0])


@pytest.fixture
def nodes(tmp_path: Path) -> list[CopyLocation]:
    """Two nodes of one rank each."""
    return [CopyLocation(tmp_path / f"node{rank}", rank, world_size=2, ranks_per_node=1) for rank in range(2)]


def test_a_step_counts_where_every_part_is_whole_on_some_node(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]
) -> None:
    for rank in range(2):
        keep_part(nodes[0], 0, rank, step=4)
        keep_part(nodes[1], 1, rank, step=6)
    keep_part(nodes[0], 1, 1, step=6)
    keep_part(nodes[1], 0, 0, step=8)
    found = find_over(monkeypatch, *nodes)
    assert (found.manifest.step, found.slot, found.folder) == (6, 1, nodes[0].slot(1))
    assert found.holders == {file_name(0): 1, file_name(1): 0}
    assert [digest.name for digest in found.manifest.files] == [file_name(0), file_name(1)]
    assert [chunk.offsets for chunk in found.manifest.tensors["w"].chunks] == [(0,), (2,)]
    (nodes[0].slot(1) / file_name(1)).write_bytes(b"altered")
    assert find_over(monkeypatch, *nodes).holders == {file_name(0): 1, file_name(1): 1}
    (nodes[1].slot(1) / file_name(0)).unlink()
    assert find_over(monkeypatch, *nodes).manifest.step == 4


def test_parts_of_one_step_in_two_slots_are_not_mixed(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]
) -> None:
    keep_part(nodes[0], 0, 0, step=6)
    keep_part(nodes[1], 1, 1, step=6)
    assert find_over(monkeypatch, *nodes) is None
    keep_part(nodes[0], 0, 1, step=6)
    assert find_over(monkeypatch, *nodes).slot == 0


def test_a_step_of_a_larger_world_needs_all_its_parts(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]
) -> None:
    for rank in range(3):
        assert find_over(monkeypatch, *nodes) is None
        keep_part(nodes[rank % 2], 0, rank, step=4, world_size=3)
    assert find_over(monkeypatch, *nodes).manifest.world_size == 3


def test_the_ranks_of_a_node_verify_its_copies_once_between_them(tmp_path: Path) -> None:
    ranks = [CopyLocation(tmp_path, rank, world_size=4, ranks_per_node=2) for rank in (2, 3)]
    for slot in range(2):
        for rank in range(3):
            keep_part(ranks[0], slot, rank, step=slot, world_size=4)
    found = [[(kept.slot, kept.rank) for kept in memory._whole_parts(location)] for location in ranks]
    assert sorted(found[0] + found[1]) == [(slot, rank) for slot in range(2) for rank in range(3)]
    assert [len(part) for part in found] == [3, 3]


def test_one_rank_of_a_node_removes_its_copies(tmp_path: Path) -> None:
    for rank, remains in [(3, True), (2, False)]:
        location = CopyLocation(tmp_path / "memory", rank, world_size=4, ranks_per_node=2)
        location.slot(0).mkdir(parents=True, exist_ok=True)
        clear(location)
        assert location.folder.exists() is remains


def test_what_a_peer_says_of_its_copies_is_checked() -> None:
    part = WrittenPart(FileDigest(file_name(1), 3, "00"), {"w": TensorEntry((2,), "F32", ())})
    kept = KeptPart(1, 2, About(3, 4, 5, "d"), 6, part)
    content = to_plain(kept)
    assert KeptPart.read(content) == kept
    for damaged in ({"slot": "1"}, {"rank": None}, {"world_size": 2.5}, {"about": {}}):
        with pytest.raises((ValueError, TypeError, KeyError, RecipeError)):
            KeptPart.read(content | damaged)


def test_memory_that_has_no_room_is_refused_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MachineError, match=r" 5,000 bytes .*slot0: No space") as caught:
        memory._segment(tmp_path / "slot0" / "x", 5000, CPU)
    (problem,) = caught.value.problems
    assert (problem.code, "checkpoint.memory_interval_steps=null" in (problem.hint or "")) == ("cannot_save", True)
    assert list((tmp_path / "slot0").iterdir()) == []


def test_a_segment_of_another_size_is_made_to_fit(tmp_path: Path) -> None:
    memory._segment(tmp_path / "x", 500, CPU).fill_(7)
    assert memory._segment(tmp_path / "x", 100, CPU).tolist() == [7] * 100
    assert (tmp_path / "x").stat().st_size == 100


# What two nodes send one another


class TwoNodes:
    """Stands in for torch.distributed: this is one of two ranks, each on a node of its own."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.sent = rank, []  # type: ignore[var-annotated]
        self.barriers = 0

    def send(self, tensor: torch.Tensor, receiver: int) -> None:
        self.sent.append((bytes(tensor.tolist()), receiver))

    def recv(self, tensor: torch.Tensor, sender: int) -> None:
        tensor.copy_(torch.full_like(tensor, 70 + sender))

    def barrier(self) -> None:
        self.barriers += 1

    def new_group(self, backend: str) -> str:
        return backend


def found_on(nodes: list[CopyLocation], monkeypatch: pytest.MonkeyPatch) -> Any:
    for rank in range(2):
        keep_part(nodes[0], 0, rank, step=4)
        keep_part(nodes[1], 0, rank, step=4)
    return find_over(monkeypatch, nodes[1], nodes[0])


def fetched(
    monkeypatch: pytest.MonkeyPatch, location: CopyLocation, found: Any, wants: list[tuple[int, list[str]]]
) -> TwoNodes:
    """What the rank at `location` sends when the nodes lack what `wants` says."""
    ranks = TwoNodes(location.rank)
    monkeypatch.setattr(memory, "dist", ranks)

    def gather(own: Any, read: Any) -> Any:
        assert own == list(wants[location.node])
        return [read(one) for one in wants]

    monkeypatch.setattr(memory, "gather_json", gather)
    memory.fetch(location, found, {file_name(0), file_name(1)})
    assert ranks.barriers == 1
    return ranks


def test_a_node_sends_what_another_lacks_from_the_rank_that_has_it(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]
) -> None:
    for rank in range(2):
        keep_part(nodes[0], 0, rank, step=4)
    found = find_over(monkeypatch, *nodes)
    assert found.holders == {file_name(0): 0, file_name(1): 0}
    assert fetched(monkeypatch, nodes[0], found, [(0, []), (1, [file_name(1)])]).sent == [(b"1 4", 1)]


def test_a_file_without_a_mark_is_sent_again(monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]) -> None:
    """The copy was being received when its node died."""
    found = found_on(nodes, monkeypatch)
    (nodes[1].slot(0) / file_name(1)).with_suffix(".json").unlink()
    fetched(monkeypatch, nodes[1], found, [(0, []), (1, [file_name(1)])])
    assert (nodes[1].slot(0) / file_name(1)).read_bytes() == bytes([70] * 3)
    assert (nodes[1].slot(0) / file_name(0)).read_bytes() == b"0 4"


def test_a_copy_of_an_earlier_step_is_replaced(monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]) -> None:
    """The node had this rank in an earlier start, so its whole copy of that time is still there."""
    for rank in range(2):
        keep_part(nodes[0], 0, rank, step=8)
    keep_part(nodes[1], 0, 0, step=8)
    keep_part(nodes[1], 0, 1, step=4)
    found = find_over(monkeypatch, nodes[1], nodes[0])
    assert (found.manifest.step, found.holders[file_name(1)]) == (8, 1)  # counted in the order of `find_over`
    fetched(
        monkeypatch,
        nodes[1],
        memory.FoundCopy(found.folder, 0, found.manifest, {file_name(1): 0}),
        [(0, []), (1, [file_name(1)])],
    )
    assert (nodes[1].slot(0) / file_name(1)).read_bytes() == bytes([70] * 3)
    assert not (nodes[1].slot(0) / file_name(1)).with_suffix(".json").exists()


def test_an_altered_copy_is_replaced_by_the_neighbours_whole_one(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation]
) -> None:
    """Its mark still says that it is whole."""
    found_on(nodes, monkeypatch)
    (nodes[1].slot(0) / file_name(1)).write_bytes(b"1 5")
    found = find_over(monkeypatch, nodes[1], nodes[0])
    assert found.holders == {file_name(0): 0, file_name(1): 1}
    fetched(
        monkeypatch,
        nodes[1],
        memory.FoundCopy(found.folder, 0, found.manifest, {file_name(1): 0}),
        [(0, []), (1, [file_name(1)])],
    )
    assert (nodes[1].slot(0) / file_name(1)).read_bytes() == bytes([70] * 3)


def test_a_slot_that_is_filled_anew_takes_back_its_guests_mark_too(
    monkeypatch: pytest.MonkeyPatch, nodes: list[CopyLocation], held: OneTensor
) -> None:
    """While the two copies are being written, neither is whole; each has the size of its own rank's image."""
    monkeypatch.setattr(memory, "dist", TwoNodes())
    image = plan_image(held.parts())
    theirs = WrittenPart(FileDigest(file_name(1), image.bytes + 8, ""), image.entries(file_name(1)))
    monkeypatch.setattr(memory, "gather_json", lambda own, read: [read(json.loads(json.dumps(own))), theirs])
    for rank in range(2):
        keep_part(nodes[0], 1, rank, step=4)
    copies = memory.MemoryCopies(nodes[0], image, CPU)
    buffer = copies.open(1)
    assert sorted(path.name for path in nodes[0].slot(1).iterdir()) == [file_name(0), file_name(1)]
    assert [(nodes[0].slot(1) / file_name(rank)).stat().st_size for rank in range(2)] == [image.bytes, image.bytes + 8]
    assert bytes(buffer[: len(image.header)].tolist()) == image.header
    assert copies.open(1) is buffer
