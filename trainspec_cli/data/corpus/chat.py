"""Parse conversations and completions, one per line, into text in which the spans to train on are marked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from trainspec_cli.core.errors import RecipeError, closest
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import exists, expand, read_text, show_kind
from trainspec_cli.data.corpus.records import excerpt
from trainspec_cli.data.huggingface.chat_template import ChatTemplate, Span, find_template
from trainspec_cli.data.huggingface.folder import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from trainspec_cli.recipe.keys.run import DataSpec

# The conversation formats. Each is converted to the messages that a chat template expects.


Record = Mapping[str, object]
ChatFormat = Literal["messages", "completions", "ShareGPT", "Alpaca"]
SHAPES: Mapping[ChatFormat, str] = {
    "messages": '{"messages": [{"role": ..., "content": ...}, ...]}',
    "completions": '{"prompt": ..., "completion": ...}',
    "ShareGPT": '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}',
    "Alpaca": '{"instruction": ..., "input": ..., "output": ...}',
}
_SIGNS: Mapping[ChatFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "completions": ("prompt", "completion"),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction",),
}
"""The fields of each format. A record's format is the first one whose fields it contains."""
ANY_SHAPE = f"each line must be {', '.join(list(SHAPES.values())[:-1])} or {SHAPES['Alpaca']}"
PREFERENCE_FIELDS = ("chosen", "rejected")
"""A record with both fields is a preference pair. Training on such pairs is not supported."""
FIELDS = ("messages", "prompt", "completion", "conversations", "instruction", "input", "output", "system")
REFUSED_FIELDS = ("history", *PREFERENCE_FIELDS)
FIELDS_OF_TEMPLATES = ("tools", "documents")
"""Values that a template receives in addition to the messages."""
COLUMNS = (*FIELDS, *REFUSED_FIELDS, *FIELDS_OF_TEMPLATES)
"""The columns to read from a table."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The usual roles in messages; a template may support others."""
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SHAREGPT_TOOLS = ("tool", "function", "function_call", "function_response", "observation", "tool_call", "tool_response")
_INSTEAD = f'write such conversations as {SHAPES["messages"][:-1]}, "tools": [...]}}'


def describe_formats(found: Iterable[ChatFormat]) -> str:
    """Return the names as text, such as `messages and completions`, in the order in which this file lists them."""
    there = set(found)
    return " and ".join(name for name in SHAPES if name in there)


class FormatError(ValueError):
    """Raised if a record does not match its format. The message states what was found and what is allowed."""

    def __init__(self, got: str, allowed: str):
        super().__init__(got)
        self.allowed = allowed


def find_format(record: Record) -> ChatFormat:
    """Return the format of a record, determined by its fields. Raises FormatError if no format matches."""
    # The fields determine the format, because file names are unreliable and data sets mix conventions.
    for name, signs in _SIGNS.items():
        if all(record.get(sign) is not None for sign in signs):
            return name
    if all(record.get(name) is not None for name in PREFERENCE_FIELDS):
        got = "preference pairs (`chosen`, `rejected`), but preference training (such as DPO) is not supported"
        wanted = f"{SHAPES['completions']} or {SHAPES['messages']}"
        raise FormatError(got, f"supervised fine-tuning is supported: write only the chosen replies, as {wanted}")
    raise FormatError(f"no conversation format has the fields {excerpt(', '.join(record)) or '(none)'}", ANY_SHAPE)


def format_in_file(record: Record, first: ChatFormat | None) -> ChatFormat:
    """Return the format of a record in a file whose first record has the format `first`. Messages and completions may
    be mixed. Raises FormatError for any other mixture, and for a record in no known format."""
    if first is None:
        return find_format(record)
    allowed = f"this file's first record is {first}: each must be {SHAPES[first]}"
    try:
        found = find_format(record)
    except FormatError as error:
        missing = [name for name in _SIGNS[first] if record.get(name) is None]
        raise FormatError(f"`{missing[0]}` is missing", allowed) from error
    if found != first and {found, first} != {"messages", "completions"}:
        raise FormatError(f"a {found} record among {first} records", f"{allowed}; a file has one format")
    return found


def to_messages(record: Record, of: ChatFormat) -> list[Record]:
    """Convert a conversation in one of the formats to messages for a template. Raises FormatError."""
    if of == "ShareGPT":
        if record.get("tools"):
            raise FormatError("`tools` are not read from ShareGPT", _INSTEAD)
        messages = [_system(record, "ShareGPT")] if record.get("system") else []
        for number, turn in enumerate(_turns(record, "conversations", "ShareGPT")):
            name = f"conversations[{number}]"
            role = _text(turn, "from", name, "ShareGPT")
            if role in SHAREGPT_TOOLS:
                raise FormatError(f"`{name}.from` is {show_kind(role)}; tools are not read from ShareGPT", _INSTEAD)
            if role not in SHAREGPT_ROLES:
                allowed = f"it may be {', '.join(SHAREGPT_ROLES)}"
                raise FormatError(f"`{name}.from` is {show_kind(role)}", allowed)
            if role == "system" and messages:
                raise FormatError(
                    f"`{name}.from` is 'system', which is allowed only in the first turn", "keep one, in the first turn"
                )
            messages.append({"role": SHAREGPT_ROLES[role], "content": _text(turn, "value", name, "ShareGPT")})
        return messages
    if of == "Alpaca":
        # The input follows the instruction, as in other training programs.
        if record.get("history"):
            turns = SHAPES["ShareGPT"]
            raise FormatError("`history` is not read from Alpaca", f"write multi-turn conversations as {turns}")
        question = _text(record, "instruction", "", "Alpaca")
        if record.get("input") not in (None, ""):
            question = f"{question}\n{_text(record, 'input', '', 'Alpaca')}"
        reply = {"role": "assistant", "content": _text(record, "output", "", "Alpaca")}
        system = [_system(record, "Alpaca")] if record.get("system") else []
        return [*system, {"role": "user", "content": question}, reply]
    messages = _turns(record, "messages", "messages")
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        role = _text(message, "role", name, "messages")
        near = SHAREGPT_ROLES.get(role) or closest(role, ROLES)
        if near and role not in ROLES:
            raise FormatError(
                f"`{name}.role` is {show_kind(role)}", f"did you mean {near}? roles are {', '.join(ROLES)}"
            )
        said = ("content", "tool_calls", "function_call", "thinking", "reasoning_content")
        if all(message.get(key) is None for key in said):
            raise FormatError(f"`{name}` has no `content`", f"each line must be {SHAPES['messages']}")
    return messages


def _turns(record: Record, name: str, of: ChatFormat) -> list[Record]:
    turns = record[name]
    if not isinstance(turns, list):
        raise FormatError(f"`{name}` is {show_kind(turns)}", f"each line must be {SHAPES[of]}")
    if not turns:
        raise FormatError(f"`{name}` is empty", f"each line must be {SHAPES[of]}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise FormatError(f"`{name}[{number}]` is {show_kind(turn)}", f"each line must be {SHAPES[of]}")
    return turns


def _system(record: Record, of: ChatFormat) -> Record:
    return {"role": "system", "content": _text(record, "system", "", of)}


def _text(section: Record, key: str, within: str, of: ChatFormat) -> str:
    value = section.get(key)
    name = f"{within}.{key}" if within else key
    if isinstance(value, str):
        return value
    got = f"`{name}` is missing" if value is None else f"`{name}` is {show_kind(value)}, not text"
    raise FormatError(got, f"each line must be {SHAPES[of]}")


@dataclass(frozen=True)
class Conversation:
    text: str
    spans: Sequence[Span]
    """The parts of `text` to train on, as character ranges."""
    format: ChatFormat

    @property
    def is_chat(self) -> bool:
        """Return whether a template has already inserted all special tokens. (For a plain completion, the tokenizer
        adds its own.)"""
        return self.format != "completions"


def parse_record(
    record: Record, of: ChatFormat, template: Callable[[], ChatTemplate], *, learn_all: bool
) -> Conversation:
    """Parse one line in a given format.

    Raises FormatError for mistakes in it, ValueError if the template rejects it, and RecipeError if there is no chat
    template."""
    if of == "completions":
        prompt = record["prompt"]
        completion = record["completion"]
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
    """Look up the chat template only when a conversation needs it, because completions do not need one."""
    return find_template(expand(tokenizer) if tokenizer else None, wanted)


def question(data: DataSpec, prompt: str) -> str | None:
    """Render `prompt` as a user message, up to the start of the reply; None if `data` has no template (completions)."""
    if data.source != "chat":
        return None
    try:
        template = template_of(data.tokenizer.path, data.chat_template)
    except RecipeError:
        return None
    return template.render([{"role": "user", "content": prompt}], asks=True)


def keep_template(data: DataSpec, folder: Path) -> None:
    """Write the template for the conversations in `data` to `folder` unless it already exists. For completions, write
    nothing."""
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
