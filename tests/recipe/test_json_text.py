import json
import math

import pytest

from trainspec_cli.recipe.json_text import json_text


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
