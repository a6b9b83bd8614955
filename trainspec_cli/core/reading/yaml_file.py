"""Read YAML written by other programs, with limits on size, depth, and the expansion of aliases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.core.reading.files import (
    UNSTATED_VERSION,
    VERSION_KEY,
    check_version,
    read_text,
    unreadable,
    without_version,
)

MAX_BYTES = 512 * 2**10
MAX_DEPTH = 32
"""Maximum nesting depth of lists and mappings."""
MAX_NODES = 20_000
"""Maximum number of values in a file, counting the values of an alias each time."""
MAX_INTERPOLATED_CHARS = 2_000
"""Maximum length of a value with `${...}`, which is slow to parse."""
MAX_DIGITS = 30
_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
_NO_VALUES = frozenset(_TAG + kind for kind in ("binary", "omap", "pairs", "set"))
"""YAML types that recipes do not support."""


class YamlLimitError(yaml.MarkedYAMLError):  # type: ignore[misc] # PyYAML has no types
    """The file exceeds a limit set by this reader, not by YAML; `problem_mark` is the position."""


def _in_our_dialect(base: Any) -> Any:
    """Return a loader that reads numbers as in YAML 1.2 and OmegaConf (`1e-3` is a number), and dates as text."""
    loader: Any = type("Loader", (base,), {})
    left_out = f"{_TAG}float", f"{_TAG}timestamp"
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in left_out]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))
    return loader


_FLOAT = re.compile(
    r"""(?:[-+]?\d+(?:_\d+)*\.[\d_]*(?:[eE][-+]?\d+)?
    |[-+]?\d+(?:_\d+)*[eE][-+]?\d+
    |\.\d+(?:_\d+)*(?:[eE][-+]\d+)?
    |[-+]?\d+(?:_\d+)*(?::[0-5]?\d)+\.[\d_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))\Z""",
    re.VERBOSE | re.ASCII,
)
_Loader = _in_our_dialect(yaml.SafeLoader)
_FastLoader = _in_our_dialect(getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the tree of nodes with their positions. Raises yaml.YAMLError."""
    try:
        root = _FastLoader(text).get_single_node()
    except (yaml.YAMLError, RecursionError):
        # The slow loader reads the text again, because libyaml reports less about a mistake, and not its start.
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        except RecursionError as error:
            raise YamlLimitError(problem=_TOO_DEEP, problem_mark=loader.get_mark()) from error
    if root is not None:
        _count(root, 1, {}, set())
    return root


def construct_yaml(root: yaml.Node) -> Any:
    """Return the value of a tree of nodes, as plain values."""
    return _Loader("").construct_document(root)


def read_yaml(path: Path) -> JsonValue:
    """Return the content of a file as plain values.

    Raises UnreadableFileError, or MissingFileError if the file does not exist."""
    text = read_text(path, MAX_BYTES)
    try:
        root = compose_yaml(text)
        return None if root is None else construct_yaml(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise unreadable(path, f"is not YAML: {error.problem or error.context}", line=line, column=column) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unreadable(path, f"cannot be read: {str(error).partition(chr(10))[0]}") from error


def read_versioned_yaml(path: Path) -> JsonValue:
    """Return the content of a file in any version that this trainspec reads, without the version. Raises the same
    errors as `read_yaml`, and UnreadableFileError if the file was written by a newer trainspec."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        return content
    check_version(path, content.get(VERSION_KEY, UNSTATED_VERSION))
    return without_version(content)


def _count(node: yaml.Node, depth: int, known: dict[int, int], above: set[int]) -> int:
    """Count the values to which `node` expands. Raises YamlLimitError if there are too many, or if they are nested too
    deeply."""
    if id(node) in above:
        raise _over("it contains itself, through an alias", node)
    if depth > MAX_DEPTH:
        raise _over(_TOO_DEEP, node)
    if node.tag in _NO_VALUES:
        raise _over(f"!!{node.tag.removeprefix(_TAG)} is not a type that a recipe can contain", node)
    if isinstance(node, yaml.ScalarNode):
        if node.tag == f"{_TAG}timestamp":
            node.tag = f"{_TAG}str"  # a date is text, as in Hydra
        if "${" in node.value and len(node.value) > MAX_INTERPOLATED_CHARS:
            raise _over(
                f"a text with ${{...}} has {len(node.value):,} characters; at most {MAX_INTERPOLATED_CHARS}", node
            )
        if node.tag == f"{_TAG}int" and len(node.value) > MAX_DIGITS:
            raise _over(f"a whole number has {len(node.value):,} digits; at most {MAX_DIGITS}", node)
        return 1
    if id(node) not in known:
        above.add(id(node))
        items = [item for pair in node.value for item in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count(item, depth + 1, known, above) for item in items)
        above.remove(id(node))
    if known[id(node)] > MAX_NODES:
        raise _over(f"it has more than {MAX_NODES:,} values when its aliases are expanded", node)
    return known[id(node)]


def _over(problem: str, node: yaml.Node) -> YamlLimitError:
    return YamlLimitError(problem=problem, problem_mark=node.start_mark)
