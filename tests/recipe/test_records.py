"""Records as JSON and back: what is refused, and one text for one content."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import (
    ABSENT,
    Absent,
    FieldError,
    build,
    canonical_json,
    digest,
    from_plain,
    number,
    read_record,
    to_plain,
)
from trainspec_cli.recipe.results.plan import Plan


def test_a_plan_survives_json(make_spec) -> None:
    plan = Plan(
        spec=make_spec({"checkpoint.interval_steps": 5}), layout=Layout(dp_shard=2), device="cpu", num_nodes=1,
        devices_per_node=2, compute="fp32", micro_batch_size=4, grad_accum_steps=1, recompute="none", offload="none",
        params=10, flops_per_token=60.0,
    )  # fmt: skip
    assert from_plain(Plan, json.loads(json.dumps(to_plain(plan)))) == plan


def test_tuples_survive_json() -> None:
    machine = Machine("box", 2, 2**30, gpu_names=("H200", "H200"))
    assert from_plain(Machine, json.loads(json.dumps(to_plain(machine)))) == machine


def test_what_does_not_fit_is_refused_by_name(make_spec) -> None:
    plain = to_plain(make_spec({}))
    plain["train"]["max_steps"] = "many"
    plain["foo"] = 1
    with pytest.raises(RecipeError) as raised:
        from_plain(RunSpec, plain)
    assert [problem.path for problem in raised.value.problems] == ["foo", "train.max_steps"]


@pytest.mark.clause("REC-7")
def test_a_digest_does_not_depend_on_order_or_on_how_numbers_are_written(data) -> None:
    spec, _ = build(RunSpec, data)
    reordered = {name: data[name] for name in reversed(data)}
    reordered["train"] = {"seed": 0.0, "max_steps": 2e1}
    same, _ = build(RunSpec, reordered)
    assert digest(spec) == digest(same)


@pytest.mark.clause("REC-7")
def test_a_digest_knows_every_value_but_the_folder(make_spec) -> None:
    before = digest(make_spec({}))
    assert digest(make_spec({"run.dir": "elsewhere"})) == before
    assert digest(make_spec({"optim.eps": 1e-7})) != before


def test_canonical_json_is_one_text_for_one_content() -> None:
    assert canonical_json({"b": 1, "a": [1.0, None]}) == '{"a":[1.0,null],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize(("data", "name"), [([1, 2], "list"), ("text", "str"), (None, "NoneType")])
def test_what_has_no_fields_is_refused(data, name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}, expected Machine's fields") as raised:
        from_plain(Machine, data)
    assert [problem.code for problem in raised.value.problems] == ["wrong_type"]


def test_what_is_absent_has_no_key_and_what_is_none_has_null() -> None:
    @dataclass(frozen=True)
    class Heard:
        at_s: float | None
        words: str | Absent = ABSENT

    assert to_plain(Heard(None)) == {"at_s": None}
    assert to_plain(Heard(1.0, "x")) == {"at_s": 1.0, "words": "x"}
    assert not ABSENT


@dataclass(frozen=True)
class Measured:
    value: Annotated[float, number(0, math.inf)] | str | None
    parts: dict[str, int | str]


@pytest.mark.parametrize("value", [0.5, 1e300, 2, "inf", None])
def test_each_kind_of_a_union_is_read_as_it_is(value: float | str | None) -> None:
    read = read_record(Measured, {"value": value, "parts": {"a": 1, "b": "x"}, "unknown": 1})
    assert read == Measured(value, {"a": 1, "b": "x"}) and type(read.value) is type(value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": -1.0}, r"`value` is -1.0; .* 0 to inf or text or null"),
        ({"value": True}, r"`value` is True; "),
        (
            {"parts": {"a": 1.5}},
            r"`parts` is an object; .* each value .* or text,",
        ),
    ],
)
def test_a_value_of_no_kind_of_a_union_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(FieldError, match=says):
        read_record(Measured, {"value": 1.0, "parts": {}} | change)


@pytest.mark.parametrize("indent", [None, 2])
def test_what_is_not_finite_is_null_wherever_it_stands(indent):
    content = {"a": math.nan, "b": [1.5, (-math.inf, {"c": math.inf})], "d": None, "e": True, "f": 10**20}
    text = json_text(content, indent=indent)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, [None, {"c": None}]],
        "d": None,
        "e": True,
        "f": 10**20,
    }


def test_text_is_ascii_and_names_that_are_no_utf8_survive():
    assert json_text(["é", "数"], indent=None) == '["\\u00e9", "\\u6570"]'
    text = json_text(["a\udcff"], indent=None)
    assert json.loads(text.encode().decode()) == ["a\udcff"]
