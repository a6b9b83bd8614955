"""`framework=./mine.yaml`: a file of one's own in the place of an option."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.recipe.compose.compose import Composed, compose


def composed(folder: Path, text: str, *more: str) -> Composed:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return compose("quickstart", ["framework=./mine.yaml", *more], folder)


def test_a_file_lies_over_the_option_that_it_builds_on(tmp_path: Path) -> None:
    text = "defaults: [megatron]\nname: Ours\nstates:\n  zero1: {bucket_bytes: 7}\n"
    found = composed(tmp_path, text, "framework.overlap_dp=false")
    assert not found.problems
    framework = found.data["framework"]
    assert isinstance(framework, dict)
    assert (framework["name"], framework["fused_kernels"], framework["overlap_dp"]) == ("Ours", True, False)
    assert framework["states"] == {"zero1": {"bucket_bytes": 7}}
    assert (found.origins["framework.name"].file, found.origins["framework.name"].line) == ("mine.yaml", 2)


def test_a_file_alone_leaves_nothing_of_the_option_before(tmp_path: Path) -> None:
    assert composed(tmp_path, "name: Alone\n").data["framework"] == {"name": "Alone"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: [megatrn]\n", "`framework` has no option `megatrn`"),
        ("name: ]\n", "this is not YAML"),
    ],
)
def test_mistakes_of_a_file_are_told_with_their_line(tmp_path: Path, text: str, says: str) -> None:
    problem = composed(tmp_path, text).problems[0]
    assert says in problem.message
    assert (problem.file, problem.line) == ("mine.yaml", 1)


def test_a_missing_file_and_an_unknown_name_say_what_to_type(tmp_path: Path) -> None:
    missing = compose("quickstart", ["framework=./mine.yaml"], tmp_path).problems[0]
    assert (missing.code, "there is no file mine.yaml" in missing.message) == ("missing_file", True)
    unknown = compose("quickstart", ["framework=megatrn"], tmp_path).problems[0]
    assert unknown.hint.startswith("did you mean framework=megatron? `trainspec list framework` shows all")
    assert unknown.hint.endswith("or describe your own in a file, and type framework=./mine.yaml")
