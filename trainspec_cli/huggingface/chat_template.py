"""Chat templates: a conversation as the text that its model was trained on, and which of it the assistant says.

Templates are programs of others: they run in Jinja's sandbox, which lets them change nothing and reach nothing, and in
a process of their own, whose time and memory are bounded.
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
"""What `data.chat_template=chatml` names."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_TEMPLATE_BYTES = 2**20
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
        refuses the conversation, fails on it, or takes more time or memory than a conversation may."""
        return str(self._ask(messages, {"add_generation_prompt": asks, **self.tokens, **extra})["text"])

    def replies(self, messages: Sequence[Message], **extra: Any) -> tuple[str, list[Span]]:
        """-> (the whole text, where in it the assistant's replies stand). Raises as `render`.

        A reply is what changes when its content does, so that templates may trim it, or leave out earlier thoughts.
        """
        told = self._ask(messages, {"add_generation_prompt": False, **self.tokens, **extra}, replies=True)
        return told["text"], [(start, end) for start, end in told["spans"]]

    def _ask(self, messages: Sequence[Message], values: dict[str, Any], *, replies: bool = False) -> dict[str, Any]:
        told = self._process.ask({"messages": messages, "values": values, "replies": replies})
        if "fault" in told:
            raise ValueError(f"the chat template says: {told['fault']}")
        return told

    @cached_property
    def _process(self) -> TemplateProcess:
        process = TemplateProcess(self.source)
        if process.fault:
            raise _bad_template(f"the chat template is no Jinja: {process.fault}")
        return process


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
        source = _read_template(beside) if exists(beside) else _default(config.get("chat_template"))
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
    """Some tokenizers have several by name, for tools or retrieval."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


def _bad_template(message: str) -> RecipeError:
    return RecipeError(Problem("bad_template", message, "data.chat_template", _HINT))
