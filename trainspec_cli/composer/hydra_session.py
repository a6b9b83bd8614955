"""Hydra's compose API over trainspec's folders: recipes and groups, the user's own before the shipped ones.

Two of Hydra's plugin kinds, registered by hand: a search path that puts the user's ./conf first, and a source
with its own scheme (`recipes://`) that makes a flat folder of recipes the group `recipe`, merged at the root.
Paths never pass through Hydra's override grammar, so a folder may have any name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainspec_cli.composer.folders import ROOT, SUFFIX, Folders
from trainspec_cli.composer.origins import RECIPE
from trainspec_cli.reading.spec_version import KEY
from trainspec_cli.reading.yaml_file import read_yaml

HYDRA_VERSION_BASE = "1.3"


@dataclass(frozen=True)
class GroupChoice:
    """One file of a composition, and where it is merged."""

    name: str
    """`model/llama_6m`"""
    package: str
    """The dotted path that it is merged at; "" is the root."""


@dataclass(frozen=True)
class _Session:
    folders: Folders
    skipped: Mapping[str, set[int]]


_session: ContextVar[_Session] = ContextVar("session")


def load(
    folders: Folders, choices: Sequence[str], skipped: Mapping[str, set[int]]
) -> tuple[DictConfig, list[GroupChoice]]:
    """Compose the root with `choices` (`recipe=tiny`, `model=...`); -> the config, and its files, last wins.

    `skipped` names entries of recipes' defaults lists to leave out: config name -> their numbers from 0.
    Raises hydra.errors.HydraException and what YAML and OmegaConf raise.
    """
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(UserGroupSource)
    Plugins.instance().register(OurSearchPath)
    token = _session.set(_Session(folders, skipped))
    try:
        with initialize_config_dir(str(folders.conf[-1]), version_base=HYDRA_VERSION_BASE):
            loader = GlobalHydra.instance().config_loader()
            files = loader.compute_defaults_list(ROOT, list(choices), RunMode.RUN).defaults
            parts = [
                GroupChoice(file.config_path or "", file.package or "")
                for file in files
                if (file.package or "").partition(".")[0] != "hydra" and file.config_path != "_dummy_empty_config_"
            ]
            return compose(ROOT, list(choices)), parts
    finally:
        _session.reset(token)


class OurSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        session = _session.get(None)
        if session is None:
            return
        for folder in session.folders.recipes:
            search_path.append(provider="trainspec", path=f"{RecipeSource.scheme()}://{folder}")
        for folder in session.folders.conf[:-1]:
            path = f"{UserGroupSource.scheme()}://{folder}"
            search_path.prepend(provider="trainspec", path=path, anchor="main")


class UserGroupSource(FileConfigSource):
    """A source that reads the user's own groups, nested ones too, within the limits of any YAML that others wrote."""

    @staticmethod
    def scheme() -> str:
        return "groups"

    def load_config(self, config_path: str) -> ConfigResult:
        read_yaml(Path(self.path) / f"{config_path.removesuffix(SUFFIX)}{SUFFIX}")
        return super().load_config(config_path)


class RecipeSource(ConfigSource):
    """A source that reads `recipe/tiny` from FOLDER/tiny.yaml and merges it at the root."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or (config_path.split("/")[0] == RECIPE and self._path(config_path).is_dir())

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(f"{RECIPE}/") and self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [RECIPE]
        return sorted(file.stem for file in self._path(config_path).glob(f"*{SUFFIX}"))

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._file(config_path)
        config = OmegaConf.load(file)
        if isinstance(config, DictConfig):
            config.pop(KEY, None)
        skipped = _session.get().skipped.get(config_path, set())
        if skipped and isinstance(config, DictConfig):
            config.defaults = [entry for index, entry in enumerate(config.defaults) if index not in skipped]
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=config, header={"package": "_global_"}
        )

    def _path(self, config_path: str) -> Path:
        return Path(self.path) / config_path.removeprefix(RECIPE).removeprefix("/")

    def _file(self, config_path: str) -> Path:
        path = self._path(config_path)
        return path.with_name(f"{path.name}{SUFFIX}")
