"""Rules for one's own code: it is there, it can be called as the engine does, and the recipe says what it needs.

Nothing of it runs for that: `extensions.source` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.extensions.kinds import SOURCE, TOKENIZER
from trainspec_cli.recipe.extensions.source import Extension, problems_of
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.data import SOURCES, DataSpec, Documents, PartSpec
from trainspec_cli.recipe.keys.kernels import TORCH
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.optim import OPTIMIZERS
from trainspec_cli.recipe.own_code import (
    own_blocks,
    own_callbacks,
    own_losses,
    own_optimizer,
    own_tokenizers,
    own_trackers,
)

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec


BLOCK_PARAMS = "model.block_params"


def optimizer(spec: RunSpec) -> Iterator[Problem]:
    if not spec.optim.is_own:
        given = {"optim.options": bool(spec.optim.options), "optim.state_bytes": spec.optim.state_bytes is not None}
        for path, is_given in given.items():
            if is_given:
                message = f"`{path}` is for an optimizer of one's own, and `optim.name` is {spec.optim.name}"
                yield Problem("unsupported", message, path, "leave it out, or type optim.name=FILE.py:NAME")
        return
    problems = list(problems_of(own_optimizer(spec), OPTIMIZERS))
    yield from problems
    if problems:
        return
    path = "optim.state_bytes"
    if spec.optim.state_bytes is None:
        message = f"`{path}` has no value: the plan cannot know what {spec.optim.name} keeps of each parameter"
        yield Problem("missing_value", message, path, f"type {path}=8 for two averages in fp32, 4 for one, 0 for none")
    schedule = spec.batching.schedule
    if schedule.kind != "constant" and schedule.lr_rule == "optimizer":
        path = "batching.schedule.lr_rule"
        message = f"`{path}` is optimizer, and {spec.optim.name} has no rule for a batch that changes"
        yield Problem("missing_value", message, path, f"type {path}=sqrt, linear or none")


def block(spec: RunSpec) -> Iterator[Problem]:
    """A model of one's own blocks says which, and how large they are."""
    model = spec.model
    if not isinstance(model, OwnModel):
        return
    if not model.block:
        message = "`model.block` has no value: a model of the family own is made of blocks of one's own"
        yield Problem("missing_value", message, "model.block", "type model.block=FILE.py:NAME (docs/extending.md)")
        return
    problems = [problem for extension in own_blocks(model) for problem in problems_of(extension)]
    yield from problems
    if model.block_params is None and not problems:
        path = BLOCK_PARAMS
        message = f"`{path}` has no value: the plan cannot know how many parameters {model.block} makes"
        yield Problem("missing_value", message, path, f"type {path}=NUMBER; commands that load a recipe count them")


def loss(spec: RunSpec) -> Iterator[Problem]:
    for extension in own_losses(spec):
        yield from problems_of(extension)
    backend = spec.kernels.linear_cross_entropy
    if spec.train.loss and spec.model.unit == "samples":
        message = f"`train.loss` is for models of text, and `model.family` is {spec.model.family}"
        yield Problem("unsupported", message, "train.loss", "leave it out")
    elif spec.train.loss and backend not in (TORCH, AUTO):
        path = "kernels.linear_cross_entropy"
        message = f"`{path}` is {backend}, a kernel of cross-entropy, and `train.loss` is {spec.train.loss}"
        yield Problem("contradiction", message, path, f"type {path}={TORCH}, or leave out train.loss")
    if spec.train.loss_options and not spec.train.loss:
        message = "`train.loss_options` is for a loss of one's own, and `train.loss` has no value"
        yield Problem("unsupported", message, "train.loss_options", "leave it out, or type train.loss=FILE.py:NAME")


TEXT_SOURCES = ("python_stdlib", "text", "jsonl", "parquet", "arrow", "tokens")
"""Sources that a tokenizer of one's own encodes, or has encoded."""


def own_tokenizer(spec: RunSpec) -> Iterator[Problem]:
    data, tokenizer, key = spec.data, spec.data.tokenizer, TOKENIZER.key
    if not tokenizer.code:
        if tokenizer.options:
            message = f"`data.tokenizer.options` is for a tokenizer of one's own, and `{key}` has no value"
            yield Problem("unsupported", message, "data.tokenizer.options", f"leave it out, or type {key}=FILE.py:NAME")
        return
    for extension in own_tokenizers(data):
        yield from problems_of(extension)
    parts = () if data.is_own else tuple(data.parts.values())
    for source in {part.source for part in (*parts, *data.validation.values())} - {*TEXT_SOURCES}:
        message = f"`{key}` is {tokenizer.code}, and the source {source} does not go with a tokenizer of one's own"
        yield Problem("unsupported", message, key, f"it goes with {', '.join(TEXT_SOURCES)} and one's own source")
    for path, value in (("path", tokenizer.path), ("end_of_document", tokenizer.end_of_document)):
        if value is not None:
            message = f"`data.tokenizer.{path}` is {value}, and the tokenizer is one's own (`{key}`)"
            yield Problem("contradiction", message, f"data.tokenizer.{path}", f"type data.tokenizer.{path}=null")


def watchers(spec: RunSpec) -> Iterator[Problem]:
    for extension in (*own_callbacks(spec), *own_trackers(spec)):
        yield from problems_of(extension)


def source(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    yield from _source(data, "data", SOURCES)
    for group in ("mixture", "validation"):
        for name, part in getattr(data, group).items():
            yield from _source(part, f"data.{group}.{name}", get_args(Documents))


def _source(data: DataSpec | PartSpec, where: str, built_in: Sequence[str]) -> Iterator[Problem]:
    if data.source not in SOURCES:
        yield from problems_of(Extension(SOURCE, f"{where}.source", data.source, tuple(data.options)), built_in)
        if data.path is not None:
            message = f"`{where}.path` is {data.path}, which one's own source is not given"
            hint = f"type {where}.path=null {where}.options.path={data.path}"
            yield Problem("unsupported", message, f"{where}.path", hint)
    elif data.source not in built_in:
        message = f"`{where}.source` is {data.source}; {', '.join(built_in)}, or one's own code is needed"
        yield Problem("wrong_choice", message, f"{where}.source", f"type {where}.source=jsonl, or another of these")
    elif data.options:
        message = f"`{where}.options` is for a source of one's own, and `{where}.source` is {data.source}"
        yield Problem("unsupported", message, f"{where}.options", f"leave it out, or type {where}.source=FILE.py:NAME")


OWN_CODE_RULES = (source, own_tokenizer, block, loss, optimizer, watchers)
