"""The accelerators and models that conf/ describes, for tables of runs that name them by label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from trainspec_cli.json_value import JsonObject
from trainspec_cli.reading.files import show_kind, unreadable
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.recipe.cluster import AcceleratorSpec
from trainspec_cli.spec.recipe.model import ModelSpec
from trainspec_cli.spec.structure import choose_section


def conf_folders() -> list[Path]:
    """The user's own ./conf first, then the installed one, or the checkout's."""
    package = Path(__file__).resolve().parents[2]
    return [Path.cwd() / "conf", package / "_data" / "conf", package.parent / "conf"]


def load_group(group: str) -> dict[str, JsonObject]:
    """Return every option of a group by file name, with what its `defaults` take from others of the group; the first
    folder that has one wins. Raises UnreadableFileError."""
    from trainspec_cli.reading.yaml_file import read_yaml  # deferred: `plan` never needs it

    options: dict[str, JsonObject] = {}
    for folder in conf_folders():
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem not in options:
                content = read_yaml(path)
                if not isinstance(content, dict):
                    raise unreadable(path, f"holds {show_kind(content)}; `key: value` lines are needed")
                options[path.stem] = content
    return {name: _with_defaults(name, options, ()) for name in options}


def _with_defaults(name: str, options: Mapping[str, JsonObject], within: tuple[str, ...]) -> JsonObject:
    """Return an option on top of those of its group that its `defaults` name; `within`: those that lead to it."""
    own = options[name]
    entries = own.get("defaults")
    named = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    whole: JsonObject = {}
    for entry in named:
        if entry in options and entry not in (*within, name):
            whole = _laid_over(whole, _with_defaults(entry, options, (*within, name)))
    return _laid_over(whole, own)


def _laid_over(below: JsonObject, above: JsonObject) -> JsonObject:
    """Return `above` over `below`, section by section."""
    whole = {**below}
    for key, value in above.items():
        under = whole.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        whole[key] = _laid_over(cast("JsonObject", under), cast("JsonObject", value)) if both else value
    return whole


def words(label: str) -> tuple[str, ...]:
    """`H100-SXM-80GB` -> (h100, sxm, 80gb): the parts of a label that labels are compared by."""
    return tuple(re.findall(r"[a-z0-9.]+", label.lower().replace("nvidia", "").replace("tesla", "")))


@lru_cache(maxsize=1)
def accelerators() -> tuple[AcceleratorSpec, ...]:
    """Return the accelerators without their sources, so that they can be keys."""
    specs = []
    for values in load_group("accelerator").values():
        known = {key: value for key, value in values.items() if key in AcceleratorSpec.__dataclass_fields__}
        specs.append(from_plain(AcceleratorSpec, {**known, "sources": None}))
    return tuple(specs)


VARIANTS = frozenset({"pcie", "nvl", "500w", "hbm2e"})
"""Words that a label has when it means them: `NVIDIA H100 80GB HBM3` is the SXM part."""


@lru_cache(maxsize=256)
def find_accelerator(label: str) -> AcceleratorSpec | None:
    """The chip a label names: the same first word, and most of the others; among equals the shorter name."""
    wanted = words(label)
    if not wanted:
        return None
    best: tuple[tuple[int, int, int], AcceleratorSpec] | None = None
    for chip in accelerators():
        has = words(chip.name)
        if "".join(has) == "".join(wanted):
            return chip
        if not any(word in has for word in wanted if re.search(r"\d", word) and not word.endswith("gb")):
            continue
        unsaid = len(VARIANTS & set(has) - set(wanted))
        score = (len(set(has) & set(wanted)), -unsaid, -len(has))
        if best is None or score > best[0]:
            best = score, chip
    return best[1] if best else None


@lru_cache(maxsize=1)
def models() -> dict[str, ModelSpec]:
    described = load_group("model")
    known = {
        name: {key: value for key, value in values.items() if key != "defaults"}
        for name, values in described.items()
        if values.get("family", "auto") != "auto"
    }
    return {name: from_plain(cast("Any", choose_section(ModelSpec, values)), values) for name, values in known.items()}


def find_model(label: str) -> ModelSpec | None:
    """A described model whose name is the label's, or begins it (`resnet50-v1.5` is resnet50)."""
    plain = "".join(words(label.replace("_", "-")))
    known = {name.replace("_", ""): model for name, model in models().items()}
    fitting = [name for name in known if plain == name or plain.startswith(name)]
    return known[max(fitting, key=len)] if fitting else None
