"""What a pickle describes is read, and nothing that it names is called."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.data.weights.torch_file import Made, as_dict, as_shape, fields_of, read_pickle


class Record:
    def __init__(self) -> None:
        self.name = "x"


class Harmful:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.file),))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", [{"a": [1, -3, 2**70, 1.5, None, True], "b": ((), (1,), (1, 2, 3, 4)), "ü": {}}])
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_a_pickle_would_make_is_a_record_of_it(protocol: int) -> None:
    found = read_pickle(pickle.dumps(Record(), protocol))
    assert fields_of(found, f"{__name__}.Record") == {"name": "x"}
    assert as_dict(read_pickle(pickle.dumps(OrderedDict(a=1), protocol))) == {"a": 1}
    with pytest.raises(ValueError, match="record of Other"):
        fields_of(found, "some.Other")


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_called(protocol: int, tmp_path: Path) -> None:
    content = pickle.dumps(Harmful(tmp_path / "made"), protocol)
    found = read_pickle(content)
    assert isinstance(found, Made)
    assert list(tmp_path.iterdir()) == []
    pickle.loads(content)
    assert list(tmp_path.iterdir()) == [tmp_path / "made"]


@pytest.mark.parametrize(
    "content",
    [b"", b"no pickle", b"\x80\x04.", b"\x80\x04]", b"h\x01.", b"\x80\x04)R.", b"(i__main__\nx\n.", b"\x8a\xff\x01."],
)
def test_what_is_no_pickle_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a readable pickle"):
        read_pickle(content)


@pytest.mark.parametrize("value", [None, "12", (-1, 2), (True,), (2**60,), (1,) * 17, Made("torch.Size", ("x",))])
def test_what_is_no_shape_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a shape"):
        as_shape(value)
