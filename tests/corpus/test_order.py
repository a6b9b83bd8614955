from collections import Counter

import numpy as np
import pytest

from trainspec_cli.corpus.order import BLOCK, Mixed
from trainspec_cli.corpus.rows import empty_row


class Numbered:
    """A stream whose row at position p is full of p."""

    def rows(self, positions):
        rows = [empty_row(4, documents=False) for _ in positions]
        for row, position in zip(rows, positions, strict=True):
            row.tokens[:] = position
        return rows

    def counted(self, positions):
        return 4 * len(positions)


def mixed(weights, seed=3) -> Mixed:
    return Mixed([Numbered() for _ in weights], weights, seed)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (1, 1e-9), (1, 1, 1)])
def test_every_stream_has_its_share_of_every_block_and_goes_on_without_gaps(weights):
    mixture = mixed(weights)
    drawn = [mixture.locate(position) for position in range(3 * BLOCK)]
    counts = Counter(stream for stream, _ in drawn)
    for stream, weight in enumerate(weights):
        assert counts[stream] == pytest.approx(3 * BLOCK * weight / sum(weights), abs=6)
        places = sorted(place for of, place in drawn if of == stream)
        assert places == list(range(len(places)))


def test_the_order_is_the_seeds_alone_and_any_position_is_found_at_once():
    mixture, again, other = mixed((2, 1)), mixed((2, 1)), mixed((2, 1), seed=4)
    whole = [mixture.locate(position) for position in range(40)]
    assert [again.locate(position) for position in range(20, 40)] == whole[20:]
    assert [other.locate(position) for position in range(40)] != whole
    first = [stream for stream, _ in whole]
    assert len(set(first[:10])) == 2, "streams are spread, not one after another"


def test_rows_come_from_the_streams():
    mixture = mixed((1, 1))
    positions = np.arange(30, 50)
    values = [int(row.tokens[0]) for row in mixture.rows(positions)]
    assert values == [mixture.locate(position)[1] for position in positions]
    assert mixture.counted(positions) == 80
