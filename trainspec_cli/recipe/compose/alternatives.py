"""Keys of which one is given in place of the others: what is given last takes the place of what was given before."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.interpolation import MISSING
from trainspec_cli.recipe.compose.origins import COMMAND_LINE, Origins

SECTION, NAMES = "train", ("max_steps", "tokens", "epochs")
"""Keys that say how long a run is."""


def section_of(data: JsonObject) -> JsonObject:
    """Return the section of the alternatives; an empty one where something else stands there, which is reported
    elsewhere."""
    section = data.get(SECTION)
    return section if isinstance(section, dict) else {}


def given(data: JsonObject) -> list[str]:
    """Return the names of the alternatives that have a value."""
    return [name for name in NAMES if section_of(data).get(name) not in (None, MISSING)]


def keep_last(config: DictConfig, names: Sequence[str], origins: Origins, files: Sequence[str]) -> None:
    """Remove those of the alternatives `names` in whose place a later file, or the command line, gives another.

    `files`: the configuration's, in the order in which they were merged; a value of none of them comes before them.
    Alternatives of the same file, or the same command line, all stay: whoever reads them refuses more than one.
    """
    rank_of_file = {file: rank for rank, file in enumerate((*files, COMMAND_LINE))}
    found = {name: origins.get(f"{SECTION}.{name}") for name in names}
    ranks = {name: rank_of_file.get(origin.file, -1) if origin else -1 for name, origin in found.items()}
    for name in (name for name, rank in ranks.items() if rank < max(ranks.values())):
        del config[SECTION][name]
        origins.pop(f"{SECTION}.{name}", None)
