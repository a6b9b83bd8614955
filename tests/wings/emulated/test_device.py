"""The emulated device: a CPU's values to the bit, tensors that do not mix, memory that ends, order by waits alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.drawing import slow_after
from wings.emulated.on_device import LEFT_OUT, SCHEDULES

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.wings.emulated import Settings, read_settings

TESTS = Path(__file__).parents[2]
MIB = 2**20


def run(name: str, *arguments: str, **environment: str) -> Any:
    """Run a program of `on_device` in a process of its own."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "wings.emulated.on_device", name, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_gives_the_bits_of_a_cpu_in_any_order_of_the_streams() -> None:
    assert run("bits") == {"None": True, "1": True, "2": True, "3": True}


def test_tensors_of_host_and_device_do_not_mix_and_numbers_may() -> None:
    found = run("mixing")
    assert "emulated:0 and cpu" in found["refused"]
    assert found["number"] == [3.0, 3.0, 3.0]


def test_what_makes_the_host_wait_is_counted() -> None:
    found = run("counting")
    assert set(found["silent"]) == {"operations"}
    assert (found["after"]["synchronisations"], found["after"]["hidden copies"]) == (1, 1)


@pytest.mark.parametrize("family", slow_after(1, ["dense", "moe", "windowed", "mamba", "hybrid"]))
def test_a_step_of_the_engine_never_waits_for_the_host(family: str) -> None:
    """Its outcome is copied to page-locked memory, and read when the next step is under way."""
    assert run("steady", family) == {"to read the outcome": 3}


def test_memory_ends_where_the_allocator_says_and_can_be_used_again() -> None:
    found = run("memory", TRAINSPEC_EMULATED="memory_gib=0.5")
    # Memory is mapped in pages of 20 MiB, of which 512 MiB hold 25.
    assert (found["number"], found["full"]) == (7, 7 * 64 * MIB)
    assert found["total"] == 512 * MIB
    assert "0.06 GiB" in found["failed"]
    assert found["again"] == 128 * MIB
    assert found["free"] == found["total"] - found["reserved"]
    assert (found["stats"]["num_ooms"], found["stats"]["num_alloc_retries"]) == (1, 1)


def test_random_numbers_do_not_depend_on_the_order_of_the_streams() -> None:
    first, second, third = run("random_numbers")
    assert first == second == third


@pytest.mark.parametrize(
    ("program", "without"),
    [
        ("two_streams", "event"),
        ("kept_memory", "record_stream"),
        ("read_early", "synchronize"),
        ("reused_host_memory", "synchronize"),
        *slow_after(0, [("loading", line) for line in LEFT_OUT]),
    ],
)
def test_a_missing_wait_is_found(program: str, without: str) -> None:
    assert run("wrong_orders", program, "")["wrong"] == 0
    assert 0 < run("wrong_orders", program, without)["wrong"] <= SCHEDULES


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", Settings()),
        ("order=7", Settings(order=7)),
        ("memory_gib=0.5,order=1", Settings(1, 0.5)),
        ("sizes=1", Settings(sizes=1)),
    ],
)
def test_settings(text: str, settings: Settings) -> None:
    assert read_settings(text) == settings


@pytest.mark.parametrize("text", ["ordr=7", "order=x", "order", "memory_gib=", "sizes=2", "sizes=1,order=3"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_settings(text)
    assert error.value.problems[0].code == "usage"
