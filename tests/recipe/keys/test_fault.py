"""Faults as a recipe writes them."""

import pytest

from trainspec_cli.recipe.keys.training import Fault, FaultSyntaxError, parse_faults


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
        ("kill", "is not a fault; write, for example, kill(group=1,step=40)"),
        ("kil(step=4)", "there is no fault `kil`; there are kill, stop, hang"),
        ("kill(group=1)", "has no step; write, for example, kill(step=40)"),
        ("kill(step=4,node=1)", "a fault has no `node`; it has step, group, rank"),
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
