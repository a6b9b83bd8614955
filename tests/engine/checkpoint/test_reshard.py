"""The memory of a layout's parts while the state is moved."""

from __future__ import annotations

import torch

from trainspec_cli.engine.checkpoint.files import TensorPart
from trainspec_cli.engine.checkpoint.memory import plan_image, view_bytes
from trainspec_cli.engine.checkpoint.reshard import Storages


def test_memory_is_given_back_and_taken_again_under_the_same_tensors() -> None:
    padded = torch.zeros(12)
    parts = [TensorPart.whole("a", padded[:10]), TensorPart.whole("b", torch.ones(3, 2))]
    storages = Storages(parts)
    storages.give_back(["a", "unknown"])
    assert [part.tensor.untyped_storage().nbytes() for part in parts] == [0, 24]
    storages.take(["a"])
    parts[0].tensor.fill_(2.0)
    assert padded.untyped_storage().nbytes() == 48
    assert padded[:10].sum() == 20
    assert storages.fixed_bytes == 0


def test_memory_that_numpy_shares_stays_and_is_counted() -> None:
    shared = torch.arange(6.0)
    seen = shared.numpy()
    storages = Storages([TensorPart.whole("a", shared), TensorPart.whole("b", torch.ones(2))])
    storages.give_back(["a", "b"])
    storages.take(["a", "b"])
    assert seen.sum() == shared.sum() == 15
    assert storages.fixed_bytes == 24


def test_a_written_checkpoint_leaves_the_memory_of_the_live_tensors_free_to_go() -> None:
    again = torch.arange(4, dtype=torch.float32)
    pieces = list(plan_image([TensorPart.whole("a", again)]).stream([TensorPart.whole("a", again)]))
    assert bytes(pieces[-1]) == bytes.fromhex("000000000000803f0000004000004040")
    assert again.untyped_storage().resizable()


def test_the_bytes_of_a_tensor_keep_it_alive() -> None:
    view = view_bytes(torch.full((1000,), 7, dtype=torch.uint8))
    others = [torch.full((1000,), 9, dtype=torch.uint8) for _ in range(50)]
    assert bytes(view) == b"\x07" * 1000
    assert len(others) == 50
