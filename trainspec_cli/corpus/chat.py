"""Parse conversations and completions, one per line, into text of which only marked spans are learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainspec_cli.errors import RecipeError
from trainspec_cli.huggingface.chat_template import ChatTemplate, Span, find_template
from trainspec_cli.huggingface.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG
from trainspec_cli.reading.files import exists, expand, read_text
from trainspec_cli.spec.recipe.data import DataSpec

FIELDS = ("messages", "prompt", "completion", "tools", "documents")
SHAPES = 'each line must be {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'


@dataclass(frozen=True)
class Conversation:
    text: str
    spans: Sequence[Span]
    """The parts of `text` that are learnt, in characters."""
    is_chat: bool
    """True if a template writes every special token; a plain completion begins and ends with the tokenizer's own."""


def parse_record(record: Any, template: Callable[[], ChatTemplate], *, learn_all: bool) -> Conversation:
    """Parse one line. Raises ValueError that says what is wrong with it, RecipeError if there is no chat template."""
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        if not all(isinstance(message, dict) for message in record["messages"]):
            raise ValueError(SHAPES)
        extra = {key: record[key] for key in ("tools", "documents") if record.get(key)}
        text, spans = template().replies(record["messages"], **extra)
        return Conversation(text, [(0, len(text))] if learn_all else spans, is_chat=True)
    if isinstance(record, dict) and all(isinstance(record.get(key), str) for key in ("prompt", "completion")):
        prompt, completion = record["prompt"], record["completion"]
        start = 0 if learn_all else len(prompt)
        return Conversation(prompt + completion, [(start, len(prompt) + len(completion))], is_chat=False)
    raise ValueError(SHAPES)


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


def describe(data: DataSpec) -> dict[str, Any]:
    """Return what conversations depend on besides their files, for the cache's digest."""
    if data.source != "chat":
        return {}
    beside = expand(data.tokenizer.path).parent if data.tokenizer.path else None
    files = [beside / name for name in (TOKENIZER_CONFIG, CHAT_TEMPLATE)] if beside else []
    contents = [read_text(file) for file in files if exists(file)]
    return {"loss_on": data.loss_on, "template": [data.chat_template, *contents]}
