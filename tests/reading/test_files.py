from __future__ import annotations

from pathlib import Path

from trainspec_cli.reading.files import read_text


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: tiny\n")
    assert read_text(file) == "name: tiny\n"
