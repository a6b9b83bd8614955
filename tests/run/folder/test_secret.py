from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.run.folder.generations import SECRET_BYTES, create_secret, read_secret


def test_a_secret_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    umask = os.umask(0)
    try:
        secret = create_secret(path)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(secret) == SECRET_BYTES
    assert read_secret(path) == secret


def test_nothing_that_is_there_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "secret").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        create_secret(tmp_path / "secret")
    assert (tmp_path / "target").read_text() == "mine"


def test_one_that_others_may_read_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    path.chmod(0o640)
    with raises(MachineError, "secret", "others may read"):
        read_secret(path)


def test_one_that_is_a_link_or_not_there_or_too_short_is_refused(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "short").touch(0o600)
    for name, what in (("link", "cannot be read"), ("absent", "cannot be read"), ("short", "holds 0 bytes")):
        with pytest.raises(MachineError, match=what):
            read_secret(tmp_path / name)


@pytest.mark.parametrize(("extra", "what"), [(-1, f"holds {SECRET_BYTES - 1} bytes"), (1, f"holds {SECRET_BYTES + 1}")])
def test_a_secret_has_its_length_and_the_recipe_is_not_at_fault(tmp_path: Path, extra: int, what: str) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(bytes(SECRET_BYTES + extra))
    with pytest.raises(MachineError, match=what) as raised:
        read_secret(path)
    assert raised.value.problems[0].environment


def test_two_secrets_differ_and_are_on_disk_before_they_are_used(tmp_path: Path, disk_calls: list) -> None:
    assert create_secret(tmp_path / "a" / "one") != create_secret(tmp_path / "a" / "two")
    assert disk_calls == [("fsync", "one"), ("fsync", "two")]
