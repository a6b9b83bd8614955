"""Conversations as people have them: messages, ShareGPT and Alpaca, which say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.chat import FormatError, find_format, format_in_file, to_messages
from trainspec_cli.data.corpus.prepare import check_text, prepare
from trainspec_cli.data.corpus.rows import open_rows
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

Read = Callable[[str, str], DataSpec]
HUMAN = {"from": "human", "value": "hi"}
SHAREGPT = {"conversations": [HUMAN, {"from": "gpt", "value": "ho"}]}
ALPACA = {"instruction": "say", "output": "ho"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def conversations(of: str) -> list[dict]:
    """The same forty in each format, some with a system's text and some with an input."""
    made = []
    for number in range(40):
        system, asked, reply = f"be {number}" * (number % 3 == 0), f"question {number}", f"reply {number} " * 3
        more = f"and more {number}" * (number % 2)
        if of == "Alpaca":
            made.append({"instruction": asked, "input": more, "output": reply} | ({"system": system} if system else {}))
            continue
        turns = [("system", system), ("user", f"{asked}\n{more}" if more else asked), ("assistant", reply)]
        turns = turns[not system :]
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        made.append(
            {"conversations": [{"from": names[role], "value": text} for role, text in turns], "id": number}
            if of == "ShareGPT"
            else {"messages": [{"role": role, "content": text} for role, text in turns]}
        )
    return made


@pytest.fixture
def read(tmp_path: Path, cache: Path) -> Read:
    def write(name: str, text: str) -> DataSpec:
        (tmp_path / name).write_text(text, encoding="utf-8")
        path = str(tmp_path / name)
        return DataSpec(48, "chat", path, chat_template="chatml", tokenizer=TokenizerSpec(400), heldout_fraction=0.2)

    return write


def prepared(data: DataSpec) -> tuple[TokenFolder, list[np.ndarray]]:
    """The folder, and the tokens, targets (with what is not learnt) and documents of every row."""
    folder = TokenFolder.open(prepare(data))
    found = []
    for split in ("train", "heldout"):
        rows = open_rows(folder, split, data)
        found += [
            array for row in map(rows.read, range(len(rows))) for array in (row.tokens, row.targets, row.documents)
        ]
    return folder, found


def test_the_same_conversations_give_the_same_tokens_and_losses_in_every_format(read: Read) -> None:
    told = {}
    for of in ("messages", "ShareGPT", "Alpaca"):
        records = conversations(of)
        texts = {".jsonl": "\n".join(map(json.dumps, records)), ".json": json.dumps(records, indent=1)}
        for suffix, text in texts.items():
            folder, told[of, suffix] = prepared(read(f"{of}{suffix}", text))
            assert folder.manifest.source["format"] == of
    first, *others = told.values()
    assert len(first) > 30 and any((row == -1).any() for row in first)
    for rows in others:
        assert len(rows) == len(first) and all(map(np.array_equal, rows, first))


def test_a_table_is_read_in_its_format(read: Read, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = read("a.jsonl", "\n".join(map(json.dumps, conversations("ShareGPT"))))
    _, lines = prepared(data)
    parquet.write_table(pyarrow.Table.from_pylist(conversations("ShareGPT")), tmp_path / "a.parquet")
    data = replace(data, path=str(tmp_path / "a.parquet"))
    folder, rows = prepared(data)
    assert folder.manifest.source["format"] == "ShareGPT" and all(map(np.array_equal, rows, lines))
    assert check_text(data, 2**20) == {"ShareGPT"}
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"no column `messages`.*: text") as error:
        check_text(data, 2**20)
    assert "conversations" in error.value.problems[0].hint


@pytest.mark.parametrize(
    ("record", "of"),
    [(MESSAGES, "messages"), (SHAREGPT, "ShareGPT"), (ALPACA, "Alpaca"),
     ({"prompt": "a", "completion": "b"}, "completions"), (MESSAGES | ALPACA | SHAREGPT, "messages"),
     ({"messages": None} | SHAREGPT, "ShareGPT")],
)  # fmt: skip
def test_the_fields_say_the_format(record: dict, of: Any) -> None:
    assert find_format(record) == of == format_in_file(record, None) == format_in_file(record, of)


def test_messages_and_completions_may_stand_in_one_file() -> None:
    assert format_in_file({"prompt": "a", "completion": "b"}, "messages") == "completions"
    assert format_in_file(MESSAGES, "completions") == "messages"


@pytest.mark.parametrize("record", [{}, {"text": "a"}, {"prompt": "a"}, {"input": "a", "output": "b"}])
def test_a_first_record_of_no_format_is_told_all(record: dict) -> None:
    with pytest.raises(FormatError, match="no conversation format") as error:
        format_in_file(record, None)
    assert all(
        f'{{"{name}": ' in error.value.allowed for name in ("messages", "prompt", "conversations", "instruction")
    )


@pytest.mark.parametrize(
    ("first", "record", "got", "allowed"),
    [
        ("ShareGPT", ALPACA, "a Alpaca .* ShareGPT", "a file has one format"),
        ("Alpaca", MESSAGES, "a messages .* Alpaca", "first record is Alpaca"),
        ("messages", SHAREGPT, "a ShareGPT .* messages", "a file has one format"),
        ("Alpaca", {"output": "a"}, "`instruction` is missing", '{"instruction": '),
        ("completions", {"prompt": "a"}, "`completion` is missing", '{"prompt": '),
    ],
)
def test_a_file_has_one_format(first: Any, record: dict, got: str, allowed: str) -> None:
    with pytest.raises(FormatError, match=got) as error:
        format_in_file(record, first)
    assert allowed in error.value.allowed


def share(*turns: object, **fields: object) -> dict:
    return {"conversations": list(turns), **fields}


def talk(*messages: object) -> dict:
    return {"messages": list(messages)}


SYSTEM = {"from": "system", "value": "be"}


@pytest.mark.parametrize(
    ("record", "got", "allowed"),
    [
        (share({"from": "humann", "value": "a"}), "`conversations[0].from` is 'humann'", "system, human, user"),
        (share(HUMAN, {"from": "gpt"}), "`conversations[1].value` is missing", '"value": ...'),
        (share(HUMAN, {"value": "a"}), "`conversations[1].from` is missing", '"from": "human"'),
        (share(HUMAN, {"from": "gpt", "value": 3}), "`conversations[1].value` is 3,", '"value": ...'),
        (share(HUMAN, {"from": "observation", "value": "a"}), "is 'observation'; ", '"tools"'),
        (share(HUMAN, {"from": "function_call", "value": "a"}), "not read from ShareGPT", '"tools"'),
        (share(HUMAN, tools='[{"name": "a"}]'), "`tools` are not read from ShareGPT", '"messages"'),
        (share(HUMAN, SYSTEM), "`conversations[1].from` is 'system'", "keep one"),
        (share(SYSTEM, HUMAN, system="be"), "`conversations[0].from` is 'system'", "keep one"),
        (share("a"), "`conversations[0]` is 'a'", '"conversations"'),
        (share(), "`conversations` is empty", '"conversations"'),
        ({"conversations": "a"}, "`conversations` is 'a'", '"conversations"'),
        ({"instruction": "a"}, "`output` is missing", '"output"'),
        ({"instruction": 3, "output": "b"}, "`instruction` is 3,", '"instruction"'),
        (ALPACA | {"input": 3}, "`input` is 3,", '"input"'),
        (ALPACA | {"system": 3}, "`system` is 3,", '"instruction"'),
        (ALPACA | {"history": [["a", "b"]]}, "`history` ", '"conversations"'),
        (talk("hello"), "`messages[0]` is 'hello'", '"messages"'),
        ({"messages": "hello"}, "`messages` is 'hello'", '"messages"'),
        (talk(), "`messages` is empty", '"messages"'),
        (talk({"content": "a"}), "`messages[0].role` is missing", '"role"'),
        (talk({"role": "user"}), "`messages[0]` has no `content`", '"content"'),
        (talk({"role": "asistant", "content": "a"}), "`messages[0].role` is 'asistant'", "did you mean assistant?"),
        (talk({"role": "gpt", "content": "a"}), "`messages[0].role` is 'gpt'", "did you mean assistant?"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_record_is_said(record: dict, got: str, allowed: str) -> None:
    with pytest.raises(FormatError) as error:
        to_messages(record, find_format(record))
    assert got in str(error.value) and allowed in error.value.allowed


def test_a_template_may_know_other_roles_and_calls_of_tools() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    spoken = talk({"role": "ipython", "content": "a"}, calls, {"role": "critic", "content": "b"})
    assert to_messages(spoken, "messages") == spoken["messages"]


MIXED = [SHAREGPT, {"conversations": 7}, ALPACA, 3, SHAREGPT, {"text": "a"}, share({"from": "tool", "value": "a"})]


def test_all_wrong_lines_are_named_with_their_place(read: Read) -> None:
    with pytest.raises(RecipeError) as error:
        check_text(read("a.jsonl", "\n".join(map(json.dumps, MIXED))), 2**20)
    assert [problem.line for problem in error.value.problems] == [2, 3, 4, 6, 7]


def test_all_wrong_records_of_an_array_are_named_with_their_place(read: Read) -> None:
    lines = ",\n".join(map(json.dumps, MIXED))
    with pytest.raises(RecipeError) as error:
        check_text(read("a.json", f"[\n{lines}\n"), 2**20)
    assert [problem.line for problem in error.value.problems] == [3, 4, 5, 7, 8, 9]
    assert [problem.message[:8] for problem in error.value.problems[:-1]] == [
        *("record 2", "record 3", "record 4", "record 6", "record 7")
    ]
    assert "JSON array" in error.value.problems[-1].message
    with pytest.raises(RecipeError) as error:
        check_text(read("a.json", json.dumps([7] * 100)), 2**20)
    (problem,) = error.value.problems
    assert problem.message.startswith("record 1: not a JSON object: 7; ") and " 99 other lines" in problem.message


@pytest.mark.parametrize("turns", [str, lambda text: [{"role": "assistant", "content": text}]])
@pytest.mark.parametrize("table", [False, True])
def test_preference_pairs_are_refused_once(tmp_path: Path, read: Read, turns: Callable, table: bool) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": turns(f"{n}"), "rejected": turns("no")} for n in range(100)]
    if table:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "a.parquet")
        data = replace(read("a.jsonl", ""), path=str(tmp_path / "a.parquet"))
    else:
        data = read("a.jsonl", "\n".join(map(json.dumps, pairs)))
    with pytest.raises(RecipeError) as error:
        check_text(data, 2**20)
    (problem,) = error.value.problems
    assert (problem.code, problem.line) == ("bad_document", 1)
    assert "preference training" in problem.message
    assert " 99 other lines" in problem.message and '{"prompt": ..., "completion": ...}' in problem.hint


def test_half_a_surrogate_pair_is_refused(read: Read) -> None:
    with pytest.raises(RecipeError, match=r"surrogate pair, \\ud800"):
        check_text(read("a.jsonl", json.dumps(ALPACA | {"output": "\ud800"})), 2**20)


def test_an_array_that_is_not_utf8_or_too_large_is_named(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read("a.json", "")
    Path(data.path or "").write_bytes(b'\xef\xbb\xbf[{"instruction": "\xff", "output": "a"}]')
    with pytest.raises(RecipeError, match=r"byte 21 \(0xff\)"):
        check_text(data, 2**20)
    monkeypatch.setattr("trainspec_cli.data.corpus.records.MAX_ARRAY_BYTES", 8)
    with pytest.raises(RecipeError, match="read as a whole") as error:
        check_text(data, 2**20)
    assert "jq -c '.[]' a.json > a.jsonl" in error.value.problems[0].hint


def test_below_a_folder_json_is_read_where_a_glob_asks_for_it(read: Read, tmp_path: Path) -> None:
    data = replace(read("a.json", json.dumps([ALPACA])), path=str(tmp_path))
    kinds = (".jsonl", ".parquet", ".arrow")
    with refused(RecipeError, "missing_file", "data.path", *kinds, "data.path='FOLDER/**/*.json'"):
        check_text(data, 2**20)
    assert check_text(replace(data, path=f"{tmp_path}/*.json"), 2**20) == {"Alpaca"}
