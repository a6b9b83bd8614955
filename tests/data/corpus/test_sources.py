from __future__ import annotations

import ast
import io
import json
import os
from pathlib import Path

import pytest
from lab.problems import assert_problems, refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.core.printable import Style
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.data.corpus.sources import documents
from trainspec_cli.recipe.compose.folders import locate
from trainspec_cli.recipe.keys.run import DataSpec
from trainspec_cli.reporter.problems import render_problems


def read(**fields) -> list[tuple[str, str]]:
    data = DataSpec(seq_len=8, **fields)
    return [(Path(document.name).name, document.text) for document in documents(data, find_files(data))]


def problem_of(error) -> tuple:
    (problem,) = error.value.problems
    return problem


def test_the_standard_library_is_python_and_leaves_out_tests_and_packages():
    data = DataSpec(seq_len=8, source="python_stdlib")
    files = find_files(data)
    texts = {document.name: document.text for document in documents(data, files)}
    assert files == sorted(files, key=files.index) and len(set(files)) == len(files)
    names = {Path(name).name for name in texts}
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= names
    assert not any(part in Path(name).parts for name in texts for part in ("site-packages", "test", "tests"))
    assert sum(map(len, texts.values())) > 5_000_000
    for name, text in list(texts.items())[::50]:
        ast.parse(text, name)


def test_a_folder_gives_one_document_a_file_in_order_without_hidden_and_empty_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/2.txt", "a.md", ".hidden", ".git/config"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text("")
    assert read(source="text", path=str(tmp_path)) == [("a.md", "a.md"), ("2.txt", "b/2.txt")]


def test_a_glob_takes_what_it_matches(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("b/c/1.txt", "2.txt", "3.md"):
        (tmp_path / name).write_text(name)
    assert read(source="text", path=f"{tmp_path}/**/*.txt") == [("2.txt", "2.txt"), ("1.txt", "b/c/1.txt")]


def test_a_path_with_glob_characters_that_exists_is_taken_as_it_is(tmp_path):
    (tmp_path / "data [1].txt").write_text("kept")
    assert read(source="text", path=str(tmp_path / "data [1].txt")) == [("data [1].txt", "kept")]


def test_jsonl_gives_one_document_a_line_and_skips_blank_ones(tmp_path):
    lines = [json.dumps({"body": "één\n", "n": 1}), "", json.dumps({"body": "two"}, ensure_ascii=False)]
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    (tmp_path / "ignored.json").write_text("{")
    found = read(source="jsonl", path=str(tmp_path), text_field="body")
    assert found == [("x.jsonl:1", "één\n"), ("x.jsonl:3", "two")]


@pytest.mark.parametrize(
    ("line", "words", "got"),
    [
        ("{text: 1}", "not JSON", ": {text: 1}"),
        ('["a"]', "JSON object", ': ["a"]'),
        ('{"body": "a", "id": 3}', "no field `text`", ": body, id"),
        ('{"text": 3}', "`text`", ": 3"),
        ('{"text": "\\ud800"}', "`text`", ", \\ud800"),
    ],
)
def test_a_bad_json_line_is_named_with_what_was_got(tmp_path, line, words, got):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(file))
    assert_problems(error.value.problems, ("bad_document", f"{file}:2", words, got))
    assert problem_of(error).message.endswith(got)


def test_a_missing_field_says_how_to_choose_another(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "a"}')
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert "data.text_field=NAME" in problem_of(error).hint


def test_text_that_is_not_utf8_names_file_and_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes("abc é".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"byte 4 \(0xe9\)") as error:
        read(source="text", path=str(tmp_path))
    assert problem_of(error).file == str(tmp_path / "x.txt")


def test_a_json_line_that_is_not_utf8_names_the_byte_within_the_file(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(RecipeError, match=r"byte 24 \(0xff\)") as error:
        read(source="jsonl", path=str(tmp_path))
    assert problem_of(error).line == 2


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/*.txt", None])
def test_a_missing_path_is_the_recipes_fault(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as error:
        find_files(DataSpec(seq_len=8, source="text", path=path))
    assert (problem_of(error).code, problem_of(error).path) == ("missing_file", "data.path")
    assert problem_of(error).hint


def test_a_folder_without_jsonl_says_so(tmp_path):
    (tmp_path / "x.txt").write_text("a")
    with refused(RecipeError, "missing_file", "data.path", ".jsonl"):
        find_files(DataSpec(seq_len=8, source="jsonl", path=str(tmp_path)))


def test_a_broken_link_is_named_rather_than_skipped(tmp_path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    with refused(MachineError, "unreadable_file", "", "link.txt"):
        find_files(DataSpec(seq_len=8, source="text", path=str(tmp_path)))


@pytest.mark.parametrize("max_bytes", [1, 5, 6, 7, 100])
def test_max_bytes_cuts_at_a_whole_character(tmp_path, max_bytes):
    (tmp_path / "1.txt").write_text("abcde", encoding="utf-8")
    (tmp_path / "2.txt").write_text("éé", encoding="utf-8")
    text = "".join(text for _, text in read(source="text", path=str(tmp_path), max_bytes=max_bytes))
    assert text == "abcdeéé".encode()[:max_bytes].decode(errors="ignore")
    assert len(text.encode()) <= max_bytes


def test_a_folder_that_cannot_be_read_is_named_rather_than_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with refused(MachineError, "unreadable_file", "", "closed", "Permission denied"):
        find_files(DataSpec(seq_len=8, source="text", path=str(tmp_path)))


def test_a_file_that_goes_before_it_is_read_is_named(tmp_path):
    for name, source in (("a.txt", "text"), ("a.jsonl", "jsonl")):
        (tmp_path / name).write_text('{"text": "x"}')
        data = DataSpec(seq_len=8, source=source, path=str(tmp_path / name))
        files = find_files(data)
        (tmp_path / name).unlink()
        with pytest.raises(MachineError, match=rf"no such file: .*{name}"):
            list(documents(data, files))


def test_no_python_source_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with refused(MachineError, "no_python_stdlib", ""):
        find_files(DataSpec(seq_len=8, source="python_stdlib"))


CHAT_LINES = ["{", '{"prompt": "a", "completion": "b"}', '{"text": "a"}', "[1]", '{"prompt": "c", "completion": 7}']


def test_a_file_of_conversations_is_answered_once_with_their_source(tmp_path):
    lines = [json.dumps({"messages": [{"role": "user", "content": "a"}]})] * 50
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert problem_of(error).line == 1 and "data=chat" in problem_of(error).hint


def test_every_line_that_is_wrong_is_reported_with_the_format_of_its_source(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(
        b'{"text": "a"}\nno\n{"txt": "a"}\n{"text": "\xff"}\n{"text": "b"}\n{"text": 7}\n'
    )
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert [problem.line for problem in error.value.problems] == [2, 3, 4, 6]
    assert '{"text": "..."}' in error.value.problems[0].hint
    (tmp_path / "x.jsonl").write_text("\n".join(CHAT_LINES))
    with pytest.raises(RecipeError) as error:
        read(source="chat", path=str(tmp_path))
    assert [problem.line for problem in error.value.problems] == [1, 3, 4, 5]
    assert all('{"prompt": ..., "completion": ...}' in one.hint for one in error.value.problems)


def test_a_mistake_of_many_lines_is_reported_once_with_their_number(tmp_path):
    (tmp_path / "x.jsonl").write_text("no\n" * 50 + '{"text": 7}\n' + "no\n{\n")
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert [problem.line for problem in error.value.problems] == [1, 51, 53]
    assert error.value.problems[0].message.endswith("in 50 other lines: 2, 3, 4, 5, 6 and 45 more")
    assert not any("reading stopped" in problem.hint for problem in error.value.problems)


def test_reading_stops_at_many_mistakes_and_at_many_kinds_of_them(tmp_path):
    (tmp_path / "x.jsonl").write_text("no\n" * 5000)
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert problem_of(error).line == 1 and problem_of(error).hint.endswith("reading stopped after 1,000 mistakes")
    (tmp_path / "x.jsonl").unlink()
    for number in range(30):  # of each file the first line has another mistake
        (tmp_path / f"{number:02}.jsonl").write_text('{"text": "a"}\nno\nno\n')
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path))
    assert len(error.value.problems) == 20
    assert error.value.problems[-1].hint.endswith("reading stopped after 39 mistakes")


def test_files_with_the_same_mistake_are_reported_once(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff" * (number + 1))
    with pytest.raises(RecipeError) as error:
        read(source="text", path=str(tmp_path))
    assert problem_of(error).file == str(tmp_path / "0.txt")
    assert f"in 7 other files: {tmp_path / '1.txt'}, " in problem_of(error).message


def test_mistakes_before_the_cut_are_reported_and_those_behind_it_are_not_read(tmp_path):
    (tmp_path / "x.jsonl").write_text('no\n{"text": "abc"}\nno\n')
    with pytest.raises(RecipeError) as error:
        read(source="jsonl", path=str(tmp_path), max_bytes=3)
    assert [problem.line for problem in error.value.problems] == [1]


def test_a_line_of_many_megabytes_makes_a_short_error(tmp_path):
    fields = ", ".join(f'"field{number}": 0' for number in range(200_000))
    for line in (f"{{{fields}}}", f"{{{fields}", f"[{'0,' * 100_000}0]"):
        (tmp_path / "x.jsonl").write_text(line)
        with pytest.raises(RecipeError) as error:
            read(source="jsonl", path=str(tmp_path))
        located = locate(error.value.problems, {}, [], tmp_path)
        assert len(render_problems(located, Style.of(io.StringIO()))) < 2000
