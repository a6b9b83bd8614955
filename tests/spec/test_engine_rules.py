"""What can be planned but not trained is refused, never passed over."""

from __future__ import annotations

import pytest

from trainspec_cli.spec.engine_rules import check_engine
from trainspec_cli.spec.structure import structure


def told(problems) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in problems]


def test_a_plain_recipe_is_trained(make_spec):
    assert check_engine(make_spec({})) == []


@pytest.mark.parametrize(
    ("path", "value", "choices"),
    [
        ("precision.matmul", "fp8", "compute"),
        ("resilience.mode", "elastic", "restart"),
        ("cluster.num_nodes", 2, "1"),
    ],
)
def test_a_value_that_only_the_planner_knows_is_refused(make_spec, path, value, choices):
    (problem,) = check_engine(make_spec({path: value}))
    assert problem.code == "unsupported"
    assert problem.message == f"`{path}` is {value}; this version trains with {choices}"
    assert problem.hint.startswith(f"type {path}={choices.split()[0]}, or trainspec plan")


def test_every_refusal_is_told_at_once(make_spec):
    problems = check_engine(make_spec({"layout.etp": 2, "precision.matmul": "fp8", "model.sliding_window": 128}))
    assert [problem.path for problem in problems] == ["model.sliding_window", "precision.matmul", "layout.etp"]
    assert "plain llama-style decoders" in problems[0].message


def test_a_model_of_another_family_is_refused(make_spec):
    from trainspec_cli.spec.canonical import to_plain

    plain = to_plain(make_spec({}))
    plain["model"] = {"family": "hybrid", "hidden_size": 64, "vocab_size": 100, "mamba_layers": 2}
    spec, problems = structure(plain)
    assert problems == []
    assert told(check_engine(spec)) == [
        ("model.family", "the engine of this version trains dense decoders; a hybrid model can be planned")
    ]
