"""What far-apart sites must agree with, told with the key it concerns and what to type."""

import pytest

from trainspec_cli.recipe.rules.check import check

SITES = {"resilience.mode": "sites"}
OF = "resilience.sites"


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({f"{OF}.interval_steps": 10}, f"{OF}.fragments", "no multiple of 4 fragments"),
        ({f"{OF}.delay_steps": 26}, f"{OF}.delay_steps", "sent after 25 steps"),
        ({f"{OF}.interval_steps": 4000}, f"{OF}.interval_steps", "a round plans 1,000 steps at most"),
        ({f"{OF}.count": 1}, f"{OF}.count", "no other to exchange with"),
        ({f"{OF}.quorum": 3}, f"{OF}.quorum", "of 2 sites it is 2 at most"),
        ({f"{OF}.site": 2}, f"{OF}.site", "of 2 sites it is 1 at most"),
        ({f"{OF}.endpoint": "host"}, f"{OF}.endpoint", "HOST:PORT is needed"),
        ({f"{OF}.listen": "host:0"}, f"{OF}.listen", "HOST:PORT is needed"),
        ({f"{OF}.site": 0, f"{OF}.listen": "host:1"}, f"{OF}.listen", "site 0 is reached at"),
        ({"train.tokens": 1000}, "train", "counts steps"),
        ({"train.early_stop_evals": 2, "train.eval_interval_steps": 5}, "train.early_stop_evals", "its last step"),
        ({"checkpoint.keep_best": True, "train.eval_interval_steps": 5}, "checkpoint.keep_best", "merged model"),
    ],
)
def test_what_does_not_fit_is_refused(make_spec, changes, path, says) -> None:
    found = {problem.path: problem for problem in check(make_spec(SITES | changes))}
    assert says in found[path].message
    assert found[path].hint


def test_what_fits_is_not(make_spec) -> None:
    assert (
        check(make_spec(SITES | {f"{OF}.site": 1, f"{OF}.endpoint": "a.example:29500", f"{OF}.listen": "b.example:1"}))
        == []
    )


def test_fragments_that_divide_the_interval_are_proposed(make_spec) -> None:
    (problem,) = check(make_spec(SITES | {f"{OF}.interval_steps": 9}))
    assert problem.hint == f"type {OF}.fragments=3"
