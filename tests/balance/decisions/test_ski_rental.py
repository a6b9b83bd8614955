"""A change is made once what was lost without it has come to what it costs."""

from __future__ import annotations

from trainspec_cli.balance.decisions.ski_rental import SkiRental


def test_it_waits_until_the_loss_has_come_to_the_cost_and_decides_once() -> None:
    rental = SkiRental[str]()
    assert [rental.note_steps("a", 1.0, 3.0, 1) for _ in range(5)] == [False, False, True, False, False]
    assert [rental.note_steps("b", 1.0, 3.0, 2) for _ in range(2)] == [False, True]


def test_the_remaining_steps_must_win_the_cost_back() -> None:
    rental = SkiRental[str]()
    assert not rental.note_steps("a", 1.0, 3.0, 4, remaining_steps=2)
    assert rental.note_steps("a", 1.0, 3.0, 1, remaining_steps=3)


def test_what_is_no_longer_wanted_is_decided_anew() -> None:
    rental = SkiRental[str]()
    assert rental.note_steps("a", 1.0, 3.0, 3)
    rental.forget()
    assert [rental.note_steps("a", 1.0, 3.0, 1) for _ in range(3)] == [False, False, True]


def test_a_loss_may_be_counted_anew_and_what_was_decided_stays() -> None:
    rental = SkiRental[str]()
    assert not rental.note_steps("a", 1.0, 3.0, 2)
    rental.count_anew()
    assert [rental.note_steps("a", 1.0, 3.0, 1) for _ in range(3)] == [False, False, True]
    rental.count_anew()
    assert not rental.note_steps("a", 1.0, 3.0, 9)


def test_what_is_wanted_for_a_moment_is_not_decided_by_a_patient_one() -> None:
    rental = SkiRental[str](patience_s=30.0)
    assert not any(rental.note_steps("a", 1.0, 3.0, 1, step_s=1.0) for _ in range(29))
    rental.forget()
    found = [rental.note_steps("a", 1.0, 3.0, 1, step_s=1.0) for _ in range(60)]
    assert found.index(True) == 29 and found.count(True) == 1
