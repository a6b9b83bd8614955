"""What the process of chat templates does with a line, asked for in this process."""

from __future__ import annotations

import io
import json
import signal
import sys
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.data.huggingface import template_worker as worker

TALK = [
    {"role": "user", "content": "same"},
    {"role": "assistant", "content": "same"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "é"},
]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ end }}"


def ask(source: str, messages: list[dict[str, str]] = TALK, *, replies: bool = True, **values: object) -> dict:
    return worker.answer(worker.compile_template(source), messages, values, replies)


@given(st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("xy", max_size=4), st.text("z", max_size=4))
def test_the_difference_is_what_stands_between_what_both_share(head: str, tail: str, content: str, other: str) -> None:
    span = worker.difference(head + content + tail, head + other + tail)
    assert (content or other) == "" or span == (len(head), len(head) + len(content))


def test_replies_are_the_parts_that_change_with_their_content() -> None:
    answered = ask(PLAIN, end="</s>")
    assert answered["text"] == "user:same;assistant:same;assistant:;user:again;assistant:é;</s>"
    assert [answered["text"][start:end] for start, end in answered["spans"]] == ["same", "é"]
    assert [start for start, _ in answered["spans"]] == [20, 57]


def test_replies_are_looked_for_only_where_they_are_wanted() -> None:
    assert ask(PLAIN, replies=False)["spans"] == []


def test_a_reply_that_the_template_leaves_out_has_no_span() -> None:
    left_out = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert ask(left_out) == {"text": "sameagain", "spans": []}


def test_templates_are_read_as_transformers_reads_them() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}\n"
        "        {% break %}\n"
        "    {% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}|\n"
        "{% endfor %}"
    )
    talk = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "more"}]
    assert ask(source, talk)["text"] == '{"role": "user", "content": "<é>"}|\n'
    indented = ask("{{ messages | tojson(indent=1) }}", [{"role": "user", "content": "a"}])["text"]
    assert indented == json.dumps([{"role": "user", "content": "a"}], indent=1)
    assert ask("{{ strftime_now('%Y') }}")["text"] in {str(datetime.now().year), str(datetime.now().year + 1)}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'x' * 11 }}", "ValueError: it writes 11 characters; at most 10 are allowed"),
    ],
)
def test_what_a_template_fails_of_is_told(source: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "OUTPUT_LIMIT_CHARS", 10)
    assert ask(source) == {"fault": fault}
    assert ask("{{ 'x' * 10 }}")["text"] == "x" * 10


def test_a_template_that_takes_all_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(worker, "render", render)
    ((kind, fault),) = ask("").items()
    assert kind == "fault" and "1024 MiB" in fault


def serve(monkeypatch: pytest.MonkeyPatch, *lines: object) -> tuple[list[dict], list[float], list[tuple]]:
    """What the process answers to `lines`, the processor time that it allows itself each time, and its limits."""
    timers: list[float] = []
    limits: list[tuple] = []
    output = io.StringIO()
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: timers.append(seconds))
    monkeypatch.setattr(sys, "argv", ["template_worker.py", "2.5"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(line)}\n" for line in lines)))
    monkeypatch.setattr(sys, "stdout", output)
    worker.main()
    return [json.loads(line) for line in output.getvalue().splitlines()], timers, limits


def test_each_line_is_answered_within_the_time_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"messages": TALK[:2], "values": {}, "replies": False}
    answers, timers, limits = serve(monkeypatch, PLAIN, asked, asked)
    said = {"text": "user:same;assistant:same;", "spans": []}
    assert answers == [{}, said, said]
    assert timers == [2.5, 2.5, 0, 2.5, 0], "to compile, and for each conversation from its beginning"
    assert limits == [(worker.resource.RLIMIT_AS, (2**30, 2**30))]


def test_what_is_no_template_is_said_and_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,), _, _ = serve(monkeypatch, "{% if %}", {"messages": [], "values": {}, "replies": False})
    assert told["fault"].startswith("TemplateSyntaxError: ")
