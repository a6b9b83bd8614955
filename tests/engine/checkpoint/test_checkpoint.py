"""Checkpoints of a small model in this process; killed and resumed runs are in tests/integration."""

import contextlib
import hashlib
import json
import os
import resource
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lab.problems import raises
from lab.waiting import PATIENCE_S
from safetensors import safe_open

from trainspec_cli.balance.batch.batch import BatchPace, NoiseAverage
from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import MachineError, RecipeError, WorkerError
from trainspec_cli.engine.checkpoint import files, manifest, saver
from trainspec_cli.engine.checkpoint import saver as store
from trainspec_cli.engine.checkpoint.files import Held, TensorPart, choose_owners, rng_parts
from trainspec_cli.engine.checkpoint.manifest import (
    MANIFEST,
    About,
    CheckpointManifest,
    Chunk,
    TensorEntry,
    read_manifest,
)
from trainspec_cli.engine.checkpoint.memory import plan_image
from trainspec_cli.engine.checkpoint.saver import (
    Saver,
    files_needed,
    fill_parts,
    load_newest,
    load_weights,
    read_weights,
)
from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir

CPU = torch.device("cpu")
NAME = "rank00000.safetensors"
pytestmark = pytest.mark.usefixtures("one_process")


def trained(steps: int = 3, lr: float = 0.1, width: int = 7) -> Held:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))
    shares = [Share(name, parameter) for name, parameter in model.named_parameters()]
    optimizer = build_optimizer(shares, OptimSpec(lr=lr))
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        guarded_update(optimizer, shares, torch.tensor(1.0), torch.tensor(1.0), None)
    return Held(shares, [model], optimizer)


def about(step):
    return About(step, samples=step * 4, seed=1, recipe_digest="d")


def save(run_dir, held, *steps, keep_last=2):
    made = Saver(run_dir, held, CPU, keep_last)
    return [made.save(about(step)) for step in steps]


def everything(held):
    states = held.optimizer.state.values()
    return [*held.modules[0].state_dict().values(), *(t for s in states for t in s.values())]


def assert_equal(ours, theirs):
    for one, other in zip(everything(ours), everything(theirs), strict=True):
        assert torch.equal(one, other)


def test_everything_comes_back_bit_for_bit(tmp_path):
    held = trained()
    pace = BatchPace(12, NoiseAverage(trace=0.1 + 0.2, square=-1e-17, weight=1 / 3))
    saved = Saver(RunDir(tmp_path), held, CPU, 2).save(replace(about(3), pace=pace))
    expected_random = torch.randn(3)
    other = trained(1)
    found = load_newest(RunDir(tmp_path), other, CPU).manifest
    assert (found.step, found.about.samples, found.about.pace, found.bytes) == (3, 12, pace, saved.bytes)
    assert found.bytes == sum(path.stat().st_size for path in RunDir(tmp_path).checkpoint(3).glob("rank*"))
    assert_equal(other, held)
    assert torch.equal(torch.randn(3), expected_random), "the random generator continues where it was"


def test_each_rank_writes_the_state_of_its_own_random_generator():
    every = [rng_parts(rank, CPU) for rank in range(3)]
    owners = choose_owners([{(part.name, part.offsets): part.bytes for part in parts} for parts in every])
    assert [{owners[part.name, part.offsets] for part in parts} for parts in every] == [{0}, {1}, {2}]


def test_a_fresh_optimizer_without_state_takes_it(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    other = trained(0, lr=0.7)
    load_newest(RunDir(tmp_path), other, CPU)
    assert len(other.optimizer.state) == 6
    assert all(state["step"] == 3 for state in other.optimizer.state.values())
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.7}, (
        "the rate is the recipe's, not the checkpoint's"
    )


@pytest.mark.clause("RUN-8")
def test_its_files_are_safetensors_and_json_and_hold_no_pickle(tmp_path):
    held = trained()
    save(RunDir(tmp_path), held, 3)
    folder = RunDir(tmp_path).checkpoint(3)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, NAME]
    with safe_open(folder / NAME, framework="pt") as file:
        assert torch.equal(file.get_tensor("model.0.weight"), held.modules[0][0].weight)
        assert file.get_tensor("model.1.num_batches_tracked").dtype == torch.int64


@pytest.mark.clause("RUN-9")
@pytest.mark.parametrize("way", ["save", "begin"])
def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, disk_calls, way):
    """Tensors, then the manifest, then the folder; after the rename also the folder above."""
    made = Saver(RunDir(tmp_path), trained(), CPU, keep_last=2)
    if way == "save":
        made.save(about(3))
    else:
        made.begin(about(3))
        made.wait()
    (folder,) = {name for _, name in disk_calls if name.startswith(".step_")}
    before = disk_calls[: disk_calls.index(("rename", "step_00000003"))]
    renamed = disk_calls[len(before) :]
    assert before[0] == ("fsync", NAME)
    assert before.index(("rename", "rank00000.json")) < before.index(("rename", MANIFEST)) < len(before) - 1
    assert before[-1] == ("fsync", folder)
    assert renamed == [("rename", "step_00000003"), ("fsync", "checkpoints")]


def with_tied_copy(held, name="2.weight"):
    """Add a second copy of a parameter with its own optimizer state, as on a rank with the first and last stage."""
    (share,) = (share for share in held.shares if share.name == name)
    copy = torch.nn.Linear(*reversed(share.full_shape), bias=False)
    shares = [Share(name, copy.weight), *held.shares]
    return Held(shares, held.modules, build_optimizer(shares, OptimSpec(lr=0.1))), shares[0]


@pytest.mark.parametrize("what", ["everything", "weights"])
def test_both_copies_of_a_tied_parameter_are_loaded(tmp_path, what):
    saved = trained()
    save(RunDir(tmp_path), saved, 3)
    expected = next(share.local for share in saved.shares if share.name == "2.weight")
    held, copy = with_tied_copy(trained(1))
    assert not torch.equal(copy.local, expected)
    if what == "weights":
        load_weights(RunDir(tmp_path).checkpoint(3), held)
    else:
        load_newest(RunDir(tmp_path), held, CPU)
        state, original = held.optimizer.state[copy.local], saved.optimizer.state[expected]
        assert state.keys() == original.keys() and all(torch.equal(state[key], original[key]) for key in state)
        assert state["exp_avg"].any()
    assert torch.equal(copy.local, expected)
    assert all(torch.equal(share.local, expected) for share in held.shares if share.name == "2.weight")


def test_the_last_ones_are_kept_and_what_a_killed_save_left_is_cleared(tmp_path):
    run_dir = RunDir(tmp_path)
    held = trained()
    assert load_newest(run_dir, held, CPU) is None, "no checkpoint is no error"
    (run_dir.checkpoints / ".step_00000003.killed.partial").mkdir(parents=True)
    (run_dir.checkpoints / ".step_00000003.killed.partial" / "rank00000.json").write_text("{}")
    save(run_dir, held, 1, 2, 3)
    assert run_dir.checkpoint_steps() == [2, 3]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_00000002", "step_00000003"]


# Damage


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def leave_a_link(path):
    elsewhere = path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(elsewhere)


@pytest.mark.clause("RUN-8")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, "sha256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "bytes, but"),
        (lambda path: path.unlink(), "is missing"),
        (leave_a_link, "is a link"),
    ],
    ids=["altered", "truncated", "missing", "link"],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage, words):
    run_dir = RunDir(tmp_path)
    save(run_dir, trained(), 3)
    damage(run_dir.checkpoint(3) / NAME)
    with pytest.raises(MachineError) as caught:
        load_newest(run_dir, trained(), CPU)
    message = str(caught.value)
    assert f"step_00000003/{NAME}" in message
    assert words in message
    assert "remove the folder" in caught.value.problems[0].hint


def with_more_files(folder, ranks):
    """Append files of other ranks, whose tensors are not needed here, to a checkpoint of one rank."""
    names = [files.file_name(rank) for rank in range(1, ranks)]
    digests = [files.write_file(folder / name, [memoryview(name.encode())]) for name in names]
    rewrite(folder, world_size=ranks, files=(*read_manifest(folder).files, *digests))
    return [folder / name for name in names]


@pytest.mark.parametrize("damaged", [1, 2])
def test_files_of_other_ranks_are_verified_too(tmp_path, damaged):
    save(RunDir(tmp_path), trained(), 3)
    others = with_more_files(RunDir(tmp_path).checkpoint(3), ranks=3)
    load_newest(RunDir(tmp_path), trained(), CPU)
    flip_a_bit(others[damaged - 1])
    with pytest.raises(MachineError, match=f"rank0000{damaged}.safetensors was altered"):
        load_newest(RunDir(tmp_path), trained(), CPU)


@pytest.mark.parametrize("damaged", range(5))
def test_the_ranks_verify_every_file_once_between_them(tmp_path, monkeypatch, damaged):
    """Each rank alone, without the others' errors: exactly one of two finds the damage."""
    save(RunDir(tmp_path), trained(), 3)
    folder = RunDir(tmp_path).checkpoint(3)
    flip_a_bit([folder / NAME, *with_more_files(folder, ranks=5)][damaged])
    monkeypatch.setattr(store, "_restore", lambda *arguments: None)
    found = []
    for rank in range(2):
        ranks = SimpleNamespace(get_rank=lambda rank=rank: rank, get_world_size=lambda: 2)
        monkeypatch.setattr(store, "dist", ranks)
        with contextlib.suppress(MachineError):
            load_newest(RunDir(tmp_path), trained(), CPU)
            continue
        found.append(rank)
    assert found == [damaged % 2]


@pytest.mark.clause("RUN-8")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "trainspec.checkpoint/9"}, "not trainspec.checkpoint/2"),
        ({"schema": "trainspec.checkpoint/1"}, "an earlier version"),
        ({"world_size": 7}, "it was altered"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused_by_name(tmp_path, change, words):
    run_dir = RunDir(tmp_path)
    save(run_dir, trained(), 3)
    path = run_dir.checkpoint(3) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(MachineError, match=rf"manifest\.json .*{words}"):
        read_manifest(run_dir.checkpoint(3))


def test_another_models_checkpoint_is_refused_by_the_tensors_name(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    with raises(MachineError, "bad_checkpoint", "model.0.weight is F32 [7, 5]", "F32 [9, 5]"):
        load_newest(RunDir(tmp_path), trained(width=9), CPU)


# Parts that do not lie as they were saved


def test_parts_are_read_from_whatever_chunks_cover_them(tmp_path):
    full = torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8)
    pieces = {"a": full[:4, :3], "b": full[:4, 3:], "c": full[4:]}
    offsets = {"a": (0, 0), "b": (0, 3), "c": (4, 0)}
    for name, piece in pieces.items():
        image = plan_image([TensorPart("w", piece, offsets[name], (6, 8))])
        files.write_file(tmp_path / name, image.stream(image.parts))
    chunks = tuple(Chunk(name, offsets[name], tuple(piece.shape)) for name, piece in pieces.items())
    whole = CheckpointManifest(about(1), 3, (), {"w": TensorEntry((6, 8), "F32", chunks)})
    for rows, columns in ((slice(0, 6), slice(0, 8)), (slice(3, 5), slice(2, 6)), (slice(5, 6), slice(0, 1))):
        wanted = full[rows, columns]
        part = TensorPart("w", torch.zeros(wanted.shape), (rows.start, columns.start), (6, 8))
        fill_parts(tmp_path, whole, [part])
        assert torch.equal(part.tensor, wanted)
    holed = CheckpointManifest(about(1), 3, (), {"w": TensorEntry((6, 8), "F32", chunks[:2])})
    with raises(MachineError, "bad_checkpoint", "only 8 of the 16"):
        fill_parts(tmp_path, holed, [TensorPart("w", torch.zeros(2, 8), (3, 0), (6, 8))])


def test_every_part_has_one_owner_and_bytes_are_shared_out():
    copies = {("embed", (0,)): 100, ("head", (0,)): 60, ("norm", (0,)): 40}
    held = [copies | {("own", (rank,)): 10} for rank in range(2)]
    owners = choose_owners(held)
    assert {owners["own", (rank,)] for rank in range(2)} == {0, 1}
    loads = [sum(held[rank][place] for place, owner in owners.items() if owner == rank) for rank in range(2)]
    assert loads == [110, 110]


# While training goes on


def test_a_copy_is_written_while_training_goes_on(tmp_path):
    run_dir, held = RunDir(tmp_path), trained()
    before = [tensor.clone() for tensor in everything(held)]
    made = Saver(run_dir, held, CPU, keep_last=2)
    made.begin(about(3))
    with torch.no_grad():
        for tensor in everything(held):
            tensor.add_(1)
    saved = made.wait()
    assert (saved.about.step, saved.error) == (3, None)
    assert saved.blocked_s <= saved.written_s
    assert made.take_finished() is None, "told once"
    other = trained(1)
    load_newest(run_dir, other, CPU)
    for found, expected in zip(everything(other), before, strict=True):
        assert torch.equal(found, expected)


def test_it_is_busy_until_the_disk_has_it_and_the_last_one_stays_whole(tmp_path, monkeypatch):
    """A slow disk: the flush waits for `release`."""
    run_dir, release, sync = RunDir(tmp_path), threading.Event(), os.fsync
    made = Saver(run_dir, trained(), CPU, keep_last=2)
    made.save(about(1))
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: (release.wait(PATIENCE_S), sync(descriptor)))
    made.begin(about(2))
    time.sleep(0.1)
    assert made.busy
    assert made.take_finished() is None
    assert run_dir.checkpoint_steps() == [1]
    release.set()
    assert made.wait().error is None
    assert run_dir.checkpoint_steps() == [1, 2]


@contextlib.contextmanager
def full_disk(largest_bytes=2000):
    """No file may grow beyond 2 kB: a real error of the kernel, as on a full disk. Not a fixture: pytest writes a
    test's letter before fixtures end, perhaps into a file that is longer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("way", ["save", "begin"])
def test_what_cannot_be_written_is_told_and_the_one_before_it_stays(tmp_path, way):
    run_dir, held = RunDir(tmp_path), trained()
    made = Saver(run_dir, held, CPU, keep_last=1)
    made.save(about(1))
    with full_disk():
        saved = made.save(about(2)) if way == "save" else (made.begin(about(2)), made.wait())[1]
    assert "checkpoint of step 2 " in str(saved.error) and "rank 0: File too" in str(saved.error)
    assert run_dir.checkpoint_steps() == [1]
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_00000001"], "nothing half-written stays"
    load_newest(run_dir, held, CPU)


def test_a_folder_that_cannot_be_made_ends_the_checkpoint_at_once(tmp_path):
    """Nobody could report there, so nobody is waited for."""
    run_dir, held = RunDir(tmp_path), trained()
    run_dir.checkpoints.write_text("a file in its place")
    saved = Saver(run_dir, held, CPU, keep_last=1).save(about(2))
    assert "checkpoint of step 2 " in str(saved.error) and " rank 0: " in str(saved.error)


def test_rank_0_waits_for_the_others_parts(tmp_path):
    """Two ranks' threads, without any collective between them."""
    run_dir = RunDir(tmp_path)
    partial = files.partial_folder(run_dir, 5, "token")
    partial.mkdir(parents=True)

    def part(rank):
        image = plan_image([TensorPart("w", torch.full((2,), rank), (2 * rank,), (4,))])
        digest = files.write_file(partial / files.file_name(rank), image.stream(image.parts))
        files.leave_part(partial, rank, manifest.WrittenPart(digest, image.entries(files.file_name(rank))))

    part(0)
    late = threading.Timer(0.1, part, [1])
    late.start()
    whole = files.commit(run_dir, partial, about(5), world_size=2, keep_last=1)
    late.join()
    assert [chunk.offsets for chunk in whole.tensors["w"].chunks] == [(0,), (2,)]
    assert whole == read_manifest(run_dir.checkpoint(5))


def test_a_rank_that_failed_fails_the_whole(tmp_path):
    run_dir = RunDir(tmp_path)
    partial = files.partial_folder(run_dir, 5, "token")
    partial.mkdir(parents=True)
    for rank in (0, 1):
        files.leave_failure(partial, rank, OSError(28, "No space left on device"))
    with raises(MachineError, "cannot_save", "rank 0: No space left", "; rank 1: No space left"):
        files.commit(run_dir, partial, about(5), world_size=2, keep_last=1)
    assert not partial.exists()


def test_the_writer_steps_back_for_training(tmp_path):
    made = Saver(RunDir(tmp_path), trained(), CPU, keep_last=1)
    thread = made._thread.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert thread.result() == min(saver.MOST_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + saver.WRITER_NICENESS)


def spoil(held, tensor, value):
    with torch.no_grad():
        tensor.view(-1)[2:4] = value
    return held


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (lambda held: held.shares[0].local, "model.0.weight"),
        (lambda held: held.modules[0][1].running_var, "model.1.running_var"),
        (lambda held: held.optimizer.state[held.shares[0].local]["exp_avg"], "optimizer.state.0.weight.exp_avg"),
    ],
    ids=["weight", "buffer", "moment"],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_by_name_and_number(tmp_path, of, name, value):
    held = trained()
    save(RunDir(tmp_path), spoil(held, of(held), value), 3)
    folder = RunDir(tmp_path).checkpoint(3)
    with pytest.raises(MachineError) as raised:
        load_newest(RunDir(tmp_path), trained(1), CPU)
    (problem,) = raised.value.problems
    assert f"{folder / NAME} holds 2 values" in problem.message and problem.message.endswith(f" {name}")
    assert problem.code == "bad_checkpoint" and f"remove the folder {folder} " in problem.hint


def test_a_part_is_refused_with_the_number_in_its_whole_file(tmp_path):
    held = trained()
    save(RunDir(tmp_path), spoil(held, held.shares[0].local, torch.nan), 3)
    folder, full = RunDir(tmp_path).checkpoint(3), (7, 5)
    whole = read_manifest(folder)
    fill_parts(folder, whole, [TensorPart("model.0.weight", torch.zeros(6, 5), (1, 0), full)])
    with pytest.raises(MachineError, match="holds 2 values"):
        fill_parts(folder, whole, [TensorPart("model.0.weight", torch.zeros(7, 2), (0, 3), full)])


def test_a_run_may_have_seen_more_samples_than_a_recipe_may_ask_for(tmp_path):
    """The limits of a recipe's numbers, by their names, are not those of what a run counts."""
    folder = RunDir(tmp_path).checkpoint(3)
    save(RunDir(tmp_path), trained(), 3)
    rewrite(folder, about=replace(read_manifest(folder).about, samples=5 * 10**12))
    assert read_manifest(folder).about.samples == 5 * 10**12


@pytest.mark.parametrize("name", ["../rank00000.safetensors", "/etc/passwd", "rank0.safetensors", "", 7])
def test_a_manifest_names_files_of_its_own_folder_alone(tmp_path, name):
    told = {"name": name, "bytes": 1, "sha256": "0"}
    with pytest.raises((ValueError, TypeError, RecipeError)):
        manifest.part_from({"file": told, "tensors": {}})
    told = {"name": "rank00000.safetensors", "bytes": 1, "sha256": "0"}
    manifest.part_from({"file": told, "tensors": {}})
    chunk = {"file": name, "offsets": [0], "shape": [1]}
    with pytest.raises((ValueError, TypeError, RecipeError)):
        manifest.part_from({"file": told, "tensors": {"w": {"shape": [1], "dtype": "F32", "chunks": [chunk]}}})


# Names


def rewrite(folder, **changes):
    """A manifest whose own digest is right."""
    manifest.write_manifest(folder, replace(read_manifest(folder), **changes))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "..", "", "a/../../outside"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
    save(RunDir(tmp_path), trained(), 3)
    folder = RunDir(tmp_path).checkpoint(3)
    content = (folder / NAME).read_bytes()
    (folder.parent / "outside.safetensors").write_bytes(content)
    moved = {
        key: replace(entry, chunks=tuple(replace(chunk, file=name) for chunk in entry.chunks))
        for key, entry in read_manifest(folder).tensors.items()
    }
    digests = tuple(replace(digest, name=name) for digest in read_manifest(folder).files)
    rewrite(folder, tensors=moved, files=digests)
    with raises(MachineError, "bad_checkpoint", "outside of its folder"):
        load_newest(RunDir(tmp_path), trained(), CPU)


def test_a_part_in_a_file_without_a_digest_is_refused(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    folder = RunDir(tmp_path).checkpoint(3)
    (folder / "rank00007.safetensors").write_bytes((folder / NAME).read_bytes())
    moved = {
        key: replace(entry, chunks=tuple(replace(chunk, file="rank00007.safetensors") for chunk in entry.chunks))
        for key, entry in read_manifest(folder).tensors.items()
    }
    rewrite(folder, tensors=moved)
    with raises(MachineError, "bad_checkpoint", "not list, 'rank00007.safetensors'"):
        read_weights(folder, {"0.weight": (7, 5)})


# What else may be wrong


def test_a_tensor_that_the_checkpoint_lacks_is_named(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    whole = read_manifest(RunDir(tmp_path).checkpoint(3))
    with raises(MachineError, "bad_checkpoint", "not contain model.other", "different model"):
        fill_parts(tmp_path, whole, [TensorPart.whole("model.other", torch.zeros(2))])


@pytest.mark.parametrize("content", [b"", b"\xff" * 100])
def test_a_file_that_is_not_safetensors_is_refused_by_name(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    entry = TensorEntry((2,), "F32", (Chunk(NAME, (0,), (2,)),))
    whole = CheckpointManifest(about(1), 1, (), {"w": entry})
    with pytest.raises(MachineError, match=f"checkpoint refused: .*{NAME} cannot be read"):
        fill_parts(tmp_path, whole, [TensorPart.whole("w", torch.zeros(2))])


@pytest.mark.parametrize(
    ("offsets", "shape", "full"),
    [([-1], [1], [1]), ([0], [-1], [1]), ([0], [1], [-1]), ([0, 0], [3, -2], [3, 2])],
)
def test_a_negative_size_is_refused(offsets, shape, full):
    chunk = {"file": NAME, "offsets": offsets, "shape": shape}
    tensors = {"w": {"shape": full, "dtype": "F32", "chunks": [chunk]}}
    with pytest.raises(ValueError, match="is negative"):
        manifest.part_from({"file": {"name": NAME, "bytes": 1, "sha256": "0"}, "tensors": tensors})


def test_the_files_that_hold_some_of_the_parts_are_needed_and_no_others():
    chunks = tuple(Chunk(files.file_name(rank), (2 * rank, 0), (2, 4)) for rank in range(3))
    scalar = TensorEntry((), "F32", (Chunk(files.file_name(5), (), ()),))
    whole = CheckpointManifest(about(1), 3, (), {"w": TensorEntry((6, 4), "F32", chunks), "step": scalar})
    rows = TensorPart("w", torch.zeros(2, 4), (3, 0), (6, 4))
    assert files_needed(whole, [rows]) == {files.file_name(1), files.file_name(2)}
    assert files_needed(whole, [TensorPart("w", torch.zeros(2, 4), (2, 0), (6, 4))]) == {files.file_name(1)}
    count = TensorPart.whole("step", torch.zeros(()))
    assert files_needed(whole, [count, TensorPart.whole("new", torch.zeros(2))]) == {files.file_name(5)}


def test_tensors_come_in_the_order_of_their_names_and_without_empty_ones():
    unsorted = (("b", 4, 1), ("a", 2, 2), ("c", 0, 0), ("a", 0, 3))
    parts = [TensorPart(name, torch.zeros(size), (offset,), (9,)) for name, offset, size in unsorted]
    held = Held([], [], None, lost=parts)
    assert [tensor.numel() for tensor in held.tensors()] == [3, 2, 1]
    assert [part.name for part in held.parts()] == ["b", "a", "a"]


@pytest.mark.parametrize("token", ["", "0123456", "0123456g", "../../ab", "0123456789"])
def test_a_token_is_a_hexadecimal_number(token):
    assert saver._read_token("0123abcd") == "0123abcd"
    with pytest.raises(ValueError, match="not a hexadecimal number"):
        saver._read_token(token)


def test_a_rank_that_never_reports_counts_as_failed(tmp_path, monkeypatch):
    """Time passes as rank 0 sleeps."""
    now = [50.0]
    stand_in = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 100.0))
    monkeypatch.setattr(files, "time", stand_in)
    files.write_json(tmp_path / "rank00000.failed.json", {"rank": 0, "message": "no room"})
    (tmp_path / "rank00001.json").touch()
    found = files._await_parts(tmp_path, 4)
    assert found[0] == "rank 0: no room" and found[1].startswith("rank 2 ") and "1800 s" in found[1] and len(found) == 2
    assert 1850.0 < now[0] < 2000.0


def test_what_cannot_be_published_leaves_nothing_half_written(tmp_path, monkeypatch):
    run_dir, held = RunDir(tmp_path), trained()
    save(run_dir, held, 1)

    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_manifest", no_room)
    (saved,) = save(run_dir, held, 2)
    assert isinstance(saved.error, MachineError)
    (problem,) = saved.error.problems
    assert problem.code == "cannot_save"
    assert "checkpoint of step 2 " in problem.message and problem.message.endswith("rank 0: No space left on device")
    assert "checkpoint.keep_last" in problem.hint
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("way", ["save", "begin", "commit"])
def test_a_worker_of_an_older_start_publishes_nothing(tmp_path, monkeypatch, way):
    run_dir = RunDir(tmp_path)
    monkeypatch.setenv(GENERATION, str(generations.begin(run_dir)))
    made = Saver(run_dir, trained(), CPU, keep_last=2)
    if way == "commit":
        newer = files.leave_part
        monkeypatch.setattr(files, "leave_part", lambda *part: (newer(*part), generations.begin(run_dir)))
    else:
        generations.begin(run_dir)
    with raises(WorkerError, generations.FENCED, "start 2 owns"):
        made.save(about(3)) if way != "begin" else (made.begin(about(3)), made.wait())
    assert run_dir.checkpoint_steps() == []


def test_an_image_holds_the_widest_elements_first_each_aligned(tmp_path):
    parts = [
        TensorPart.whole("flag", torch.tensor([True, False, True])),
        TensorPart.whole("b", torch.arange(3, dtype=torch.bfloat16)),
        TensorPart.whole("count", torch.tensor(7)),
        TensorPart.whole("a", torch.arange(3, dtype=torch.bfloat16)),
    ]
    image = plan_image(parts)
    assert [part.name for part in image.parts] == ["count", "a", "b", "flag"]
    assert len(image.header) % 8 == 0
    assert image.starts == tuple(len(image.header) + offset for offset in (0, 8, 14, 20))
    assert image.bytes == len(image.header) + 23
    buffer = torch.zeros(image.bytes, dtype=torch.uint8)
    image.put_header(buffer)
    image.fill(buffer, image.parts)
    assert bytes(buffer.tolist()) == b"".join(bytes(view) for view in image.stream(image.parts))
    digest = files.write_file(tmp_path / "x", image.stream(image.parts))
    assert digest == manifest.digest_file(tmp_path / "x") and digest.bytes == image.bytes
    with safe_open(tmp_path / "x", framework="pt") as file:
        found = {part.name: file.get_tensor(part.name).tolist() for part in parts}
    assert found == {"count": 7, "a": [0.0, 1.0, 2.0], "b": [0.0, 1.0, 2.0], "flag": [True, False, True]}
    (entry,) = plan_image([TensorPart("w", torch.zeros(2, 3), (4, 0), (8, 3))]).entries("f").values()
    assert entry == TensorEntry((8, 3), "F32", (Chunk("f", (4, 0), (2, 3)),))


def test_a_large_file_is_written_in_pieces_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 7)
    content = bytes(range(100))
    digest = files.write_file(tmp_path / "x", [memoryview(content[:40]), memoryview(content[40:])])
    assert (tmp_path / "x").read_bytes() == content
    assert (digest.name, digest.bytes, digest.sha256) == ("x", 100, hashlib.sha256(content).hexdigest())


def test_generators_are_restored_only_by_the_same_number_of_ranks(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    rewrite(RunDir(tmp_path).checkpoint(3), world_size=2)
    held = trained(3)
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    load_newest(RunDir(tmp_path), held, CPU)
    assert torch.equal(torch.randn(3), expected)


def test_weights_alone_leave_the_optimizer_as_it_is_and_new_adapters_too(tmp_path):
    saved = trained()
    save(RunDir(tmp_path), saved, 3)
    held = trained(1)
    moments = [held.optimizer.state[share.local]["exp_avg"].clone() for share in held.shares]
    adapter = Share("0.lora_a", torch.nn.Parameter(torch.full((2, 2), 9.0)))
    load_weights(RunDir(tmp_path).checkpoint(3), Held([*held.shares, adapter], held.modules, held.optimizer))
    for name in ("0.weight", "1.running_var"):
        assert torch.equal(held.modules[0].state_dict()[name], saved.modules[0].state_dict()[name])
    for share, before in zip(held.shares, moments, strict=True):
        assert torch.equal(held.optimizer.state[share.local]["exp_avg"], before)
    assert adapter.local.eq(9.0).all()
    whole = read_weights(RunDir(tmp_path).checkpoint(3), {"0.weight": (7, 5)})
    assert whole.keys() == {"0.weight"} and torch.equal(whole["0.weight"], saved.modules[0][0].weight)
    other = Share("0.gate", torch.nn.Parameter(torch.zeros(2, 2)))
    with raises(MachineError, "bad_checkpoint", "not contain model.0.gate"):
        load_weights(RunDir(tmp_path).checkpoint(3), Held([*held.shares, other], held.modules, held.optimizer))


def with_feedback(held, **feedback):
    return replace(held, feedback={f"feedback.{name}": tensor for name, tensor in feedback.items()})


def test_error_feedback_comes_back_to_the_layout_that_it_is_of_alone(tmp_path):
    lost = torch.tensor([0.5, -3.0], dtype=torch.bfloat16)
    save(RunDir(tmp_path), with_feedback(trained(), rank0=lost, rank1=lost), 3)
    held = with_feedback(
        trained(1), rank0=torch.zeros_like(lost), rank1=lost.new_ones(3), other_layout=lost.new_ones(2)
    )
    restored = load_newest(RunDir(tmp_path), held, CPU)
    assert restored.feedback == 1, "of three"
    assert [tensor.tolist() for tensor in held.feedback.values()] == [[0.5, -3.0], [1.0] * 3, [1.0] * 2]
    assert load_newest(RunDir(tmp_path), trained(1), CPU).feedback == 0, "a run without compression reads it too"
    assert not any(part.name.startswith("feedback") for part in held.parts()), "it moves to no other layout or group"


def test_a_manifest_of_a_version_that_kept_no_pace_has_none(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    folder = RunDir(tmp_path).checkpoint(3)
    content = read_json(folder / "manifest.json")
    assert content["about"].pop("pace") is None
    content.pop("sha256")
    write_json(folder / "manifest.json", content | {"sha256": manifest._digest(content)})
    assert read_manifest(folder).about == about(3)
