"""Names of checkpoints on the Hub: where they lie on this machine, and what is no name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.reading.hub_cache import HubName, hub_cache, hub_name, locate_checkpoint

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
NAME = "some-org/a.model-1B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two snapshots of a checkpoint: `main` is the first, the tag v2 the second."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "TRAINSPEC_HUB_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    model = tmp_path / "home/hub/models--some-org--a.model-1B"
    (model / "refs").mkdir(parents=True)
    for ref, commit in (("main", COMMIT), ("v2", OTHER)):
        (model / "refs" / ref).write_text(f"{commit}\n")
        (model / "snapshots" / commit).mkdir(parents=True)
    return model


def test_a_name_is_the_snapshot_that_its_revision_names(cache: Path) -> None:
    assert locate_checkpoint(NAME) == locate_checkpoint(f"{NAME}@main") == cache / "snapshots" / COMMIT
    assert locate_checkpoint(f"{NAME}@v2") == locate_checkpoint(f"{NAME}@{OTHER}") == cache / "snapshots" / OTHER
    assert locate_checkpoint(f"{NAME}@v3") == Path(f"{NAME}@v3"), "as it was typed"
    assert locate_checkpoint("some-org/other") == Path("some-org/other")


def test_a_folder_comes_before_the_cache_and_a_mirror_before_both_but_the_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPEC_HUB_MIRROR", str(tmp_path / "mirror"))
    assert locate_checkpoint(NAME) == cache / "snapshots" / COMMIT, "the mirror does not have it"
    (tmp_path / "mirror" / NAME).mkdir(parents=True)
    assert locate_checkpoint(NAME) == tmp_path / "mirror" / NAME
    assert locate_checkpoint(f"{NAME}@v2") == cache / "snapshots" / OTHER, "of which it knows no revisions"
    (tmp_path / NAME).mkdir(parents=True)
    assert locate_checkpoint(NAME) == Path(NAME)


@pytest.mark.parametrize("ref", ["../../../../etc", "0" * 39, "", "x" * 5000, "\xff\xfe"])
def test_a_ref_that_is_no_commit_leads_nowhere(cache: Path, ref: str) -> None:
    (cache / "refs/main").write_text(ref, encoding="latin-1")
    assert locate_checkpoint(NAME) == Path(NAME)


@pytest.mark.parametrize(
    "text", ["/a/b", "a", "a/b/c", "../b", "a/..", "./a", "~/a", "a/b@../c", "a/b@", "@a/b", "a/b\0", ""]
)
def test_what_can_only_be_a_folder_is_no_name(text: str) -> None:
    assert hub_name(text) is None


def test_a_name_has_a_revision() -> None:
    assert hub_name(NAME) == HubName(NAME, "main")
    assert hub_name(f"{NAME}@v1.0-rc") == HubName(NAME, "v1.0-rc")


def test_the_cache_is_where_the_hub_has_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_cache() == tmp_path / "home/hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert hub_cache() == tmp_path / "elsewhere"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    assert hub_cache() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub_cache() == tmp_path / "xdg/huggingface/hub"
