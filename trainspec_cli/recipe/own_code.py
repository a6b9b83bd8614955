"""The code of one's own that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.recipe.extensions.kinds import (
    BLOCK,
    CALLBACK,
    LOSS,
    OPTIMIZER,
    SOURCE,
    TOKENIZER,
    TRACKER,
    ExtensionKind,
)
from trainspec_cli.recipe.extensions.source import Extension, find
from trainspec_cli.recipe.keys.model import ModelSpec, OwnModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec

KINDS: tuple[ExtensionKind, ...] = (SOURCE, TOKENIZER, BLOCK, LOSS, OPTIMIZER, CALLBACK, TRACKER)
"""The extension points, by the order in which a run comes to them."""


def own_code_of(spec: RunSpec) -> Iterator[Extension]:
    """Yield what the recipe names: nothing where it names only what ships with trainspec."""
    for key, part in spec.data.own_parts.items():
        yield Extension(SOURCE, key, part.source, tuple(part.options))
    yield from worker_code_of(spec)


def worker_code_of(spec: RunSpec) -> Iterator[Extension]:
    """Yield what the workers of a run import: all but the source of the data, which is read before they start."""
    yield from own_tokenizers(spec.data)
    yield from own_blocks(spec.model)
    yield from own_losses(spec)
    if spec.optim.is_own:
        yield own_optimizer(spec)
    yield from own_callbacks(spec)
    yield from own_trackers(spec)


def own_source(data: DataSpec) -> Extension:
    return Extension(SOURCE, SOURCE.key, data.source, tuple(data.options))


def own_tokenizers(data: DataSpec) -> list[Extension]:
    """Return the tokenizer that the data names, where it is the user's own."""
    code = data.tokenizer.code
    return [Extension(TOKENIZER, TOKENIZER.key, code, tuple(data.tokenizer.options))] if code else []


def own_blocks(model: ModelSpec) -> list[Extension]:
    """Return what makes the model's blocks, where they are the user's own and named."""
    if not isinstance(model, OwnModel) or not model.block:
        return []
    return [Extension(BLOCK, BLOCK.key, model.block, tuple(model.options))]


def own_losses(spec: RunSpec) -> list[Extension]:
    """Return the loss that takes the place of cross-entropy, where there is one."""
    loss = spec.train.loss
    return [Extension(LOSS, LOSS.key, loss, tuple(spec.train.loss_options))] if loss else []


def own_optimizer(spec: RunSpec) -> Extension:
    return Extension(OPTIMIZER, OPTIMIZER.key, spec.optim.name, tuple(spec.optim.options))


def own_callbacks(spec: RunSpec) -> list[Extension]:
    return [Extension(CALLBACK, CALLBACK.key, text) for text in spec.train.callbacks]


def own_trackers(spec: RunSpec) -> list[Extension]:
    return [Extension(TRACKER, TRACKER.key, text) for text in spec.tracking.trackers]


def describe_code(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each piece of code that a run of the recipe executes, which is checked already."""
    for extension in own_code_of(spec):
        yield f"{extension.path} runs {find(extension).describe()}"
