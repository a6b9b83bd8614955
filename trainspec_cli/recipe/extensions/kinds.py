"""The extension points: for each the key of a recipe, the entry-point group, and how the engine calls what is named."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExtensionKind:
    key: str
    """The key of a recipe that names such code."""
    group: str
    """The entry-point group under which installed packages register names."""
    positional: tuple[str, ...] = ()
    """The arguments that the engine passes by position."""
    keywords: tuple[str, ...] = ()
    """The arguments that the engine passes by name, beside those of the recipe's options."""
    is_list: bool = False
    """The key holds a list of them."""

    def describe_call(self, options: Sequence[str] = ()) -> str:
        """Return the arguments of the engine's call, such as `(groups, *, lr, alpha)`."""
        named = (*self.keywords, *options)
        return f"({', '.join((*self.positional, *(('*',) if named else ()), *named))})"

    def why_not_callable(self, signature: inspect.Signature, options: Sequence[str]) -> str:
        """Return why the engine's call does not fit the signature; empty where it does."""
        try:
            signature.bind(*self.positional, **dict.fromkeys((*self.keywords, *options)))
        except TypeError as error:
            return str(error)
        return ""


OPTIMIZER = ExtensionKind("optim.name", "trainspec.optimizers", ("groups",), ("lr",))
CALLBACK = ExtensionKind("train.callbacks", "trainspec.callbacks", ("run",), is_list=True)
TRACKER = ExtensionKind("tracking.trackers", "trainspec.trackers", ("run",), is_list=True)
BLOCK = ExtensionKind("model.block", "trainspec.blocks", ("hidden_size", "layer"))
LOSS = ExtensionKind("train.loss", "trainspec.losses", ("logits", "targets"))
TOKENIZER = ExtensionKind("data.tokenizer.code", "trainspec.tokenizers")
SOURCE = ExtensionKind("data.source", "trainspec.datasets")
