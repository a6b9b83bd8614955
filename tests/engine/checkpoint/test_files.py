"""What each rank leaves in a checkpoint's folder, and what a published one takes away."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from trainspec_cli.engine.checkpoint import files
from trainspec_cli.engine.checkpoint import files as parts
from trainspec_cli.engine.checkpoint import saver as saving
from trainspec_cli.engine.checkpoint.files import Held, TensorPart, kept_buffers, rng_parts, set_rng
from trainspec_cli.engine.checkpoint.manifest import About, WrittenPart
from trainspec_cli.engine.checkpoint.memory import CODES, plan_image
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.cuda_only import pin, unpin
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class OneTensor(Held):
    """A rank that holds one tensor alone."""

    tensor = torch.zeros(3)

    def parts(self) -> list[TensorPart]:
        return [TensorPart.whole("w", self.tensor)]


@pytest.fixture
def held() -> OneTensor:
    OneTensor.tensor = torch.zeros(3)
    return OneTensor([], [], None)  # type: ignore[arg-type]


def about(step: int) -> About:
    return About(step, samples=step, seed=1, recipe_digest="d")


def test_all_bytes_are_with_the_system_when_a_file_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    files.write_file(tmp_path / "x", [memoryview(b"a few bytes"), memoryview(b" more")])
    assert flushed == [16]


def test_a_failed_part_frees_its_space_before_it_is_reported(tmp_path: Path) -> None:
    (tmp_path / files.file_name(2)).write_bytes(b"half")
    files.leave_failure(tmp_path, 2, OSError(28, "the disk is full"))
    files.leave_failure(tmp_path, 3, OSError("no number"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank00002.failed.json", "rank00003.failed.json"]
    assert read_json(tmp_path / "rank00002.failed.json") == {"rank": 2, "message": "the disk is full"}
    assert read_json(tmp_path / "rank00003.failed.json")["message"] == "no number"


def test_a_failure_that_cannot_be_reported_is_no_further_error(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    files.leave_failure(tmp_path / "a file", 0, OSError(28, "No space left on device"))
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_a_failure_is_reported_once_the_other_ranks_have_freed_their_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / files.file_name(1)
    other.write_bytes(b"half")
    real, tries = files.write_json, []

    def write(path: Path, content: object) -> None:
        tries.append(path)
        if len(tries) == 3:
            other.unlink()
        if other.exists():
            raise OSError(errno.ENOSPC, "the disk is full")
        real(path, content)

    monkeypatch.setattr(files, "write_json", write)
    files.leave_failure(tmp_path, 0, OSError(errno.ENOSPC, "the disk is full"))
    assert [path.name for path in tmp_path.iterdir()] == ["rank00000.failed.json"] and len(tries) == 3
    other.write_bytes(b"half")
    monkeypatch.setattr(files, "REPORTING_S", 0.1)
    tries[:] = [tmp_path] * 3
    files.leave_failure(tmp_path, 2, OSError(errno.ENOSPC, "the disk is full"))
    assert not (tmp_path / "rank00002.failed.json").exists(), "it does not try forever"


def test_saves_of_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, second = (files.partial_folder(RunDir(tmp_path), 5, token) for token in ("aaaaaaaa", "bbbbbbbb"))
    assert first != second
    assert first.name == ".step_00000005.aaaaaaaa.partial"
    assert first.parent == RunDir(tmp_path).checkpoint(5).parent


@pytest.mark.usefixtures("one_process")
def test_each_start_saves_under_a_token_of_its_own(
    tmp_path: Path, held: OneTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    publish = files.commit
    monkeypatch.setattr(
        files, "commit", lambda run, folder, *more: seen.append(folder.name) or publish(run, folder, *more)
    )
    for saver in (Saver(RunDir(tmp_path), held, CPU, 2) for _ in range(2)):
        saver.save(about(3))
        saver.begin(about(4))
        saver.wait()
    assert all(re.fullmatch(r"\.step_0000000[34]\.[0-9a-f]{8}\.partial", name) for name in seen)
    tokens = [name.split(".")[2] for name in seen]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


def test_leftovers_of_later_steps_stay(tmp_path: Path) -> None:
    """A save of a later step may be going on."""
    run = RunDir(tmp_path)
    later, same, earlier = (files.partial_folder(run, step, "0badc0de") for step in (6, 5, 4))
    for folder in (later, same, earlier):
        folder.mkdir(parents=True)
    partial = files.partial_folder(run, 5, "token")
    partial.mkdir()
    planned = plan_image([TensorPart.whole("w", torch.ones(2))])
    digest = files.write_file(partial / files.file_name(0), planned.stream(planned.parts))
    files.leave_part(partial, 0, WrittenPart(digest, planned.entries(files.file_name(0))))
    files.commit(run, partial, about(5), world_size=1, keep_last=1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [later.name, "step_00000005"]


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_format_is_one_that_safetensors_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    planned = plan_image([TensorPart.whole("w", tensor)])
    files.write_file(tmp_path / "x", planned.stream(planned.parts))
    with safe_open(tmp_path / "x", framework="pt") as file:
        found = file.get_tensor("w")
    assert found.dtype == dtype and torch.equal(found, tensor)


def test_a_tensor_that_is_not_contiguous_is_written_in_its_own_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    planned = plan_image([TensorPart.whole("w", tensor)])
    files.write_file(tmp_path / "x", planned.stream(planned.parts))
    buffer = torch.zeros(planned.bytes, dtype=torch.uint8)
    planned.put_header(buffer)
    planned.fill(buffer, planned.parts)
    assert bytes(buffer.tolist()) == (tmp_path / "x").read_bytes()
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert torch.equal(file.get_tensor("w"), tensor)


# The saver


@pytest.mark.usefixtures("one_process")
def test_a_save_waits_for_the_one_that_is_being_written(tmp_path: Path, held: OneTensor) -> None:
    saver = Saver(RunDir(tmp_path), held, CPU, keep_last=2)
    saver.begin(about(2))
    saver.save(about(3))
    assert RunDir(tmp_path).checkpoint_steps() == [2, 3]
    assert not saver.busy and saver.take_finished() is None
    saver.begin(about(4))
    saver.close()
    assert RunDir(tmp_path).checkpoint_steps() == [3, 4], "what was begun is whole before the saver is closed"


@pytest.mark.usefixtures("one_process")
def test_what_can_be_prepared_is_not_left_to_the_first_copy(
    tmp_path: Path, held: OneTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr("trainspec_cli.engine.checkpoint.saver.pin", lambda buffer, device: pinned.append(len(buffer)))
    saver = Saver(RunDir(tmp_path), held, CPU, keep_last=2)
    saver.prepare()
    assert len(pinned) == 1
    saver.begin(about(1))
    saver.wait()
    assert len(pinned) == 1
    assert RunDir(tmp_path).checkpoint_steps() == [1]


# What is kept


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.zeros(5), persistent=False)


def test_buffers_that_training_does_not_change_are_not_kept() -> None:
    model = torch.nn.Sequential(Counting(), Counting())
    assert [name for name, _ in kept_buffers(model)] == ["0.seen", "1.seen"]


def test_a_gpus_generator_is_kept_and_set_beside_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[int], torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([7, device.index], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: drawn.append((state.tolist(), device)))
    kept = rng_parts(4, CUDA)
    assert [part.name for part in kept] == ["rng.4.cpu", "rng.4.cuda"]
    expected = torch.randn(2)
    set_rng(kept, CUDA)
    assert torch.equal(torch.randn(2), expected)
    assert drawn == [([7, 1], CUDA)]
    assert [part.name for part in rng_parts(4, CPU)] == ["rng.4.cpu"]
    assert parts.TensorPart.whole("w", torch.zeros(2, 3)).offsets == (0, 0)


def test_a_buffer_is_pinned_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *given: int) -> int:  # noqa: N802
            asked.append(given)
            return 9

        def cudaHostUnregister(self, *given: int) -> int:  # noqa: N802
            asked.append(given)
            return 8

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: asked.append((code,)))
    buffer = torch.zeros(50, dtype=torch.uint8)
    pin(buffer, CPU)
    assert asked == []
    pin(buffer, CUDA)
    assert asked == [(buffer.data_ptr(), 50, 0), (9,)]
    unpin(buffer, CPU)
    unpin(buffer, CUDA)
    assert asked[2:] == [(buffer.data_ptr(),), (8,)]


def test_a_saver_lets_go_of_its_pinned_buffer(
    one_process: None, tmp_path: Path, held: OneTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go: list[int] = []
    monkeypatch.setattr(saving, "unpin", lambda buffer, device: let_go.append(buffer.data_ptr()))
    unused = Saver(RunDir(tmp_path), held, CPU, 2)
    unused.close()
    assert let_go == []
    used = Saver(RunDir(tmp_path), held, CPU, 2)
    used.prepare()
    address = used._buffer.data_ptr()
    used.close()
    assert let_go == [address]


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_of_several_tensors_is_restored_from_their_own_files(tmp_path: Path, held: OneTensor) -> None:
    held.tensor.copy_(torch.tensor([1.0, -2.0, 3.0]))
    Saver(RunDir(tmp_path), held, CPU, 2).save(about(1))
    held.tensor.zero_()
    restored = load_newest(RunDir(tmp_path), held, CPU)
    assert restored is not None and (restored.slot, restored.folder) == (None, RunDir(tmp_path).checkpoint(1))
    assert held.tensor.tolist() == [1.0, -2.0, 3.0]
