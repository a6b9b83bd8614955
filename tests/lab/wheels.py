"""Small wheels of made-up packages, for pip and for what reads wheels."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

TRAINSPEC = "trainspec"


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    requires: Iterable[str] = (),
    tag: str = "py3-none-any",
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Write a wheel of one module. `headers`: further lines of its METADATA."""
    about = {"Metadata-Version": "2.4", "Name": name, "Version": version, **(headers or {})}
    lines = [f"{key}: {value}" for key, value in about.items()] + [f"Requires-Dist: {text}" for text in requires]
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{name.replace('-', '_')}.py": f"version = {version!r}\n",
        f"{stem}.dist-info/METADATA": "\n".join(lines) + "\n",
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    wheel = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


def make_whole_set(folder: Path) -> None:
    """Write a made-up trainspec and what it needs: `dep`, which needs `deeper`, and `extra-dep` for its extra."""
    folder.mkdir(exist_ok=True)
    headers = {"Requires-Python": ">=3.11,<3.14", "Provides-Extra": "more", "License-Expression": "Apache-2.0"}
    make_wheel(folder, TRAINSPEC, "0.1.0", ["dep>=1", "extra-dep; extra == 'more'"], headers=headers)
    make_wheel(folder, "dep", "1.5", ["deeper"], headers={"License": "BSD"})
    make_wheel(folder, "deeper")
    make_wheel(folder, "extra-dep")
    make_wheel(folder, "pip", "26.0")


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
