"""The process that runs chat templates, which are untrusted programs and may loop or use more and more memory.

It writes one JSON line for each JSON line that it reads. The first line is the template; each following line is a
conversation. The kernel kills the process when a conversation takes more CPU time than the first argument allows (in
seconds), and its memory is limited. This file imports nothing from trainspec, so that it starts in a tenth of a
second."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_LIMIT_BYTES = 2**30
OUTPUT_LIMIT_CHARS = 2**24
OTHER_CONTENT = "\ue000"
"""Replaces a reply in order to find its span. It is a private-use character, so no reply starts or ends with it."""

Message = Mapping[str, object]
Span = tuple[int, int]


class Generation(Extension):
    """Ignores the tag `{% generation %}`, which marks replies for transformers' masks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(source: str) -> Any:
    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=True, **options)


def render(template: Any, messages: Sequence[Message], values: Mapping[str, object]) -> str:
    text: str = template.render(messages=messages, **values)
    if len(text) > OUTPUT_LIMIT_CHARS:
        raise ValueError(f"it writes {len(text):,} characters; at most {OUTPUT_LIMIT_CHARS:,} are allowed")
    return text


def difference(text: str, other: str) -> Span:
    """Return the span of `text` that differs from `other`."""
    shortest = min(len(text), len(other))
    start = next((i for i in range(shortest) if text[i] != other[i]), shortest)
    most = shortest - start
    same = next((i for i in range(most) if text[-1 - i] != other[-1 - i]), most)
    return start, len(text) - same


def answer(
    template: Any, messages: Sequence[Message], values: Mapping[str, object], replies: bool
) -> dict[str, object]:
    """Return {text, spans}, or {fault} with the template's own message."""
    try:
        text = render(template, messages, values)
        spans = []
        # A reply's span is the part of the text that changes with its content.
        for number, message in enumerate(messages if replies else ()):
            if isinstance(message, dict) and message.get("role") == "assistant" and message.get("content"):
                changed = [*messages[:number], {**message, "content": OTHER_CONTENT}, *messages[number + 1 :]]
                spans.append(difference(text, render(template, changed, values)))
        return {"text": text, "spans": [span for span in spans if span[0] < span[1]]}
    except TemplateError as error:
        return {"fault": str(error)}
    except MemoryError:
        return {"fault": f"it takes more than {MEMORY_LIMIT_BYTES // 2**20} MiB of memory"}
    except Exception as error:  # an untrusted program may raise any exception
        return {"fault": f"{type(error).__name__}: {error}"}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    lines = iter(sys.stdin.readline, "")
    cpu_limit_s = float(sys.argv[1])
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    try:
        template = compile_template(json.loads(next(lines)))
        status = {}
    except Exception as error:
        template = None
        status = {"fault": f"{type(error).__name__}: {error}"}
    print(json.dumps(status, allow_nan=False), flush=True)
    for line in lines if template is not None else ():
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        answered = answer(template, **json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answered, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
