"""Which rank the others wait for, as the stacks of all show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.run.channel.messages import RankStands
from trainspec_cli.wings.own_script.hang import in_library, name_late, place_of


@pytest.fixture
def library(tmp_path: Path):
    """library(NAME): the path of a file of an installed package."""

    def make(name: str) -> Path:
        (tmp_path / name / "_src").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        return tmp_path / name / "_src" / "waits.py"

    return make


def stack(*files: Path | str) -> str:
    return "\n".join(f'  File "{file}", line {line} in call{line}' for line, file in enumerate(files, 1))


def late(*stacks: str) -> tuple[list[int], str]:
    """Each rank is on a node of its own."""
    return name_late(
        [
            RankStands(rank, f"node{rank}", 7, stack, place_of(stack), in_library(stack), stopped=False, ended=False)
            for rank, stack in enumerate(stacks)
        ]
    )


def test_a_rank_in_its_own_code_is_late_where_the_others_wait_in_a_library(library) -> None:
    waits = stack("/usr/lib/python3.11/threading.py", library("tensorflow"), "train.py")
    assert late(waits, stack("train.py"), waits) == ([1], "it is in no collective")
    assert place_of(waits) == "call2, called at train.py:3"


def test_a_folder_with_a_librarys_name_is_the_users_own(tmp_path, library) -> None:
    own = tmp_path / "lightning" / "train.py"
    assert late(stack(library("torch"), own), stack(own)) == ([1], "it is in no collective")


def test_what_jax_has_compiled_waits_without_a_frame(library) -> None:
    ranks, why = late(stack("train.py"), stack(library("jax"), "other.py"))
    assert ranks == [0, 1]
    assert why.endswith("rank 0 waits in call1, train.py:1; rank 1 waits in call1, called at other.py:2")
