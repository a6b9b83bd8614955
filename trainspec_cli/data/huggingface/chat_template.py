"""Chat templates: render a conversation in the text format that its model was trained on, and find the assistant's
replies in it.

Templates are untrusted programs. They run in Jinja's sandbox, which prevents access to anything outside, in a separate
process with limited time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import UnreadableFileError, exists, expand, how_to_copy, read_object, read_text
from trainspec_cli.data.huggingface.folder import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of `data.chat_template=chatml`."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_TEMPLATE_BYTES = 2**20
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that transformers passes to a template by name."""

Message = Mapping[str, object]
Span = tuple[int, int]
WORKER = Path(__file__).with_name("template_worker.py")
CPU_LIMIT_S = 10.0
"""CPU time allowed per conversation, in seconds."""


@dataclass(frozen=True)
class TemplateAnswer:
    """A line from the template's process: a rendered text and the spans of its replies, or the error that prevented
    rendering."""

    text: str = ""
    spans: Sequence[Span] = ()
    fault: str | None = None


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    tokens: Mapping[str, str]
    """The special tokens that templates may use, by name."""

    def render(self, messages: Sequence[Message], *, asks: bool = False, **extra: object) -> str:
        """Render a conversation or, with `asks`, only up to the start of the assistant's reply.

        Raises ValueError with the template's own message if the template rejects the conversation, fails, or exceeds
        the time or memory limit."""
        return self._ask(messages, {"add_generation_prompt": asks, **self.tokens, **extra}).text

    def replies(self, messages: Sequence[Message], **extra: object) -> tuple[str, list[Span]]:
        """Return the full text, and the spans of the assistant's replies. Raises the same errors as `render`.

        A reply's span is the text that changes with the reply's content, so templates may trim it or omit thoughts."""
        answer = self._ask(messages, {"add_generation_prompt": False, **self.tokens, **extra}, replies=True)
        return answer.text, [(start, end) for start, end in answer.spans]

    def _ask(
        self, messages: Sequence[Message], values: Mapping[str, object], *, replies: bool = False
    ) -> TemplateAnswer:
        answer = self._process.ask({"messages": messages, "values": values, "replies": replies})
        if answer.fault is not None:
            raise ValueError(f"the chat template failed: {answer.fault}")
        return answer

    @cached_property
    def _process(self) -> TemplateProcess:
        process = TemplateProcess(self.source)
        if process.fault:
            raise _bad_template(f"the chat template is not valid Jinja: {process.fault}")
        return process


def find_template(tokenizer: Path | None, wanted: str | None) -> ChatTemplate:
    """Return the template `wanted` (`chatml`, or a file) or, by default, the one in the folder of `tokenizer`.

    Raises RecipeError if there is none."""
    folder = tokenizer.parent if tokenizer else None
    config = _read_config(folder / TOKENIZER_CONFIG) if folder else {}
    # In folders that transformers wrote before 2024, the special tokens may be named only in this file.
    older = _read_config(folder / SPECIAL_TOKENS) if folder else {}
    special = {key: value for key in SPECIAL_KEYS if (value := config.get(key) or older.get(key))}
    tokens = {key: str(t.get("content", "") if isinstance(t, Mapping) else t) for key, t in special.items()}
    source: JsonValue = None
    if wanted == "chatml":
        source = CHATML
    elif wanted is not None:
        file = expand(wanted)
        if not exists(file):
            hint = how_to_copy(wanted) or _HINT
            raise RecipeError(Problem("missing_file", f"no such file: {file.absolute()}", "data.chat_template", hint))
        source = _read_template(file)
    elif folder is not None and exists(folder / CHAT_TEMPLATE):
        source = _read_template(folder / CHAT_TEMPLATE)
    else:
        source = config.get("chat_template")
        if isinstance(source, list):  # some tokenizers have several named templates, such as for tools or retrieval
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
    if not isinstance(source, str):
        got = f"no chat template in the folder of {tokenizer}" if tokenizer else "no tokenizer with a chat template"
        raise RecipeError(Problem("missing_file", got, "data.chat_template", _HINT))
    return ChatTemplate(source, tokens)


_HINT = "set data.chat_template=chatml, or name a Jinja file; or start from a chat model's folder (init.from)"


def _read_template(file: Path) -> str:
    try:
        return read_text(file, MAX_TEMPLATE_BYTES)
    except UnreadableFileError as error:
        raise _bad_template(str(error)) from error


def _read_config(file: Path) -> JsonObject:
    if not exists(file):
        return {}
    try:
        return read_object(file)
    except UnreadableFileError as error:
        raise _bad_template(str(error)) from error


def _bad_template(message: str) -> RecipeError:
    return RecipeError(Problem("bad_template", message, "data.chat_template", _HINT))


class TemplateProcess:
    """Runs templates in a separate process, which is restarted if the kernel has killed it for exceeding a limit."""

    def __init__(self, source: str):
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self.fault = self._start().fault
        """Why the template cannot run at all; empty if it can."""

    def ask(self, question: Mapping[str, object]) -> TemplateAnswer:
        if self._process is None:
            self._start()
        answer = self._exchange(json.dumps(question, default=str, allow_nan=True))
        return answer or TemplateAnswer(fault=f"it took more than {CPU_LIMIT_S:g} s for one conversation")

    def _start(self) -> TemplateAnswer:
        # The worker must import the installed jinja2, and nothing from the working directory.
        environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(CPU_LIMIT_S)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        answer = self._exchange(json.dumps(self._source, allow_nan=False))
        fault = f"it took more than {CPU_LIMIT_S:g} s to compile, or its process does not start"
        return answer or TemplateAnswer(fault=fault)

    def _exchange(self, line: str) -> TemplateAnswer | None:
        """Send a line and return the answer; None if the process exited instead."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self.close()
            return None
        return TemplateAnswer(**json.loads(reply))

    def close(self) -> None:
        """End the process. It would also exit by itself when its standard input is closed."""
        process = self._process
        self._process = None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            process.kill()
            process.wait()

    def __del__(self) -> None:
        self.close()
