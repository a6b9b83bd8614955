"""Three real ranks tell one another JSON; what one of them spoils is refused by all, and they stay in step."""

import json
from pathlib import Path

import pytest
from lab.problems import raises
from lab.ranks import outputs

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.comm.json_collectives import MAX_BYTES, _check_length

WORKER = Path(__file__).parent / "json_worker.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """-> told(case): what each rank got of it."""
    rendezvous = tmp_path_factory.mktemp("json") / "rendezvous"
    printed = outputs(WORKER, [(rank, rendezvous) for rank in range(3)])
    return lambda case: [json.loads(text)[case] for text in printed]


@pytest.mark.parametrize(
    ("case", "value"),
    [
        ("unequal lengths", [0, 70_000, 140_000]),
        ("empty", [None, "", {}]),
        ("unicode", ["é", "数値 🧪", "a\udcff\n"]),
        ("tuples and keys", [{"at": [rank, 2.5], "7": True} for rank in range(3)]),
        ("broadcast", {"of": 2}),
        ("not JSON elsewhere", "told"),
        ("afterwards", [0, 1, 2]),
    ],
)
def test_every_rank_gets_what_was_told(told, case, value):
    assert told(case) == [value] * 3


def test_groups_tell_in_their_own_order(told):
    of_ends = [["of 0", "of 2"], "from 2"]
    assert told("groups") == [of_ends, None, of_ends]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no UTF-8", "'utf-8' codec"),
        ("no JSON", "Expecting property name"),
        ("a pickle", "'utf-8' codec"),
        ("NaN", "NaN is"),
        ("deep nesting", "cannot be read"),
        ("another type", "WrongValueError"),
        ("length 0", " 0 bytes; from 1 to 67,108,864"),
        ("length -5", " -5 bytes;"),
        ("length 1099511627776", " 1,099,511,627,776 bytes;"),
        ("damaged broadcast", "Expecting"),
    ],
)
def test_what_a_peer_spoils_is_refused_by_all_alike(told, case, why):
    first, *others = filter(None, told(case))
    assert first[:2] == ["WorkerError", "bad_message"]
    assert first[2].startswith("rank 1 ") and why in first[2]
    assert others
    assert all(other == first for other in others)


def test_a_groups_rank_is_named_by_its_number_among_all(told):
    _, *refusals = told("another group's rank")
    assert [words.startswith("rank 2 ") and words.endswith(": it is two") for _, _, words in refusals] == [True, True]


def test_the_first_error_of_any_rank_is_every_ranks(told):
    problem = {"code": "bad", "message": "é is bad", "path": "init.from", "hint": "type é"}
    problem |= {"file": "f", "line": 3, "column": None}
    assert told("no error") == [None] * 3
    assert told("one error") == [["MachineError", 4, [problem]]] * 3
    assert told("two errors") == [["RecipeError", 2, [problem, problem]]] * 3
    assert told("raised together") == [["RecipeError", "x", "mine"]] * 3


def test_the_longest_message_is_allowed_and_no_longer_or_empty_one():
    for length_bytes in (1, MAX_BYTES):
        _check_length(length_bytes, rank=3)
    for length_bytes in (-1, 0, MAX_BYTES + 1):
        with raises(WorkerError, "bad_message", "rank 3 "):
            _check_length(length_bytes, rank=3)
