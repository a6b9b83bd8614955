from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import (
    check_folder,
    check_private,
    check_tree,
    is_plain_name,
    make_folder,
    private_files,
    why_not_trusted,
)

HINT = "choose another"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with files in folders; its owner lets a group write to some of them."""
    root = tmp_path / "run"
    (root / "checkpoints" / "step_1").mkdir(parents=True)
    (root / "checkpoints" / "step_1" / "manifest.json").write_text("{}")
    (root / "run.json").write_text("{}")
    (root / "run.json").chmod(0o664)
    root.chmod(0o2775)
    return root


def test_what_is_made_by_this_process_and_its_children_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with private_files():
            (tmp_path / "own").mkdir()
            (tmp_path / "own" / "file").touch()
            subprocess.run(["touch", tmp_path / "childs"], check=True)
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("own", "own/file", "childs", "after")] == [0o700, 0o600, 0o600, 0o664]


def test_a_folder_that_is_there_stays_as_its_owner_has_set_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "new" / "folder", HINT)
    assert mode(tmp_path / "new" / "folder") == 0o700
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2770)
    make_folder(tmp_path / "team", HINT)
    assert mode(tmp_path / "team") == 0o2770


def test_a_run_of_ones_own_is_trusted_also_through_links(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "last").symlink_to("step_1")
    (run / "checkpoints" / "newest").symlink_to(run / "checkpoints" / "step_1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "last").symlink_to(run)
    check_tree(run)
    check_tree(tmp_path / "runs" / "last")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "../nothing", "/", "checkpoints/../../outside"])
@pytest.mark.parametrize("place", ["pid.json", "checkpoints/step_1/rank00000.safetensors"])
def test_a_link_out_of_the_run_is_refused(run: Path, tmp_path: Path, target: str, place: str) -> None:
    (tmp_path / "outside").mkdir()
    depth = place.count("/")
    link = target if target.startswith("/") else "../" * depth + target
    (run / place).symlink_to(link)
    with refused(
        MachineError, "not_trusted", "", f"{run / place} is a link ", f"outside of {run}: /", f"rm {run / place}"
    ):
        check_tree(run)


def test_what_wandb_writes_into_its_own_folder_is_left_to_it(run: Path, tmp_path: Path) -> None:
    """As wandb 0.31 lays it out: the log of its core process is a link into its cache."""
    core_log = tmp_path / "cache" / "core-debug.log"
    core_log.parent.mkdir()
    core_log.touch()
    logs = run / "wandb" / "offline-run-20261126_190000-first" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(core_log)
    (run / "wandb" / "latest-run").symlink_to("offline-run-20261126_190000-first")
    check_tree(run)
    (run / "checkpoints" / "wandb").mkdir()
    (run / "checkpoints" / "wandb" / "log").symlink_to(core_log)
    with refused(MachineError, "not_trusted", "", "checkpoints/wandb/log", " a link "):
        check_tree(run)


def test_wandbs_folder_itself_is_checked(run: Path, tmp_path: Path) -> None:
    (run / "wandb").symlink_to(tmp_path)
    with refused(MachineError, "not_trusted", "", "wandb is a link "):
        check_tree(run)


def test_a_link_by_way_of_another_is_refused(run: Path) -> None:
    (run / "a").symlink_to("b")
    (run / "b").symlink_to("/etc")
    (run / "c").symlink_to("b/passwd")
    with refused(MachineError, "not_trusted", "", " is a link "):
        check_tree(run)


def test_pipes_are_refused_and_so_is_what_all_may_write(run: Path) -> None:
    os.mkfifo(run / "result.json")
    with refused(MachineError, "not_trusted", "", "result.json", "neither a file "):
        check_tree(run)
    (run / "result.json").unlink()
    (run / "checkpoints" / "step_1").chmod(0o777)
    with refused(MachineError, "not_trusted", "", "step_1", "every user"):
        check_tree(run)


@pytest.mark.parametrize("folder", ["logs", "checkpoints", "events"])
def test_every_folder_is_looked_through(run: Path, folder: str) -> None:
    for name in ("logs", "events"):
        (run / name).mkdir()
    os.mkfifo(run / folder / "pipe")
    with refused(MachineError, "not_trusted", "", f"{folder}/pipe", "neither a file "):
        check_tree(run)


def test_folders_within_folders_without_end_are_refused(run: Path) -> None:
    """Deeper than Python recurses, and than a path may be long."""
    folder, before = os.open(run, os.O_RDONLY), Path.cwd()
    os.fchdir(folder)
    try:
        for _ in range(2500):
            os.mkdir("dd")  # noqa: PTH102
            os.chdir("dd")
        with pytest.raises(MachineError, match=r"below .*: File name too long"):
            check_tree(run)
    finally:
        os.close(folder)
        os.chdir(before)
        subprocess.run(["rm", "-r", run], check=True)


def test_another_users_run_is_refused(shared: Path, stranger: Callable[..., None]) -> None:
    stranger("mkdir -m 755 $1 && echo '{}' > $1/run.json", shared / "theirs")
    with pytest.raises(MachineError) as caught:
        check_tree(shared / "theirs")
    assert re.search("theirs .* another user, nobody", str(caught.value))
    assert "cp -rP" in caught.value.problems[0].hint
    assert caught.value.problems[0].environment, "the recipe is not at fault"
    subprocess.run(["cp", "-rP", shared / "theirs", shared / "mine"], check=True, umask=0o022)
    check_tree(shared / "mine")


def test_another_users_file_in_ones_own_run_is_refused(run: Path, shared: Path, stranger: Callable[..., None]) -> None:
    stranger("touch $1", shared / "pid.json")
    (shared / "pid.json").rename(run / "pid.json")
    with refused(MachineError, "not_trusted", "", "run/pid.json", "another user"):
        check_tree(run)


def test_another_users_link_to_ones_own_folder_is_refused(
    run: Path, shared: Path, stranger: Callable[..., None]
) -> None:
    stranger("ln -s $2 $1", shared / "last", run)
    with refused(MachineError, "not_trusted", "", "last", "another user"):
        check_folder(shared / "last", HINT)


def test_a_private_folder_is_real_and_ones_own_and_closed(
    shared: Path, tmp_path: Path, stranger: Callable[..., None]
) -> None:
    (tmp_path / "closed").mkdir(0o700)
    check_private(tmp_path / "closed", HINT)
    (tmp_path / "open").mkdir(0o711)
    (tmp_path / "link").symlink_to(tmp_path / "closed")
    stranger("mkdir -m 700 $1", shared / "theirs")
    for folder, why in (
        (tmp_path / "open", "is open to other users"),
        (tmp_path / "link", "is not a folder"),
        (shared / "theirs", "belongs to another user"),
    ):
        with pytest.raises(MachineError, match=why):
            check_private(folder, HINT)


@pytest.mark.parametrize("name", ["..", ".", "", "../x", "/etc/passwd", "a/b", "a\0b", "a\\b", None, 3])
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_plain_name(name)
    assert is_plain_name("rank00000.safetensors")


def test_a_folder_that_cannot_be_examined_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nothing")
    with pytest.raises(MachineError, match=r"broken .* No such file"):
        check_folder(tmp_path / "broken", HINT)


def test_an_owner_without_a_name_is_told_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    facts = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 0, 4_000_000_001, 0, 0, 0, 0, 0))
    assert why_not_trusted(facts).endswith("another user, number 4000000001")
    assert why_not_trusted(os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 0, 0, 0, 0, 0, 0, 0))) == "", "root is trusted"
    own = os.stat_result((stat.S_IFDIR | 0o757, 0, 0, 0, 4_000_000_000, 0, 0, 0, 0, 0))
    assert "every user" in why_not_trusted(own)
