"""Which replica group's parameters differ."""

import hashlib
import struct

import pytest
import torch
from torch import nn

from trainspec_cli.engine.digest import _read_digests, diverging_groups, local_digest, weights_sha256
from trainspec_cli.engine.shares import Share


@pytest.mark.parametrize(
    ("digests", "diverging"),
    [
        ([5, 5, 5], []),
        ([5, 7, 5], [1]),
        ([5, 7], [0, 1]),
        ([5, 7, 8, 5], [1, 2]),
        ([5, 5, 7, 7], [0, 1, 2, 3]),
        ([], []),
    ],
)
def test_the_minority_diverges(digests: list[int], diverging: list[int]) -> None:
    assert diverging_groups([torch.tensor([value]) for value in digests]) == diverging


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_any_one_bit_changes_the_digest(bit: int) -> None:
    share = Share("weight", nn.Parameter(torch.randn(16, 8)))
    before = int(local_digest([share]))
    words = share.local.detach().view(torch.int32).flatten()
    words[77] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert int(local_digest([share])) != before


def test_bits_are_summed_as_whole_numbers_without_overflow() -> None:
    """1.0 is 0x3f800000; parts without elements count nothing."""
    ones, empty = Share("a", nn.Parameter(torch.ones(40))), Share("b", nn.Parameter(torch.empty(0, 3)))
    assert int(local_digest([ones, empty, ones])) == 80 * 0x3F800000
    assert local_digest([empty]).tolist() == [0]


@pytest.mark.usefixtures("one_process")
def test_weights_have_the_digest_of_their_bytes_in_the_order_of_names() -> None:
    b, a = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]], dtype=torch.bfloat16)
    shares = [Share("b", nn.Parameter(b)), Share("a", nn.Parameter(a)), Share("b", nn.Parameter(b))]
    digests = {"a": hashlib.sha256(b"\x40\x40").hexdigest(), "b": hashlib.sha256(struct.pack("<2f", 1, 2)).hexdigest()}
    text = f"a {digests['a']}\nb {digests['b']}\n"
    assert weights_sha256(shares, torch.distributed.group.WORLD) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("digest", ["", "0" * 63, "G" * 64, "0" * 65])
def test_a_stage_that_sends_no_digest_is_refused(digest: str) -> None:
    assert _read_digests({"w": "a" * 64}) == {"w": "a" * 64}
    with pytest.raises(ValueError, match="not a SHA-256"):
        _read_digests({"w": "a" * 64, "v": digest})
