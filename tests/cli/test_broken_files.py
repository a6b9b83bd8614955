"""Broken files in the user's ./conf: commands that do not need them go on, and say which file is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.planner.hardware import rates as catalogue
from trainspec_cli.planner.validation import table as frameworks
from trainspec_cli.recipe.compose.folders import find_folders

CACHED = (catalogue.accelerators, catalogue.find_accelerator, catalogue.models, frameworks.frameworks)
COMPLETE = "name: zz\nvendor: nvidia\nbf16_tflops: 100\nmemory_tb_per_s: 3\n"
DAMAGE: dict[str, tuple[bytes | None, int | None]] = {
    "no YAML": (b"name: zz\na: [}\n", 2),
    "a list": (b"- 1\n- 2\n", 1),
    "empty": (b"", 1),
    "a key that is no text": (b"name: zz\n5: 1\n", 2),
    "no name": (b"vendor: nvidia\nbf16_tflops: 100\n", None),
    "a wrong type": (f"{COMPLETE}memory_gb: much\n".encode(), 5),
    "an unknown key": (f"{COMPLETE}memory_gb: 80\nbf16_tflop: 100\n".encode(), 6),
    "no UTF-8": (b"name: \xff\xfe\n", None),
    "defaults in a circle": (b"defaults: [zz]\nname: zz\n", 1),
    "defaults that are not there": (b"defaults: [nowhere]\nname: zz\n", 1),
    "a folder": (None, None),
}
"""What is wrong -> the content of the file, None for a folder of its name, and the line that is named."""


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    """The tables of a process are read once, and this process is that of many commands."""
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def damage(file: Path, content: bytes | None) -> None:
    file.parent.mkdir(parents=True)
    file.mkdir() if content is None else file.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_accelerator_that_is_broken_is_left_out_by_its_line(
    kind: str, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    content, line = DAMAGE[kind]
    damage(Path("conf/accelerator/zz.yaml"), content)
    with pytest.warns(catalogue.LeftOutWarning, match="^conf/accelerator/zz.yaml") as found:
        known = catalogue.accelerators()
    assert "zz" not in {chip.name for chip in known} and "H100-SXM-80GB" in {chip.name for chip in known}
    (warning,) = found
    assert line is None or str(warning.message).startswith(f"conf/accelerator/zz.yaml:{line}: ")
    catalogue.accelerators.cache_clear()
    assert run(["list", "accelerator"]) == 0
    told = capsys.readouterr()
    assert "warning" in told.err and "conf/accelerator/zz.yaml" in told.err
    assert "h100_sxm" in told.out


def test_the_shipped_option_does_not_take_the_place_of_a_broken_one(write: Callable[..., Path]) -> None:
    write("conf/accelerator/h100_sxm.yaml", f"{COMPLETE}memory_gb: much\n")
    with pytest.warns(catalogue.LeftOutWarning, match="conf/accelerator/h100_sxm.yaml:5: "):
        assert "H100-SXM-80GB" not in {chip.name for chip in catalogue.accelerators()}


def test_no_group_needs_a_file_that_a_recipe_does_not_name(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    groups = find_folders(Path.cwd()).groups
    for group in groups:
        damage(Path(f"conf/{group}/zz.yaml"), DAMAGE["no YAML"][0])
    assert run(["validate", "recipe=tiny"]) == 0
    assert run(["list"]) == 0
    assert capsys.readouterr().out.count(" read: conf/") == len(groups)
    for group in ("model", "cluster", "accelerator"):  # whose figures are shown
        assert run(["list", group]) == 0
        assert f"conf/{group}/zz.yaml:2" in capsys.readouterr().err
    with pytest.warns(catalogue.LeftOutWarning, match="conf/framework/zz.yaml:2"):
        assert "megatron" in frameworks.frameworks()


def test_a_file_that_is_asked_for_is_refused_by_its_line(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write("conf/optim/zz.yaml", "name: adamw\nlr: [}\n")
    assert run(["validate", "recipe=tiny", "optim=zz"]) == 2
    assert "conf/optim/zz.yaml:2" in capsys.readouterr().err
