"""Hydra's defaults lists over trainspec's folders: recipes and groups, the user's own before the shipped ones.

Hydra decides which files make up a composition, and where each is merged; it asks a repository for them. This one
reads each file once, by its path, so a folder may have any name, and it leaves out Hydra's own configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from trainspec_cli.core.json_value import flatten
from trainspec_cli.core.reading.spec_version import KEY
from trainspec_cli.recipe.compose.folders import RECIPE, ROOT, Folders
from trainspec_cli.recipe.compose.interpolation import MISSING
from trainspec_cli.recipe.compose.yaml_file import YamlFile, read_yaml

HYDRA_VERSION_BASE = "1.3"
HEADER_CHARS = 512
"""Hydra reads a file's `# @package` from so much of its beginning."""


@dataclass(frozen=True)
class GroupChoice:
    """One file of a composition, and where it is merged."""

    name: str
    """`model/llama_6m`"""
    package: str
    """The dotted path that it is merged at; "" is the root."""
    file: Path
    read: YamlFile


def load(
    folders: Folders, choices: Sequence[str], skipped: Mapping[str, set[int]], cwd: Path
) -> tuple[DictConfig, list[GroupChoice]]:
    """Compose the root with `choices` (`recipe=tiny`, `model=...`); -> the config, and its files, last wins.

    `skipped` names entries of recipes' defaults lists to leave out: config name -> their numbers from 0.
    Raises RecipeError for a file that cannot be read, and what Hydra and OmegaConf raise.
    """
    version.setbase(HYDRA_VERSION_BASE)
    repository = _RecipeFiles(folders, skipped, cwd)
    chosen = OverridesParser.create().parse_overrides(list(choices))
    listed = create_defaults_list(repository, ROOT, chosen, prepend_hydra=False, skip_missing=False).defaults
    parts = [repository.part(default.config_path, default.package or "") for default in listed if default.config_path]
    config = OmegaConf.create()
    with flag_override(config, "no_deepcopy_set_nodes", True):
        for part in parts:
            _merge(config, part, repository.values(part.name))
    return config, parts


def _merge(config: DictConfig, part: GroupChoice, values: DictConfig) -> None:
    whole = values
    if part.package:
        whole = OmegaConf.create()
        OmegaConf.update(whole, part.package, values, merge=False)
    try:
        config.merge_with(whole)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException(f"In '{part.name}': {error}") from error
    # OmegaConf keeps what a file before it gave where this one asks for a value by `???`: a recipe that needs
    # `init.from` would train from scratch.
    for key, value in flatten(part.read.values()).items():
        if value == MISSING:
            OmegaConf.update(config, f"{part.package}.{key}".lstrip("."), MISSING)


class _RecipeFiles(ConfigRepository):
    """What Hydra asks for files by their names, `recipe/tiny` and `model/llama_6m`."""

    def __init__(self, folders: Folders, skipped: Mapping[str, set[int]], cwd: Path) -> None:
        self.sources: list[ConfigSource] = []
        self._folders = folders
        self._skipped = skipped
        self._cwd = cwd
        self._known: dict[str, ConfigResult | None] = {}
        self._read: dict[str, tuple[Path, YamlFile]] = {}

    def part(self, name: str, package: str) -> GroupChoice:
        return GroupChoice(name, package, *self._read[name])

    def values(self, name: str) -> DictConfig:
        """Return the content of a file that was loaded, without its defaults list."""
        known = self._known[name]
        assert known is not None and isinstance(known.config, DictConfig)
        return known.config

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._known:
            self._known[config_path] = self._load(config_path)
        return self._known[config_path]

    def _load(self, name: str) -> ConfigResult | None:
        file = self._folders.find_config(name)
        if file is None:
            return None
        read = read_yaml(file, self._cwd)
        self._read[name] = file, read
        config = OmegaConf.create(read.values())
        skipped = self._skipped.get(name, set())
        config.pop(KEY, None)
        defaults = self._extract_defaults_list(name, config)
        kept = [entry for number, entry in enumerate(defaults._iter_ex(resolve=False)) if number not in skipped]
        loaded = ConfigResult("trainspec", str(file), config, _header(name, file))
        loaded.defaults_list = self._create_defaults_list(name, OmegaConf.create(kept))
        return loaded

    def group_exists(self, config_path: str) -> bool:
        if config_path == RECIPE:
            return True
        return any((folder / config_path).is_dir() for folder in self._folders.conf)

    def config_exists(self, config_path: str) -> bool:
        return self._folders.find_config(config_path) is not None

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        return self._folders.recipe_names() if group_name == RECIPE else self._folders.options(group_name)


def _header(name: str, file: Path) -> dict[str, str | None]:
    """Return what a file says of itself in its first lines; a recipe is merged at the root."""
    if name.startswith(f"{RECIPE}/"):
        return {"package": "_global_"}
    with file.open(encoding="utf-8") as text:
        return ConfigSource._get_header_dict(text.read(HEADER_CHARS))
