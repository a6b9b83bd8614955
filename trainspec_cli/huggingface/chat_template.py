"""Chat templates: render a conversation as the text its model was trained on, and find the assistant's replies in it.

Templates are untrusted programs: they run in Jinja's sandbox, which keeps them from changing or reaching anything, in
a process of their own with bounded time and memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.huggingface.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG
from trainspec_cli.huggingface.template_process import TemplateProcess
from trainspec_cli.reading.files import UnreadableFileError, exists, expand, read_text
from trainspec_cli.reading.json_file import read_object

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of `data.chat_template=chatml`."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_TEMPLATE_BYTES = 2**20
SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    tokens: Mapping[str, str]
    """Special tokens by name, which templates may use."""

    def render(self, messages: Sequence[Message], *, asks: bool = False, **extra: Any) -> str:
        """Render a conversation; with `asks`, up to where the assistant's reply begins.

        Raises ValueError with the template's own message if it refuses the conversation, fails, or exceeds the limits
        of time or memory.
        """
        return str(self._ask(messages, {"add_generation_prompt": asks, **self.tokens, **extra})["text"])

    def replies(self, messages: Sequence[Message], **extra: Any) -> tuple[str, list[Span]]:
        """Return the whole text, and the spans of the assistant's replies. Raises as `render` does.

        A reply is found as the text that changes with its content, so templates may trim it or leave out thoughts.
        """
        answer = self._ask(messages, {"add_generation_prompt": False, **self.tokens, **extra}, replies=True)
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def _ask(self, messages: Sequence[Message], values: dict[str, Any], *, replies: bool = False) -> dict[str, Any]:
        answer = self._process.ask({"messages": messages, "values": values, "replies": replies})
        if "fault" in answer:
            raise ValueError(f"the chat template failed: {answer['fault']}")
        return answer

    @cached_property
    def _process(self) -> TemplateProcess:
        process = TemplateProcess(self.source)
        if process.fault:
            raise _bad_template(f"the chat template is not valid Jinja: {process.fault}")
        return process


def find_template(tokenizer: Path | None, wanted: str | None) -> ChatTemplate:
    """Return the template `wanted` (`chatml`, or a file), else the one beside `tokenizer`.

    Raises RecipeError if none.
    """
    folder = tokenizer.parent if tokenizer else None
    config = _read_config(folder / TOKENIZER_CONFIG) if folder else {}
    special = {key: config[key] for key in SPECIAL_KEYS if config.get(key)}
    tokens = {key: str(t.get("content", "") if isinstance(t, Mapping) else t) for key, t in special.items()}
    if wanted is not None:
        return ChatTemplate(_read_wanted(wanted), tokens)
    source = None
    if folder is not None:
        beside = folder / CHAT_TEMPLATE
        source = _read_template(beside) if exists(beside) else _default(config.get("chat_template"))
    if source is None:
        where = (
            f"there is no chat template beside {tokenizer}" if tokenizer else "there is no tokenizer with a template"
        )
        raise RecipeError(Problem("missing_file", where, "data.chat_template", _HINT))
    return ChatTemplate(source, tokens)


_HINT = "type data.chat_template=chatml, or name a Jinja file; or begin with a chat model's folder (init.from)"


def _read_wanted(wanted: str) -> str:
    if wanted == "chatml":
        return CHATML
    file = expand(wanted)
    if not exists(file):
        raise RecipeError(Problem("missing_file", f"there is no file {file.absolute()}", "data.chat_template", _HINT))
    return _read_template(file)


def _read_template(file: Path) -> str:
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except UnreadableFileError as error:
        raise _bad_template(str(error)) from error


def _read_config(file: Path) -> dict[str, Any]:
    if not exists(file):
        return {}
    try:
        return read_object(file)
    except UnreadableFileError as error:
        raise _bad_template(str(error)) from error


def _default(template: Any) -> str | None:
    """Return the default template; some tokenizers have several by name, for tools or retrieval."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _bad_template(message: str) -> RecipeError:
    return RecipeError(Problem("bad_template", message, "data.chat_template", _HINT))
