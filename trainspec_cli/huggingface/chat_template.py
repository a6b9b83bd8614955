"""Chat templates: a conversation as the text that its model was trained on, and which of it the assistant says.

Templates are programs of others: they run in Jinja's sandbox, which lets them change nothing and reach nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.huggingface.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG
from trainspec_cli.reading.files import expand

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What `data.chat_template=chatml` names."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
OTHER_CONTENT = "\ue000"
"""Stands in for a reply, to see where it goes; of the private use area, so that no reply begins or ends with it."""
SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    tokens: Mapping[str, str]
    """Names of special tokens, which templates may use."""

    def render(self, messages: Sequence[Message], *, asks: bool = False, **extra: Any) -> str:
        """`asks`: up to where the assistant's reply begins. Raises ValueError in the template's own words where it
        refuses the conversation."""
        import jinja2

        try:
            return self._compiled.render(messages=messages, add_generation_prompt=asks, **self.tokens, **extra)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template says: {error}") from error

    def replies(self, messages: Sequence[Message], **extra: Any) -> tuple[str, list[Span]]:
        """-> (the whole text, where in it the assistant's replies stand).

        A reply is what changes when its content does, so that templates may trim it, or leave out earlier thoughts.
        """
        text = self.render(messages, **extra)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant" and message.get("content"):
                changed = [*messages[:number], {**message, "content": OTHER_CONTENT}, *messages[number + 1 :]]
                spans.append(_difference(text, self.render(changed, **extra)))
        return text, [span for span in spans if span[0] < span[1]]

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise _bad_template(f"the chat template is no Jinja: {error}") from error


def _difference(text: str, other: str) -> Span:
    """The part of `text` that `other` has something else for."""
    shortest = min(len(text), len(other))
    start = next((i for i in range(shortest) if text[i] != other[i]), shortest)
    most = shortest - start
    same = next((i for i in range(most) if text[-1 - i] != other[-1 - i]), most)
    return start, len(text) - same


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation_tag() -> Any:
    """`{% generation %}` marks replies for transformers' masks; here it changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def find_template(tokenizer: Path | None, wanted: str | None) -> ChatTemplate:
    """`wanted` (`chatml`, or a file), else what stands beside `tokenizer`. Raises RecipeError where there is none."""
    folder = tokenizer.parent if tokenizer else None
    config = _read_config(folder / TOKENIZER_CONFIG) if folder else {}
    tokens = {key: _token_text(config[key]) for key in SPECIAL_KEYS if config.get(key)}
    if wanted is not None:
        return ChatTemplate(_read_wanted(wanted), tokens)
    source = None
    if folder is not None:
        beside = folder / CHAT_TEMPLATE
        source = beside.read_text(encoding="utf-8") if beside.is_file() else _default(config.get("chat_template"))
    if source is None:
        where = (
            f"beside {tokenizer} there is no chat template" if tokenizer else "there is no tokenizer with a template"
        )
        raise RecipeError(Problem("missing_file", where, "data.chat_template", _HINT))
    return ChatTemplate(source, tokens)


_HINT = "type data.chat_template=chatml, or name a file of Jinja; or begin with a chat model's folder (init.from)"


def _read_wanted(wanted: str) -> str:
    if wanted == "chatml":
        return CHATML
    file = expand(wanted)
    if not file.is_file():
        raise RecipeError(Problem("missing_file", f"there is no file {file.absolute()}", "data.chat_template", _HINT))
    return file.read_text(encoding="utf-8")


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise _bad_template(f"{file} is no JSON object: {error}") from error


def _default(template: Any) -> str | None:
    """Some tokenizers have several by name, for tools or retrieval."""
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return template


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _bad_template(message: str) -> RecipeError:
    return RecipeError(Problem("bad_template", message, "data.chat_template", _HINT))
