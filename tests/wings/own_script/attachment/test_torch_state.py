"""Checkpoints of an attached script: complete or absent, checked by their digest, and exact."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from trainspec_cli.wings.own_script.attachment import torch_state


def write(folder: Path, step: int, keep: int = 2) -> Path:
    return torch_state.write_state(folder, step, {"step": step, "tensor": torch.ones(3)}, 1, keep)[0]


def test_the_newest_are_kept_and_read_back(tmp_path) -> None:
    for step in (5, 10, 15, 123456789):
        write(tmp_path, step)
    assert [path.name for path in torch_state.checkpoints_in(tmp_path)] == ["step_00000015", "step_123456789"]
    newest = torch_state.newest_sound(tmp_path)
    assert newest is not None and torch_state.read_state(newest)["step"] == 123456789
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000015", "step_123456789"]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, capsys) -> None:
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    state = newer / torch_state.STATE
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert torch_state.newest_sound(tmp_path) == older
    assert str(newer) in capsys.readouterr().err
    (older / "manifest.json").unlink()
    assert torch_state.newest_sound(tmp_path) is None


def test_a_failed_write_leaves_the_existing_checkpoint(tmp_path, monkeypatch) -> None:
    older = write(tmp_path, 5)

    def fails(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, 10)
    assert list(tmp_path.iterdir()) == [older]


def test_a_repeated_step_replaces_its_checkpoint(tmp_path) -> None:
    before = (write(tmp_path, 5) / torch_state.STATE).stat().st_ino
    assert (write(tmp_path, 5) / torch_state.STATE).stat().st_ino != before
    assert len(list(tmp_path.iterdir())) == 1


def test_random_numbers_continue_from_the_saved_state(tmp_path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.normal()), float(torch.randn(()))]

    draw()  # numpy keeps the second normal number of a pair
    torch.save(torch_state.random_state(), tmp_path / "random.pt")
    expected = draw()
    torch_state.set_random_state(torch.load(tmp_path / "random.pt", weights_only=True))
    assert draw() == expected


def test_a_restored_model_optimizer_and_scheduler_are_exact() -> None:
    def make() -> torch_state.Trained:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        return torch_state.Trained(
            model, optimizer, {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])}
        )

    def step(trained: torch_state.Trained) -> None:
        trained.model(torch.ones(2, 4)).square().mean().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        trained.others["scheduler"].step()

    one, other = make(), make()
    step(one)
    other.restore(copy.deepcopy(one.state()))
    for trained in (one, other):
        step(trained)
        step(trained)
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
