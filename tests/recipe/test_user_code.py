"""One's own code: found and checked without running it, imported, and its errors in its own file and line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.problems import assert_problems

from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.recipe.user_code import (
    NEIGHBOURS,
    OPTIMIZER,
    Extension,
    absolute_reference,
    find,
    load,
    problems_of,
    source_files,
    user_code_errors,
)

GOOD = """
import os
raise SystemExit("nothing of it runs when it is only found")

def make(groups, lr, *, alpha=1): ...
def narrow(groups): ...
class Plain: ...
class Optimizer:
    def __init__(self, groups, lr): ...
class Heir(Optimizer): ...
@os.wraps
def decorated(): ...
other = make
if os:
    def inner(groups, lr, alpha): ...
"""


def named(text: str, *options: str) -> Extension:
    return Extension(OPTIMIZER, "optim.name", text, options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of code and an installed package that has an entry point."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GOOD)
    for place in ("lone.py", "deep/lone.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(
            "import os\ndef narrow(groups): ...\nclass Lone:\n    def __init__(self, groups, lr): ...\n"
        )
    (tmp_path / "broken.py").write_text("x = 1\ndef make(groups, lr:\n")
    package, about = tmp_path / "site" / "ownpack" / "deep", tmp_path / "site" / "ownpack-1.dist-info"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit\n")
    (package / "__init__.py").write_text("")
    (package / "optim.py").write_text("def make(groups, lr): return groups\n")
    about.mkdir()
    (about / "METADATA").write_text("Name: ownpack\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[trainspec.optimizers]\nsprint = ownpack.deep.optim:make\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    return tmp_path


@pytest.mark.clause("EXT-2")
@pytest.mark.parametrize(
    ("text", "options", "file"),
    [
        ("mine.py:make", ("alpha",), "mine.py"),
        ("mine.py:Optimizer", (), "mine.py"),
        ("mine.py:Heir", ("anything",), "mine.py"),
        ("mine.py:decorated", (), "mine.py"),
        ("mine.py:other", (), "mine.py"),
        ("mine.py:inner", ("alpha",), "mine.py"),
        ("ownpack.deep.optim:make", (), "site/ownpack/deep/optim.py"),
        ("sprint", (), "site/ownpack/deep/optim.py"),
    ],
)
def test_code_is_found_by_file_module_and_registered_name_and_not_run(
    folder: Path, text: str, options: tuple[str, ...], file: str
) -> None:
    assert find(named(text, *options)).file == folder / file


@pytest.mark.parametrize(
    ("text", "options", "code", "words", "hint"),
    [
        ("mne.py:make", (), "missing_file", "mne.py", "did you mean `mine.py`?"),
        ("mine.py:mak", (), "unknown_name", "names mak, which", "did you mean `make`?"),
        (
            "mine.py",
            (),
            "wrong_choice",
            "'mine.py'; expected adamw, sprint, ",
            "set optim.name=mine.py:NAME",
        ),
        ("mne.py", (), "missing_file", "mne.py", "did you mean `mine.py`?"),
        (
            "mine.py:",
            (),
            "wrong_type",
            "name of a function",
            "set optim.name=mine.py:NAME",
        ),
        ("lone.py", (), "wrong_choice", "'lone.py'; expected adamw, sprint, ", "set optim.name=lone.py:Lone"),
        ("lone:Alone", (), "missing_package", "module lone,", "set optim.name=lone.py:Lone"),
        ("deep.lone:Lone", (), "missing_package", "module deep.lone", "set optim.name=deep/lone.py:Lone"),
        ("mine.txt:make", (), "missing_package", "module mine.txt,", "pip install mine"),
        ("a/b:make", (), "wrong_type", "expected FILE.py:NAME or package.module:NAME", "ends in .py"),
        ("adamv", (), "wrong_choice", "is 'adamv'; expected adamw, sprint, ", "did you mean optim.name=adamw?"),
        ("sprnt", (), "wrong_choice", "is 'sprnt'; expected adamw, sprint, ", "did you mean optim.name=sprint?"),
        ("ownpack.dep:make", (), "missing_package", "no module dep", "did you mean `deep`?"),
        ("nopack.x:make", (), "missing_package", "package nopack ", "run pip install nopack"),
        (
            "broken.py:make",
            (),
            "syntax_error",
            "not Python: ",
            "see line 2",
        ),
        (
            "mine.py:narrow",
            (),
            "wrong_signature",
            "called with (groups, *, lr)",
            "narrow(groups",
        ),
        ("mine.py:Plain", (), "wrong_signature", "takes (),", "define it as Plain(groups, *, lr)"),
        ("mine.py:make", ("beta",), "wrong_signature", "takes (groups, lr, *, alpha=...)", "(groups, *, lr, beta)"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_type(
    folder: Path, text: str, options: tuple[str, ...], code: str, words: str, hint: str
) -> None:
    (problem,) = problems_of(named(text, *options), ["adamw"])
    assert (problem.code, problem.path) == (code, "optim.name")
    assert words in problem.message and hint in problem.hint
    if code == "syntax_error":
        assert (problem.file, problem.line) == (str(folder / "broken.py"), 2)


def test_a_file_that_others_may_write_is_not_run(folder: Path) -> None:
    (folder / "mine.py").chmod(0o666)
    assert_problems(problems_of(named("mine.py:make")), ("not_trusted", "optim.name", "every user"))


def test_files_are_named_absolutely_and_nothing_else_is() -> None:
    assert absolute_reference("own/../mine.py:make", Path("/a")) == "/a/mine.py:make"
    for text in ("/b/mine.py:make", "package.module:make", "adamw"):
        assert absolute_reference(text, Path("/a")) == text


def test_a_file_is_imported_once_for_all_keys_that_name_it(folder: Path) -> None:
    (folder / "twice.py").write_text("class Own:\n    def __init__(self, groups, lr): ...\nmake = Own\n")
    assert load(named("twice.py:Own")) is load(named("twice.py:make"))


@pytest.mark.parametrize(
    ("source", "words", "hint"),
    [
        (
            "x = 1\nraise ValueError('boo')\nmake = 1\n",
            "({file}:2: raise",
            "",
        ),
        (
            "import nopackage\nmake = 1\n",
            "ModuleNotFoundError: No module named 'nopackage'",
            "run pip install nopackage",
        ),
        ("__import__('mine')\nmake = 1\n", "No module named 'mine'", "`import mine` in own.py"),
        ("import json\njson.loads('{{')\nmake = 1\n", "({file}:2: json.loads", ""),
        ("make = 3\n", "make of {file}, a int;", ""),
        ("from os import *\n", "make, which {file} ", ""),
        ("make = lambda groups: 1\n", "called with (groups, *, lr)", "define it as make("),
    ],
)
def test_what_goes_wrong_in_an_import_is_said(folder: Path, source: str, words: str, hint: str) -> None:
    file = folder / "own.py"
    file.write_text(source)
    with pytest.raises(RecipeError) as caught:
        load(named(f"{file}:make"))
    (problem,) = caught.value.problems
    assert words.format(file=file) in problem.message and hint in problem.hint


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder of code in several files; the recipe names `first.py`."""
    folder = tmp_path / "project"
    (folder / "deep_part").mkdir(parents=True)
    (folder / "first.py").write_text("def make(groups, lr):\n    from near_part import far\n    return far()\n")
    (folder / "near_part.py").write_text("import json\nfrom deep_part.inner import far\n")
    (folder / "deep_part" / "__init__.py").write_text("")
    (folder / "deep_part" / "inner.py").write_text("from . import last\nfar = last.far\n")
    (folder / "deep_part" / "last.py").write_text("def far(): return 'far away'\n")
    (folder / "unused.py").write_text("raise SystemExit\n")
    (folder / "json.py").write_text("raise SystemExit('a library comes first')\n")
    yield folder
    NEIGHBOURS.folders.clear()
    for name in [name for name in sys.modules if name.split(".")[0] in ("near_part", "deep_part")]:
        del sys.modules[name]


def test_a_file_imports_its_neighbours_and_no_more_of_its_folder(project: Path) -> None:
    extension = named(f"{project}/first.py:make")
    names = {file.relative_to(project).as_posix() for file in source_files(find(extension))}
    assert names == {"first.py", "near_part.py", *(f"deep_part/{name}.py" for name in ("__init__", "inner", "last"))}
    before = list(sys.path)
    assert load(extension)([], lr=1) == "far away"
    assert sys.path == before
    assert importlib.util.find_spec("unused") is None, "what it does not import is not on offer to libraries"


def test_a_neighbour_comes_before_a_module_of_the_current_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have that folder on their path, and the command that starts them does not."""
    (tmp_path / "near_part.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(named(f"{project}/first.py:make"))([], lr=1) == "far away"


def test_a_neighbour_that_others_may_write_is_not_run(project: Path) -> None:
    (project / "deep_part" / "last.py").chmod(0o666)
    (problem,) = problems_of(named(f"{project}/first.py:make"))
    assert problem.code == "not_trusted" and "last.py" in problem.message


def test_two_folders_with_neighbours_of_one_name_are_refused(project: Path, tmp_path: Path) -> None:
    load(named(f"{project}/first.py:make"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "near_part.py").write_text("far = 1\n")
    (other / "second.py").write_text("import near_part\ndef make(groups, lr): ...\n")
    with pytest.raises(RecipeError) as refused:
        load(named(f"{other}/second.py:make"))
    assert [problem.code for problem in refused.value.problems] == ["name_taken"]


def test_an_error_of_a_library_is_said_at_the_line_that_called_it(folder: Path) -> None:
    file = folder / "own.py"
    file.write_text("import json\n\ndef make(groups, lr):\n    return json.loads(groups)\n")
    extension = named(f"{file}:make")
    call = load(extension)
    with pytest.raises(WorkerError, match="in an update") as caught, user_code_errors(extension, "in an update"):
        call("{", lr=1)
    assert f"({file}:4, in make: " in str(caught.value) and "json.loads(groups)" in str(caught.value)
    with pytest.raises(KeyError), user_code_errors(extension, "here", passes=lambda error: isinstance(error, KeyError)):
        raise KeyError
