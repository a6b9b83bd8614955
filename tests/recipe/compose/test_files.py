from __future__ import annotations

import math
from pathlib import Path

import pytest
from lab.problems import assert_problems, words
from lab.recorded import Recorded
from omegaconf import OmegaConf

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.core.reading.yaml_file import YamlLimitError, compose_yaml
from trainspec_cli.core.reading.yaml_file import read_yaml as read_plain
from trainspec_cli.recipe.compose.folders import Origin, find_origin, locate, read_yaml, show_path


def faults(file: Path) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as raised:
        read_yaml(file, file.parent)
    return raised.value.problems


def test_every_key_has_its_place(write) -> None:
    file = write("a.yaml", "# first\ndescription: x\noptim:\n  lr: 1\n  schedule: {kind: cosine}\n")
    read = read_yaml(file, file.parent)
    places = {path: (origin.line, origin.column) for path, origin in read.origins.items()}
    assert places == {
        "description": (2, 1), "optim": (3, 1), "optim.lr": (4, 3),
        "optim.schedule": (5, 3), "optim.schedule.kind": (5, 14),
    }  # fmt: skip
    assert (read.description, str(read.start)) == ("x", "a.yaml:2")


def test_sections_in_a_list_have_their_places_too(write) -> None:
    file = write("a.yaml", "events:\n  - {node: 1}\n  - node: 2\n    factor: 3\nsizes: [1, 2]\n")
    places = {path: (origin.line, origin.column) for path, origin in read_yaml(file, file.parent).origins.items()}
    assert places == {
        "events": (1, 1), "events.0": (2, 5), "events.0.node": (2, 6),
        "events.1": (3, 5), "events.1.node": (3, 5), "events.1.factor": (4, 5), "sizes": (5, 1),
    }  # fmt: skip


def test_the_defaults_list_is_read_and_is_no_value(write) -> None:
    file = write("a.yaml", "defaults:\n  - base\n  - override /model: small\nlr: 1\n")
    read = read_yaml(file, file.parent)
    entries = [(entry.key, entry.value, entry.origin.line) for entry in read.defaults]
    assert entries == [("", "base", 2), ("override /model", "small", 3)]
    assert list(read.origins) == ["lr"]


def test_an_empty_file_holds_nothing(write) -> None:
    file = write("a.yaml", "# nothing yet\n")
    assert read_yaml(file, file.parent).origins == {}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("train:\n\tmax_steps: 3\n", "2:1"),
        ("train:\n  max_steps:3\n  seed: 4\n", "3:7"),
        ("description: a: b\n", "1:15"),
        ("train:\n  seed: 1\n   log: 2\n", "3:7"),
        ('description: "abc\n', "1:14"),
        ("a: [1, 2\nb: 3\n", "1:4"),
        ("- a\n- b\n", "1:1"),
    ],
    ids=["tab", "no space", "colon in text", "indentation", "open quotes", "open list", "list"],
)
def test_says_where_a_file_is_no_yaml(write, text: str, where: str, recorded: Recorded) -> None:
    problems = faults(write("a.yaml", text))
    assert_problems(problems, ("bad_yaml", f"a.yaml:{where}"))
    recorded(words(problems))


def test_every_key_that_stands_twice_is_told(write) -> None:
    assert_problems(
        faults(write("a.yaml", "a: 1\nb: {c: 1, c: 2}\na: 3\n")),
        ("bad_yaml", "a.yaml:2:11", "`c`", "line 2"),
        ("bad_yaml", "a.yaml:3:1", "`a`", "line 1"),
    )
    assert_problems(
        faults(write("b.yaml", "x:\n- a: 1\n  a: 2\n- {b: [{c: 1, c: 2}]}\n")),
        ("bad_yaml", "b.yaml:3:3", "`a`", "line 2"),
        ("bad_yaml", "b.yaml:4:15", "`c`", "line 4"),
    )


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert_problems(faults(file), ("bad_yaml", "a.yaml:1:1", "cannot be read as text"))


def test_a_whole_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(YamlLimitError, match="31 digits"):
        compose_yaml("a: " + "1" * 31)
    assert compose_yaml("a: " + "1" * 30) is not None


@pytest.mark.clause("REC-6")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 32 + "]" * 32, "more than 32 levels"),
        ("a: &a [1]\nb: &b [*a, *a]\n" + "".join(f"c{n}: &c{n} [{', '.join([f'*c{n - 1}' if n else '*b'] * 9)}]\n"
                                               for n in range(5)), "more than 20,000 values"),
        ("a: &a [*a]", "contains itself"),
        ("a: '${" + "x" * 2000 + "}'", "has 2,003 characters; at most 2000"),
        ("a: !!binary aGk=", "!!binary"),
        ("a: !!set {b: null}", "!!set"),
    ],
)  # fmt: skip
def test_what_a_file_expands_to_is_bounded(text: str, reason: str) -> None:
    with pytest.raises(YamlLimitError, match=reason):
        compose_yaml(text)


def test_what_lies_within_the_bounds_is_read(tmp_path: Path) -> None:
    assert compose_yaml("a: " + "[" * 30 + "1" + "]" * 30) is not None
    assert compose_yaml("a: '${" + "x" * 1997 + "}'") is not None
    file = tmp_path / "a.yaml"
    file.write_text("day: 2026-01-02\nlist: [1, 2.5, true, null, x]\nalias: &a {b: 1}\nsame: *a\n")
    assert read_plain(file) == {
        "day": "2026-01-02", "list": [1, 2.5, True, None, "x"], "alias": {"b": 1}, "same": {"b": 1},
    }  # fmt: skip
    file.write_text("# nothing\n")
    assert read_plain(file) is None


def test_where_a_plain_file_is_no_yaml(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\nb: [1\n")
    with pytest.raises(UnreadableFileError, match="',' or ']'") as error:
        read_plain(file)
    (problem,) = error.value.problems
    assert (problem.code, problem.where()) == ("unreadable_file", f"{file}:3:1")


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("a: 1\n? [x, y]\n: 2\n", "2:3", "a word"),
        ("a: \x07\n", "1:1", "#x0007"),
        ("é: &\n", "1:5", "not YAML"),
        ("a:1", "1:1", "`key: value`"),
    ],
)
def test_other_faults_have_their_places_too(write, text: str, where: str, part: str) -> None:
    assert_problems(faults(write("a.yaml", text)), ("bad_yaml", f"a.yaml:{where}", part))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1e-3", 1e-3),
        ("-2E6", -2e6),
        ("1_000.5", 1000.5),
        (".5", 0.5),
        ("1.5e+3", 1500.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("1e", "1e"),
        ("e3", "e3"),
        ("1.2.3", "1.2.3"),
        ("2026-11-25", "2026-11-25"),
    ],
)
def test_numbers_are_read_as_hydra_reads_them(written: str, read: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"key: {written}\n")
    values = read_yaml(tmp_path / "a.yaml", tmp_path).values()
    assert values == {"key": read} == OmegaConf.load(tmp_path / "a.yaml")


def test_a_shipped_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.recipe.compose.folders.shipped_data", lambda: tmp_path)
    (tmp_path / "a.yaml").write_text("key: 1\n")
    first = read_yaml(tmp_path / "a.yaml", tmp_path)
    assert read_yaml(tmp_path / "a.yaml", tmp_path) is first
    (tmp_path / "a.yaml").write_text("key: 12\n")
    assert read_yaml(tmp_path / "a.yaml", tmp_path).values() == {"key": 12}
    (tmp_path / "a.yaml").unlink()
    with pytest.raises(RecipeError, match=r"a\.yaml"):
        read_yaml(tmp_path / "a.yaml", tmp_path)


def test_nesting_that_would_fill_a_stack_is_refused() -> None:
    with pytest.raises(YamlLimitError, match="more than 32 levels"):
        compose_yaml("a: " + "[" * 200_000)


ORIGINS = {"optim": Origin("a.yaml", 1, 1), "optim.lr": Origin("a.yaml", 2, 3), "foo.bar": Origin("command line", 3)}


def test_the_nearest_place_is_taken() -> None:
    assert find_origin("optim.lr", ORIGINS) == ORIGINS["optim.lr"]
    assert find_origin("foo", ORIGINS) == ORIGINS["foo.bar"], "what was written below it"
    assert find_origin("optim.schedule.kind", ORIGINS) == ORIGINS["optim"], "what surrounds it"
    assert find_origin("train", ORIGINS) is None
    assert find_origin("", ORIGINS) is None


def test_locate_adds_place_and_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim:\n  lr: x\n")
    problems = [Problem("c", "m", "optim.lr"), Problem("c", "m", "foo.bar"), Problem("c", "m", "train")]
    found = locate(problems, ORIGINS, ("recipe=a", "b=1", "foo.bar=2"), tmp_path)
    assert [(problem.where(), problem.excerpt) for problem in found] == [
        ("a.yaml:2:3", "  lr: x"),
        ("command line:3", "foo.bar=2"),
        ("", ""),
    ]


def test_a_place_that_is_known_is_kept(tmp_path: Path) -> None:
    problem = Problem("c", "m", "optim.lr", file="gone.yaml", line=9)
    assert locate([problem], ORIGINS, (), tmp_path) == [problem]


def test_paths_are_shown_from_the_working_directory(tmp_path: Path) -> None:
    assert show_path(tmp_path / "conf" / "a.yaml", tmp_path) == "conf/a.yaml"
    assert show_path(Path("/elsewhere/a.yaml"), tmp_path) == "/elsewhere/a.yaml"
