"""What an error carries, and the word that was probably meant."""

from __future__ import annotations

import pytest

from trainspec_cli.core import errors
from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError, closest, did_you_mean

WORDS = ("num_layers", "hidden_size", "lr")


@pytest.mark.parametrize(
    ("got", "meant"),
    [("num-layers", "num_layers"), ("NUM_LAYERS", "num_layers"), ("numlayer", "num_layers"), ("LR", "lr"),
     ("hiden_size", "hidden_size"), ("optimizer", None), ("", None)],
)  # fmt: skip
def test_the_nearest_word_whatever_its_dashes_and_capitals(got: str, meant: str | None) -> None:
    assert closest(got, WORDS) == meant
    assert did_you_mean(got, WORDS) == (f"did you mean `{meant}`?" if meant else "")


def test_an_allowed_word_is_given_as_it_is_spelt() -> None:
    assert closest("clip_ratio", ["Clip-Ratio"]) == "Clip-Ratio"


@pytest.mark.parametrize(
    ("place", "shown"),
    [((None, None, None), ""), (("a.yaml", None, None), "a.yaml"), (("a.yaml", 3, None), "a.yaml:3"),
     (("a.yaml", 3, 1), "a.yaml:3:1")],
)  # fmt: skip
def test_a_place_is_told_as_far_as_it_is_known(place: tuple, shown: str) -> None:
    file, line, column = place
    assert Problem("c", "m", file=file, line=line, column=column).where() == shown


@pytest.mark.clause("LAUNCH-10")
def test_a_problem_as_json_has_what_other_programs_read() -> None:
    plain = Problem("c", "m", "p", "h", "f", 1, 2, excerpt="x", environment=True).as_json()
    assert plain == {"code": "c", "message": "m", "path": "p", "hint": "h", "file": "f", "line": 1, "column": 2}


def test_an_error_is_made_of_a_text_a_problem_or_several() -> None:
    one = Problem("c", "one")
    assert MachineError("text", code="k", hint="h").problems == (Problem("k", "text", hint="h"),)
    assert MachineError("text").problems == (Problem("error", "text"),)
    assert MachineError(one).problems == (one,)
    assert str(RecipeError([one, Problem("c", "two")])) == "one; two"


@pytest.mark.clause("LAUNCH-2")
def test_every_way_to_end_has_a_code_of_its_own_and_a_meaning() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrainspecError)]
    codes = {kind.__name__: kind.exit_code for kind in kinds if kind is not TrainspecError}
    assert codes == {
        "RecipeError": 2, "PlanError": 3, "MachineError": 4, "WorkerError": 5, "Stopped": 6, "Interrupted": 130,
    }  # fmt: skip
    assert list(errors.EXIT_CODES) == [0, *codes.values()]
