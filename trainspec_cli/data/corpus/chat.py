"""Parse conversations and completions, one per line, into text of which only marked spans are learnt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import exists, expand, read_text, show_kind
from trainspec_cli.data.corpus.chat_formats import (
    FIELDS_OF_TEMPLATES,
    SHAPES,
    ChatFormat,
    FormatError,
    Record,
    to_messages,
)
from trainspec_cli.data.huggingface.chat_template import ChatTemplate, Span, find_template
from trainspec_cli.data.huggingface.folder import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from trainspec_cli.recipe.keys.data import DataSpec


@dataclass(frozen=True)
class Conversation:
    text: str
    spans: Sequence[Span]
    """The parts of `text` that are learnt, in characters."""
    format: ChatFormat

    @property
    def is_chat(self) -> bool:
        """True if a template writes every special token; a plain completion begins and ends with the tokenizer's
        own."""
        return self.format != "completions"


def parse_record(
    record: Record, of: ChatFormat, template: Callable[[], ChatTemplate], *, learn_all: bool
) -> Conversation:
    """Parse one line of a format.

    Raises FormatError for what is wrong with it, ValueError if the template refuses it, RecipeError if there is no chat
    template.
    """
    if of == "completions":
        prompt, completion = record["prompt"], record["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            name = "completion" if isinstance(prompt, str) else "prompt"
            raise FormatError(
                f"`{name}` is {show_kind(record[name])}, not text", f"each line must be {SHAPES['completions']}"
            )
        start = 0 if learn_all else len(prompt)
        return Conversation(prompt + completion, [(start, len(prompt) + len(completion))], "completions")
    extra = {key: record[key] for key in FIELDS_OF_TEMPLATES if of == "messages" and record.get(key)}
    text, spans = template().replies(to_messages(record, of), **extra)
    return Conversation(text, [(0, len(text))] if learn_all else spans, of)


@lru_cache(maxsize=4)
def template_of(tokenizer: str | None, wanted: str | None) -> ChatTemplate:
    """Find the chat template when the first conversation needs it; completions need none."""
    return find_template(expand(tokenizer) if tokenizer else None, wanted)


def question(data: DataSpec, prompt: str) -> str | None:
    """Render `prompt` as a user's message, up to where the reply begins; None if `data` has no template
    (completions)."""
    if data.source != "chat":
        return None
    try:
        template = template_of(data.tokenizer.path, data.chat_template)
    except RecipeError:
        return None
    return template.render([{"role": "user", "content": prompt}], asks=True)


def keep_template(data: DataSpec, folder: Path) -> None:
    """Write the template that conversations of `data` are rendered with to `folder`, unless it is there; nothing where
    they need none (completions)."""
    file = folder / CHAT_TEMPLATE
    sources = {data.source, *(part.source for part in data.mixture.values())}
    if file.is_file() or "chat" not in sources:
        return
    with contextlib.suppress(RecipeError):
        file.write_text(template_of(data.tokenizer.path, data.chat_template).source, encoding="utf-8")


def describe(data: DataSpec) -> JsonObject:
    """Return what conversations depend on besides their files, for the cache's digest."""
    if data.source != "chat":
        return {}
    beside = expand(data.tokenizer.path).parent if data.tokenizer.path else None
    files = [beside / name for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)] if beside else []
    contents = [read_text(file) for file in files if exists(file)]
    return {"loss_on": data.loss_on, "template": [data.chat_template, *contents]}
