"""Conversations become rows: whole documents, and of them the replies alone to learn."""

import json
from dataclasses import replace

import numpy as np
import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.chat import describe, parse_record, question
from trainspec_cli.data.corpus.prepare import check_text, prepare
from trainspec_cli.data.corpus.rows import IGNORED, PADDING_DOCUMENT, Packed
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.data.huggingface.chat_template import ChatTemplate
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

TALK = {"messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a fox"}]}


def lines(count: int) -> list[dict]:
    talks = []
    for number in range(count):
        reply = {"role": "assistant", "content": f"reply {number} " * (1 + number % 5)}
        talks.append({"messages": [{"role": "user", "content": f"question {number}"}, reply]})
        talks.append({"prompt": f"{number} + 1 = ", "completion": str(number + 1)})
    return talks


@pytest.fixture
def prepared(tmp_path, cache):
    def make(records, **options) -> TokenFolder:
        file = tmp_path / "talks.jsonl"
        file.write_text("\n".join(json.dumps(record) for record in records))
        options = {"chat_template": "chatml", "tokenizer": TokenizerSpec(400), **options}
        return TokenFolder.open(prepare(DataSpec(64, "chat", str(file), **options)))

    return make


def learnt_texts(folder: TokenFolder, rows) -> list[str]:
    """What each row wants to be said, document by document."""
    tokenizer = bpe.load(folder.path / "tokenizer.json")
    texts = []
    for row in (rows.read(index) for index in range(len(rows))):
        for document in np.unique(row.documents[row.documents != PADDING_DOCUMENT]):
            targets = row.targets[row.documents == document]
            texts.append(tokenizer.decode(targets[targets != IGNORED].tolist(), skip_special_tokens=False))
    return sorted(texts)


def test_replies_and_what_ends_them_are_learnt(prepared):
    folder = prepared(lines(30))
    learnt = learnt_texts(folder, Packed(folder, "train", 64)) + learnt_texts(folder, Packed(folder, "heldout", 64))
    replies = [f"reply {n} " * (1 + n % 5) + "<|im_end|>" for n in range(30)]
    sums = [f"{n + 1}<|endoftext|>" for n in range(30)]
    assert sorted(learnt) == sorted([*replies, *sums])


def test_a_part_of_the_conversations_is_held_out(prepared):
    folder = prepared(lines(40), heldout_fraction=0.2)
    train, heldout = (learnt_texts(folder, Packed(folder, split, 64)) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 80 and not set(train) & set(heldout)
    assert 1 <= len(heldout) <= 40
    assert (folder.manifest.train.documents, folder.manifest.heldout.documents) == (len(train), len(heldout))


def test_all_of_a_conversation_can_be_learnt(prepared):
    folder = prepared([*lines(3), TALK], loss_on="all")
    learnt = learnt_texts(folder, Packed(folder, "train", 64)) + learnt_texts(folder, Packed(folder, "heldout", 64))
    asked, answered = (f"{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TALK["messages"])
    assert f"{asked}<|im_start|>{answered}" in learnt


def test_rows_hold_whole_documents_and_know_what_counts(prepared):
    folder = prepared(lines(40))
    rows = Packed(folder, "train", 64)
    for index in range(len(rows)):
        row = rows.read(index)
        assert rows.counted(index) == int((row.targets != IGNORED).sum()) > 0
        inside = row.documents != PADDING_DOCUMENT
        assert (np.diff(row.documents[inside]) >= 0).all() and not inside[int(inside.sum()) :].any()
    filled = sum(int((rows.read(i).documents != PADDING_DOCUMENT).sum()) for i in range(len(rows)))
    assert filled / (64 * len(rows)) > 0.9, "best fit leaves little room"


def test_what_is_too_long_loses_its_end(prepared):
    long = {"prompt": "count: ", "completion": "one two three " * 60}
    folder = prepared([*lines(5), long])
    whole, short = Packed(folder, "train", 400), Packed(folder, "train", 64)
    assert (whole.cut, short.cut) == (0, 1)
    longest = int(np.diff(folder.documents("train").starts).max()) - 1
    assert (Packed(folder, "train", longest).cut, Packed(folder, "train", longest - 1).cut) == (0, 1)
    data = DataSpec(64, "chat")
    (note,) = Collection.open(folder.path).check(data, 400)
    assert note.startswith("1 conversations ") and "data.seq_len=64" in note
    assert max(short.counted(index) for index in range(len(short))) <= 64


LONG_PROMPT = {"role": "system", "content": "obey " * 100}


def test_replies_that_all_begin_behind_a_row_are_refused_by_file_and_line(prepared, tmp_path):
    talks = [{"messages": [LONG_PROMPT, *talk["messages"]]} for talk in lines(20)[::2]]
    with pytest.raises(RecipeError) as error:
        prepared([{"prompt": "", "completion": ""}, *talks])
    (problem,) = error.value.problems
    assert (problem.code, problem.path) == ("too_little_data", "data.seq_len")
    assert (problem.file, problem.line) == (str(tmp_path / "talks.jsonl"), 2)
    assert "each of 19 conversations" in problem.message or "each of 20 conversations" in problem.message
    folder = prepared([*talks, *lines(4)])
    rows = Packed(folder, "train", 64)
    assert rows.silenced > 10 and not rows.is_empty and len(learnt_texts(folder, rows)) > 0
    (note,) = Collection.open(folder.path).check(DataSpec(64, "chat"), 400)
    assert f"{rows.silenced} of them " in note


def test_validate_finds_replies_behind_a_row_without_preparing(tmp_path, cache):
    file, tokenizer = tmp_path / "talks.jsonl", tmp_path / "tokenizer.json"
    bpe.train(["question reply obey " * 50], 300, ("<|im_start|>", "<|im_end|>")).save(str(tokenizer))
    talks = [{"messages": [LONG_PROMPT, *talk["messages"]]} for talk in lines(5)[::2]]
    file.write_text("\n".join(map(json.dumps, talks)))
    data = DataSpec(64, "chat", str(file), chat_template="chatml", tokenizer=TokenizerSpec(path=str(tokenizer)))
    for check in (lambda: check_text(data, 2**20), lambda: prepare(data)):
        with pytest.raises(RecipeError) as error:
            check()
        assert [(one.code, one.file, one.line) for one in error.value.problems] == [("too_little_data", str(file), 1)]
    assert check_text(replace(data, seq_len=512), 2**20) == {"messages"}


def test_prepared_conversations_without_a_reply_in_a_row_are_refused_too(prepared):
    talks = [{"messages": [LONG_PROMPT, *talk["messages"]]} for talk in [*lines(9)[::2], TALK]]
    folder = prepared([*talks], loss_on="all")
    assert not Packed(folder, "train", 64).is_empty
    with pytest.raises(RecipeError):
        prepared(talks)
    kept = next(one for one in folder.path.parent.iterdir() if one != folder.path and (one / "tokenizer.json").exists())
    with pytest.raises(RecipeError) as error:
        prepare(DataSpec(64, "tokens", str(kept)))
    assert [(one.code, one.path) for one in error.value.problems] == [("too_little_data", "data.seq_len")]
    with pytest.raises(RecipeError, match="no training sample"):
        Collection.open(kept).order(DataSpec(64, "tokens"), seed=1)


def test_a_line_that_is_no_conversation_is_named(prepared):
    with pytest.raises(RecipeError, match=r"`messages` .*: \{'text': 'plain'\}") as raised:
        prepared([TALK, {"text": "plain"}])
    assert raised.value.problems[0].line == 2 and '{"messages": [{"role": ' in raised.value.problems[0].hint


def test_conversations_need_a_template_and_completions_none(prepared):
    with pytest.raises(RecipeError, match="with a chat template"):
        prepared([TALK], chat_template=None)
    prepared([{"prompt": f"{number} is ", "completion": str(number)} for number in range(9)], chat_template=None)


def test_nothing_to_learn_is_told(prepared):
    silent = [{"messages": [{"role": "user", "content": f"hello {number}"}]} for number in range(5)]
    with pytest.raises(RecipeError, match="has a reply"):
        prepared(silent)


@pytest.mark.parametrize(("learn_all", "start"), [(False, 7), (True, 0)])
def test_the_prompt_of_a_completion_is_learnt_only_with_all(learn_all, start):
    record = {"prompt": "count: ", "completion": "one two"}
    no_template = lambda: pytest.fail("a completion needs no template")  # noqa: E731
    found = parse_record(record, "completions", no_template, learn_all=learn_all)
    assert (found.text, list(found.spans), found.is_chat) == ("count: one two", [(start, 14)], False)


def test_a_question_is_rendered_up_to_its_reply():
    chat = DataSpec(64, "chat", "x", chat_template="chatml")
    assert question(chat, "why?") == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert question(replace(chat, source="jsonl"), "why?") is None
    assert question(replace(chat, chat_template=None), "why?") is None, "completions have no template"


def test_tools_and_documents_reach_the_template():
    template = ChatTemplate(
        "{{ tools }}{{ documents }}{{ other }}{% for m in messages %}{{ m.content }}{% endfor %}", {}
    )
    record = {"messages": TALK["messages"], "tools": ["T"], "documents": ["D"], "other": "no"}
    found = parse_record(record, "messages", lambda: template, learn_all=False)
    texts = "".join(message["content"] for message in TALK["messages"])
    assert found.text == f"['T']['D']{texts}" and found.is_chat
    assert [found.text[start:end] for start, end in found.spans] == ["a fox"]
    whole = parse_record(record, "messages", lambda: template, learn_all=True)
    assert list(whole.spans) == [(0, len(found.text))]


def test_what_conversations_depend_on(tmp_path, tokenizer):
    """A change of it prepares the data anew."""
    file = tmp_path / "tokenizer.json"
    chat = DataSpec(64, "chat", "x", chat_template="chatml", tokenizer=TokenizerSpec(path=str(file)))
    plain = describe(chat)
    assert plain == {"loss_on": chat.loss_on, "template": ["chatml"]}
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert describe(chat)["template"] == ["chatml", "{{ messages }}"]
    assert describe(replace(chat, loss_on="all"))["loss_on"] == "all" != plain["loss_on"]
    assert describe(replace(chat, source="jsonl")) == {}


def test_one_reply_among_silent_conversations_is_enough(prepared):
    silent = [{"messages": [{"role": "user", "content": f"hello {number}"}]} for number in range(5)]
    assert prepared([*silent, *lines(8)], heldout_fraction=0.1).manifest.train.documents > 5
