"""The sizes that a batch which changes may have: powers of the growth, in parts of the first."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.keys.training import (
    BatchingSpec,
    BatchScheduleSpec,
    Fault,
    FaultSyntaxError,
    ScheduleSpec,
    parse_faults,
)


@pytest.mark.parametrize(
    ("first", "growth", "largest", "sizes"),
    [
        (64, 2.0, 512, (64, 128, 256, 512)),
        (64, 2.0, 511.9, (64, 128, 256)),
        (64, 2.0, 64, (64,)),
        (64, 1.4, 200, (64, 88, 128, 176)),  # 89.6, 125.4 and 175.6 in eighths
        (12, 1.5, 60, (12, 18, 27, 42)),  # in fourths, which are wholes of 3
        (7, 1.5, 40, (7, 14, 21, 35)),  # 7 has no eighths: whole multiples, none of them twice
        (80, 1.3, 102, (80,)),  # 104 would round down to 100
        (80, 1.05, 100, (80, 90, 100)),
    ],
)
def test_sizes_that_a_batch_may_have(first: int, growth: float, largest: float, sizes: tuple[int, ...]) -> None:
    spec = BatchingSpec(global_batch_size=first, schedule=BatchScheduleSpec(growth=growth))
    assert spec.sizes_up_to(largest) == sizes


@pytest.mark.parametrize(
    ("schedule", "lowest"),
    [
        (ScheduleSpec(kind="cosine", final_lr_ratio=0.3), 0.3),
        (ScheduleSpec(kind="constant", final_lr_ratio=0.3), 1.0),
        (ScheduleSpec(kind="wsd", final_lr_ratio=0.3), 0.3),
        (ScheduleSpec(kind="wsd", final_lr_ratio=0.3, decay_fraction=0.0), 1.0),
        (ScheduleSpec(kind="cosine", final_lr_ratio=0.3, decay_fraction=0.0), 0.3),
    ],
    ids=str,
)
def test_the_rate_that_a_schedule_falls_to(schedule: ScheduleSpec, lowest: float) -> None:
    assert schedule.lowest_lr_ratio == lowest


# Faults as a recipe writes them.


def test_several_faults() -> None:
    text = " kill(group=1, step=40); slow(step=60,seconds=0.2,steps=5);lighthouse(step=7) ;"
    text += "throttle(step=1,rank=2,seconds=0.03,steps=9)"
    assert parse_faults(text) == (
        Fault("kill", step=40, group=1),
        Fault("slow", step=60, seconds=0.2, steps=5),
        Fault("lighthouse", step=7),
        Fault("throttle", step=1, rank=2, seconds=0.03, steps=9),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill", "kill(group=1,step=40)"),
        ("kil(step=4)", "`kil` (known: kill, stop, hang"),
        ("kill(group=1)", "kill(step=40)"),
        ("kill(step=4,node=1)", "`node`; it has step, group, rank"),
        ("kill(step=soon)", "`step=soon` needs a number"),
        ("kill(step=-1)", "`step=-1` is below 0"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(FaultSyntaxError) as error:
        parse_faults(text)
    assert says in str(error.value)


def test_a_fault_of_several_steps_lasts_from_its_first() -> None:
    fault = Fault("slow", step=60, steps=3)
    assert [step for step in range(55, 70) if fault.lasts_at(step)] == [60, 61, 62]
    assert [step for step in range(10) if Fault("throttle", step=4).lasts_at(step)] == [4]
