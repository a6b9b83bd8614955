"""What convolutional networks can be trained on, and which of them."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.rules.check import check_engine
from trainspec_cli.recipe.structure import structure

RESNET = {
    "family": "conv", "architecture": "resnet", "input_size": [32, 32], "widths": [8], "blocks": [1], "num_classes": 4,
}  # fmt: skip
UNET = {"family": "conv", "architecture": "unet", "input_size": [16, 16, 16], "widths": [8, 16], "num_classes": 3}


@pytest.fixture
def told(make_spec):
    """The paths and messages of what is wrong with a model on some data in some layout."""

    def check(model, data=None, layout=None) -> list[tuple[str, str]]:
        plain = to_plain(make_spec({}))
        if model is not None:
            plain["model"] = model
        plain["data"] = {**plain["data"], "source": "phantom", "seq_len": 1, "path": None, **(data or {})}
        plain["layout"] |= layout or {}
        spec, problems = structure(plain)
        assert problems == []
        return [(problem.path, problem.message) for problem in check_engine(spec)]

    return check


@pytest.mark.parametrize("model", [RESNET, UNET, {**UNET, "input_size": [16, 32]}])
def test_resnets_and_unets_are_trained(told, model):
    assert told(model) == []


def test_a_detector_is_refused(told):
    ((path, message),) = told({**RESNET, "architecture": "maskrcnn"})
    assert path == "model.architecture"
    assert message == "the engine trains a resnet or a unet; a maskrcnn can be planned"


@pytest.mark.parametrize(
    ("axis", "reason"), [("tp", "not cut"), ("cp", "no sequence"), ("pp", "differ in shape"), ("ep", "experts")]
)
def test_convolutions_are_spread_over_data_alone(told, axis, reason):
    found = told(RESNET, layout={axis: 2})
    assert found and found[0][0] == f"layout.{axis}"
    assert reason in found[0][1]


def test_text_and_images_are_not_mixed_up(told):
    ((path, message),) = told(RESNET, {"source": "python_stdlib"})
    assert (path, message[:26]) == ("data.source", "data=python_stdlib is text")
    ((path, message),) = told(None)
    assert (path, message) == ("data.source", "data=phantom has no tokens, which a decoder model reads")
    ((path, _),) = told(RESNET, {"seq_len": 64})
    assert path == "data.seq_len"


def test_inputs_that_do_not_halve_are_refused(told):
    ((path, message),) = told({**UNET, "input_size": [16, 18, 16]})
    assert path == "model.input_size"
    assert message == "`model.input_size` is [16, 18, 16]; 2 levels halve every extent"
    ((path, message),) = told({**RESNET, "input_size": [32, 32, 32]})
    assert message == "`model.input_size` has 3 dimensions; a resnet takes 2"


def test_phantoms_have_eight_classes_at_most(told):
    ((path, message),) = told({**RESNET, "num_classes": 1000})
    assert path == "model.num_classes"
    assert "phantoms have 1 to 8 classes" in message


def test_stages_have_a_width_and_a_count(told):
    ((path, _),) = told({**RESNET, "widths": [8, 16]})
    assert path == "model.blocks"
