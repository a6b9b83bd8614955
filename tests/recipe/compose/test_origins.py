from __future__ import annotations

from pathlib import Path

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.compose.folders import Origin, find_origin, locate, show_path

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
