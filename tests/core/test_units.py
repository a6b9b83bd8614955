"""Quantities as text, at the edges of their units."""

from __future__ import annotations

import pytest

from trainspec_cli.core.errors import Problem, closest, did_you_mean
from trainspec_cli.core.printable import format_bytes, format_count, format_duration, format_seconds, format_si


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"), (0.0124, "12 ms"), (0.999, "999 ms"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"),
        (93.2, "1 min 33 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (9000, "2 h 30 min"),
        (47 * 3600 + 59 * 60, "47 h 59 min"), (48 * 3600, "2 d 0 h"), (100 * 3600, "4 d 4 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0545, "54.5 ms"), (0.9, "900 ms"), (12.345, "12.3 s"), (1234.5, "1,234 s")]
)
def test_seconds_in_three_digits(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**20, "1.50 MiB"), (2**30 - 1, "1024.00 MiB"),
        (2**31, "2.00 GiB"), (2**40, "1.00 TiB"), (-(2**20), "-1.00 MiB"),
    ],
)  # fmt: skip
def test_bytes(value: float, shown: str) -> None:
    assert format_bytes(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (1000, "1k"), (6_400_000, "6.4M"), (8.03e9, "8.03B"), (1e12, "1T"), (-2e6, "-2M")],
)
def test_counts(value: float, shown: str) -> None:
    assert format_count(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 W"), (999, "999 W"), (1000, "1 kW"), (1e6, "1 MW"), (1.25e9, "1.25 GW"), (1e12, "1 TW"), (2e15, "2 PW"),
        (3e18, "3 EW"), (-1500, "-1.5 kW"),
    ],
)  # fmt: skip
def test_si_prefixes(value: float, shown: str) -> None:
    assert format_si(value, "W") == shown


def test_si_without_a_unit() -> None:
    assert (format_si(1.25e12), format_si(7), format_si(123456, "B", digits=4)) == ("1.25 T", "7", "123.5 kB")


def test_the_nearest_word_is_found_whatever_its_case_and_dashes() -> None:
    words = ("max_steps", "warmup_steps", "seed")
    assert closest("Max-Steps", words) == "max_steps"
    assert closest("warmup_step", words) == "warmup_steps"
    assert closest("tokenizer", words) is None
    assert (did_you_mean("sed", words), did_you_mean("tokenizer", words)) == ("did you mean `seed`?", "")


def test_a_problem_for_programs_has_no_excerpt() -> None:
    problem = Problem("c", "m", "optim.lr", "h", "a.yaml", 3, None, "  lr: x", environment=True)
    assert problem.where() == "a.yaml:3"
    assert problem.as_json() == {
        "code": "c", "message": "m", "path": "optim.lr", "hint": "h", "file": "a.yaml", "line": 3, "column": None,
    }  # fmt: skip
