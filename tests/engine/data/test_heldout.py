"""The loss on held-out text, of several sets together."""

import math

import pytest

from trainspec_cli.engine.data.loader import HeldoutLoss, total


def test_bits_per_byte_of_all_sets_need_the_bytes_of_each():
    a, b, unknown = HeldoutLoss(6.0, 3, 2), HeldoutLoss(2.0, 1, 6), HeldoutLoss(2.0, 1, 0)
    assert total([a, b]) == HeldoutLoss(8.0, 4, 8)
    assert total([a, b]).nats_per_token == 2.0
    assert total([a, b]).bits_per_byte == pytest.approx(1 / math.log(2))
    assert total([a, unknown]) == HeldoutLoss(8.0, 4, 0)
    assert total([a, unknown]).bits_per_byte is None


def test_bits_per_byte_are_nats_over_ln_2_and_bytes():
    loss = HeldoutLoss(nats=12 * math.log(2), tokens=4, bytes=3)
    assert loss.bits_per_byte == pytest.approx(4.0)
    assert loss.nats_per_token == pytest.approx(3 * math.log(2))
    assert HeldoutLoss(0.0, 0, 0).nats_per_token == 0.0
