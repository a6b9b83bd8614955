"""Build hook: conf/ and recipes/ travel inside the wheel, and only there.

A static `force-include` would also copy a stale snapshot into editable installs, where the checkout itself
is the data; so the hook adds them for standard wheels alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA_FOLDERS = ("conf", "recipes")


class DataFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            for folder in DATA_FOLDERS:
                build_data["force_include"][str(Path(self.root) / folder)] = f"trainspec_cli/_data/{folder}"
