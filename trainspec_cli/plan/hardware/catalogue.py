"""The accelerators and models that conf/ describes, for tables of runs that name them by label."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import UnreadableFileError, read_text, show_kind, unreadable
from trainspec_cli.core.reading.spec_version import KEY
from trainspec_cli.recipe.canonical import from_plain
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.structure import choose_section

T = TypeVar("T")


class LeftOutWarning(UserWarning):
    """A file of the user's ./conf is broken, and no option of its name is known to the tables of this process."""


def conf_folders() -> list[Path]:
    """The user's own ./conf first, then the installed one, or the checkout's."""
    package = Path(__file__).resolve().parents[2]
    return [Path.cwd() / "conf", package / "_data" / "conf", package.parent / "conf"]


def load_group(group: str, build: Callable[[JsonObject], T]) -> dict[str, T]:
    """Return what `build` makes of every option of a group, by file name; the first folder that has one wins.

    An option has what its `defaults` take from others of the group. A broken file of the user's own is left out with a
    LeftOutWarning, so that a command which does not need it goes on; the shipped option of its name is left out too,
    since nobody asked for that one. Raises UnreadableFileError or RecipeError where a shipped file is broken.
    """
    options: dict[str, JsonObject] = {}
    files: dict[str, Path] = {}
    broken: dict[str, str] = {}
    for folder in conf_folders():
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem not in files:
                files[path.stem] = path
                try:
                    options[path.stem] = _read_option(path)
                except UnreadableFileError as error:
                    broken[path.stem] = _why_left_out(path, error)
    built: dict[str, T] = {}
    for name in options:
        try:
            built[name] = build(_with_defaults(name, options, files, ()))
        except TrainspecError as error:
            broken[name] = _why_left_out(files[name], error)
    for name in sorted(broken):
        warnings.warn(broken[name], LeftOutWarning, stacklevel=2)
    return built


def _read_option(path: Path) -> JsonObject:
    from trainspec_cli.core.reading.yaml_file import read_yaml  # deferred: `plan` never needs it

    content = read_yaml(path)
    if not isinstance(content, dict):
        raise unreadable(path, f"holds {show_kind(content)}; `key: value` lines are needed", line=1)
    if odd := [key for key in content if not isinstance(key, str)]:
        raise unreadable(path, f"has a key that is no text: {odd[0]!r}", line=_line_of(path, str(odd[0])))
    return content


def _why_left_out(path: Path, error: TrainspecError) -> str:
    """Return the file, the line and what is wrong. Raises the error itself where the file is not the user's own."""
    own = Path.cwd() / "conf"
    if not path.is_relative_to(own):
        raise error
    problem = error.problems[0]
    shown = path.relative_to(own.parent)
    line = problem.line or _line_of(path, problem.path)
    why = problem.message.removeprefix(f"{path} ")
    return f"{shown}{f':{line}' if line else ''}: {why}; the file is left out: correct it, or move it elsewhere"


def _line_of(path: Path, key: str) -> int | None:
    """Return the line of a key at the top of a file; None where the file has no such key."""
    from yaml import YAMLError

    from trainspec_cli.core.reading.yaml_file import MAX_BYTES, compose_yaml

    try:
        root = compose_yaml(read_text(path, MAX_BYTES))
    except (UnreadableFileError, YAMLError):
        return None
    top = key.partition(".")[0]
    pairs = root.value if root is not None and isinstance(root.value, list) else []
    return next((pair[0].start_mark.line + 1 for pair in pairs if str(pair[0].value) == top), None)


def _with_defaults(
    name: str, options: Mapping[str, JsonObject], files: Mapping[str, Path], within: tuple[str, ...]
) -> JsonObject:
    """Return an option on top of those of its group that its `defaults` name; `within`: those that lead to it."""
    own = options[name]
    entries = own.get("defaults")
    named = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    whole: JsonObject = {}
    for entry in (entry for entry in named if entry != "_self_" and "/" not in entry):
        if entry in (*within, name):
            why = f"its defaults lead back to it: {' -> '.join((*within, name, entry))}"
        elif entry not in options:
            why = f"its defaults name {entry}, {'which is broken' if entry in files else 'and there is no such option'}"
        else:
            whole = _laid_over(whole, _with_defaults(entry, options, files, (*within, name)))
            continue
        raise RecipeError(Problem("bad_default", why, "defaults"))
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
    return tuple(load_group("accelerator", build_accelerator).values())


def build_accelerator(values: JsonObject) -> AcceleratorSpec:
    return from_plain(AcceleratorSpec, {**without_defaults(values), "sources": None})


def without_defaults(values: JsonObject) -> JsonObject:
    """Return the values without keys that say something of the file."""
    return {key: value for key, value in values.items() if key not in ("defaults", KEY)}


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
    """Return the models that conf/ describes, but for `auto`, which is a checkpoint's."""
    return {name: model for name, model in load_group("model", _model).items() if model is not None}


def _model(values: JsonObject) -> ModelSpec | None:
    known = without_defaults(values)
    if known.get("family", "auto") == "auto":
        return None
    model: ModelSpec = from_plain(cast("Any", choose_section(ModelSpec, known)), known)
    return model


def find_model(label: str) -> ModelSpec | None:
    """A described model whose name is the label's, or begins it (`resnet50-v1.5` is resnet50)."""
    plain = "".join(words(label.replace("_", "-")))
    known = {name.replace("_", ""): model for name, model in models().items()}
    fitting = [name for name in known if plain == name or plain.startswith(name)]
    return known[max(fitting, key=len)] if fitting else None
