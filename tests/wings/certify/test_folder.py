"""The folder of a certification that continues: what it keeps, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.wings.certify import families
from trainspec_cli.wings.certify.runs import HEADER, opened, subject_of

CPU = Machine("box", 2, 2**34)


def test_a_folder_is_private_and_keeps_the_day_of_its_first_run(tmp_path: Path) -> None:
    subject, folder = subject_of(CPU), tmp_path / "kept"
    with opened(folder, subject, "2026-01-01") as since:
        assert since == "2026-01-01"
    with opened(folder, subject, "2026-02-02") as since:
        assert since == "2026-01-01"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"trainspec": "0"}, "trainspec"),
        ({"code_sha256": "0"}, "code_sha256"),
        ({"training_spec": "0"}, "training_spec"),
        ({"versions": {"torch": "0"}}, "versions"),
        ({"machine_id": "0"}, "machine_id"),
        ({"machine": replace(CPU, cpu_cores=3)}, "machine"),
        ({"models_sha256": "0"}, "models_sha256"),
        ({"engine": "other"}, "engine"),
    ],
)
def test_runs_of_another_version_or_machine_are_not_continued(tmp_path: Path, change, named: str) -> None:
    subject = subject_of(CPU)
    with opened(tmp_path / "kept", subject, "2026-01-01"):
        pass
    with pytest.raises(RecipeError, match=rf"which differs in: {named}\b") as error:
        opened(tmp_path / "kept", replace(subject, **change), "2026-01-01").__enter__()
    assert error.value.problems[0].code == "other_certification"


def test_another_model_is_another_certification(monkeypatch: pytest.MonkeyPatch) -> None:
    before = subject_of(CPU)
    monkeypatch.delitem(families.FAMILIES, "moe")
    assert subject_of(CPU).models_sha256 != before.models_sha256


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(RecipeError) as error:
            opened(folder, subject_of(CPU), "2026-01-01").__enter__()
        (problem,) = error.value.problems
        assert problem.code == "other_certification"
        assert "rm -r" not in problem.hint
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    (tmp_path / HEADER).write_text("{}")
    with pytest.raises(RecipeError, match=r"certification\.json .*`trainspec`"):
        opened(tmp_path, subject_of(CPU), "2026-01-01").__enter__()


def test_two_certifications_do_not_share_a_folder(tmp_path: Path) -> None:
    subject = subject_of(CPU)
    with opened(tmp_path / "kept", subject, "2026-01-01"), pytest.raises(RecipeError) as error:
        opened(tmp_path / "kept", subject, "2026-01-01").__enter__()
    assert error.value.problems[0].code == "in_use"
