"""Keys for user-defined blocks and losses are checked against code, layout and the rest before the code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.recipe.keys.model import ConvModel, OwnModel
from trainspec_cli.recipe.keys.run import PartSpec, RunSpec
from trainspec_cli.recipe.rules.check import check, check_engine
from trainspec_cli.recipe.user_code import user_code_of
from trainspec_cli.session.recipe.load import examine

CODE = """
raise SystemExit("nothing of it runs")

class Block:
    def __init__(self, hidden_size, layer, width=2): ...

def loss(logits, targets, smoothing=0.0): ...
def narrow(hidden_size): ...

class Tokens:
    def __init__(self, size=256): ...
"""
OWN = OwnModel(2, 64, 512, block="mine.py:Block", block_params=100, options={"width": 3})
LOSS = {"train.loss": "mine.py:loss"}
TOKENS = {"data.tokenizer.code": "mine.py:Tokens"}
KEY = "data.tokenizer.code"
Make = Callable[[dict[str, Any]], RunSpec]


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)


@pytest.mark.parametrize(
    ("changes", "values", "path", "hint"),
    [
        ({"block": ""}, {}, "model.block", "set model.block=FILE.py:NAME"),
        ({"block_params": None}, {}, "model.block_params", "set model.block_params=NUMBER"),
        ({"block": "mine.py:Blok"}, {}, "model.block", "did you mean `Block`?"),
        ({"block": "none.py:Block"}, {}, "model.block", "did you mean `mine.py`?"),
        ({"block": "mine.py:narrow"}, {}, "model.block", "define it as narrow(hidden_size, layer, *, width)"),
        ({"options": {"wide": 1}}, {}, "model.block", "define it as Block(hidden_size, layer, *, wide)"),
        ({}, {"train.loss": "mine.py:narrow"}, "train.loss", "define it as narrow(logits, targets)"),
        ({}, LOSS | {"train.loss_options": {"a": 1}}, "train.loss", "define it as loss(logits, targets, *, a)"),
        ({}, {"train.loss_options": {"a": 1}}, "train.loss_options", "or set train.loss=FILE.py:NAME"),
        (
            *({}, LOSS | {"kernels.linear_cross_entropy": "full"}),
            *("kernels.linear_cross_entropy", "set kernels.linear_cross_entropy=torch, or leave out train.loss"),
        ),
        ({}, TOKENS | {"data.tokenizer.options": {"a": 1}}, KEY, "define it as Tokens(*, a)"),
        ({}, {"data.tokenizer.options": {"a": 1}}, "data.tokenizer.options", f"or set {KEY}=FILE.py:NAME"),
        ({}, TOKENS | {"data.tokenizer.path": "x.json"}, "data.tokenizer.path", "set data.tokenizer.path=null"),
        ({}, TOKENS | {"data.source": "chat", "data.path": "."}, KEY, "it works with python_stdlib, text, jsonl"),
        ({}, TOKENS | {"data.source": "nanogpt", "data.path": "."}, KEY, "and user-defined sources"),
        ({}, {"layout.tp": 2}, "layout.tp", "set layout.tp=1"),
        ({}, {"layout.cp": 2}, "layout.cp", "set layout.cp=1"),
        ({}, {"layout.ep": 2}, "layout.ep", "set layout.ep=1"),
        ({}, {"lora.rank": 4}, "lora.rank", "set lora.rank=0"),
        ({}, {"precision.matmul": "fp8"}, "precision.matmul", "set precision.matmul=compute"),
        ({}, {"optim.name": "muon"}, "optim.name", "set optim.name=adamw or optim.name=sgd"),
        ({}, {"data.document_masks": True}, "data.document_masks", "choose a decoder with rotary embeddings"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_type(
    make_spec: Make, changes: dict[str, Any], values: dict[str, Any], path: str, hint: str
) -> None:
    spec = replace(make_spec(values), model=replace(OWN, **changes))
    hints = [problem.hint for problem in [*check(spec), *check_engine(spec)] if problem.path == path]
    assert [found for found in hints if hint in found], hints


@pytest.mark.parametrize("layout", [{}, {"layout.pp": 2, "layout.dp_shard": 1}, {"layout.dp_replicate": 2}])
@pytest.mark.parametrize(
    "loss",
    [{}, LOSS, LOSS | {"train.loss_options": {"smoothing": 0.1}}, TOKENS | {"data.tokenizer.options": {"size": 9}}],
)
def test_what_fits_is_not(make_spec: Make, layout: dict[str, Any], loss: dict[str, Any]) -> None:
    spec = replace(make_spec(layout | loss), model=OWN)
    assert [*check(spec), *check_engine(spec)] == []


def test_a_loss_of_ones_own_is_for_text_and_sees_the_whole_vocabulary(make_spec: Make) -> None:
    cut = make_spec(LOSS | {"layout.tp": 2, "layout.dp_shard": 1})
    (problem,) = check_engine(cut)
    assert (problem.path, problem.hint) == ("layout.tp", "set layout.tp=1")
    images = replace(cut, model=ConvModel("unet", (16, 16), (8, 16)))
    assert any("`train.loss` is for text" in problem.message for problem in check(images))


# A source that is one of several: what is wrong with it is said of its own key.


def with_part(make_spec: Make, part: PartSpec) -> RunSpec:
    spec = make_spec({})
    return replace(spec, data=replace(spec.data, validation={"v": part}))


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "texts.py").write_text("def texts(count=1):\n    yield 'text' * count\n")
    return f"{tmp_path / 'texts.py'}:texts"


@pytest.mark.parametrize(
    ("part", "path", "hint"),
    [
        (PartSpec("jsonll"), "data.validation.v.source", "did you mean data.validation.v.source=jsonl?"),
        (PartSpec("phantom"), "data.validation.v.source", "set data.validation.v.source=jsonl, or another of these"),
        (
            PartSpec("python_stdlib", options={"count": 1}),
            "data.validation.v.options",
            "leave it out, or set data.validation.v.source=FILE.py:NAME",
        ),
        (
            PartSpec("CODE", path="x"),
            "data.validation.v.path",
            "set data.validation.v.path=null data.validation.v.options.path=x",
        ),
        (PartSpec("CODE", options={"size": 1}), "data.validation.v.source", ""),
    ],
    ids=["misspelt", "no text", "options", "path", "another argument"],
)
def test_a_part_that_is_wrong_is_refused(make_spec: Make, source: str, part: PartSpec, path: str, hint: str) -> None:
    part = replace(part, source=part.source.replace("CODE", source))
    problems = {one.path: one for one in check(with_part(make_spec, part))}
    assert hint in problems[path].hint


def test_code_of_parts_is_checked_and_named_like_the_others(make_spec: Make, source: str) -> None:
    part = PartSpec(source, options={"count": 2})
    spec = with_part(make_spec, part)
    assert check(spec) == []
    assert [(one.path, one.text, one.options) for one in user_code_of(spec)] == [
        ("data.validation.v.source", source, ("count",))
    ]


def test_a_file_of_a_part_is_sought_in_the_current_folder(source: str, tmp_path: Path) -> None:
    given = ["recipe=tiny", "data.validation.v.source=texts.py:texts"]
    assert examine(given, tmp_path).draft.data.validation["v"].source == source
