import time

import pytest
import torch

from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.rundir.events import PARTS


def test_parts_sum_to_the_step_and_nested_time_is_counted_once():
    clock = StepClock(torch.device("cpu"))
    started = time.perf_counter()
    clock.restart()
    with clock.part("forward"):
        time.sleep(0.02)
        with clock.collective():
            time.sleep(0.04)
    with clock.part("optimizer"):
        time.sleep(0.01)
    parts = clock.cut().parts_s()
    whole = time.perf_counter() - started
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(whole, rel=0.05)
    assert parts["forward"] >= 0.02
    assert parts["exposed_comm"] >= 0.04
    assert parts["forward"] < parts["exposed_comm"]
    assert parts["backward"] == 0


def test_a_cut_starts_the_next_step_at_once():
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    time.sleep(0.01)
    first = clock.cut().parts_s()
    second = clock.cut().parts_s()
    assert first["other"] >= 0.01
    assert sum(second.values()) < 0.01


def test_a_part_that_raises_gives_the_time_back_to_the_part_around_it():
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with pytest.raises(RuntimeError), clock.part("forward"):
        raise RuntimeError
    time.sleep(0.01)
    assert clock.cut().parts_s()["other"] >= 0.01
