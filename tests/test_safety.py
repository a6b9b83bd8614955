"""What no module of the package may do: let data that comes from elsewhere run code, or write what is not JSON."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "trainspec_cli"
FILES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
}
UNSAFE_YAML = {"unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "UnsafeLoader", "FullLoader"}


def offences(source: str) -> list[str]:
    """What a module does that none may do, with its line."""
    found = {
        (getattr(node, "lineno", 0), words)
        for node in ast.walk(ast.parse(source))
        for words in (*_imports(node), *_uses(node), *_calls(node))
    }
    return [f"line {line}: {words}" for line, words in sorted(found)]


def _imports(node: ast.AST) -> Iterator[str]:
    """`from a import b` imports both."""
    names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
    origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    forbidden = MODULES | OBJECT_COLLECTIVES | UNSAFE_YAML
    yield from (f"imports {name}" for name in (*names, *origin) if forbidden & set(name.split(".")))


def _uses(node: ast.AST) -> Iterator[str]:
    """However it is reached: a function that is only passed on is used too."""
    if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES | UNSAFE_YAML | MODULES:
        yield f"uses {node.attr}"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BUILT_IN | OBJECT_COLLECTIVES:
        yield f"uses {node.id}"


def _calls(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    called, given = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
    if called == "torch.load" and _text(given.get("weights_only")) != "True":
        yield "torch.load without weights_only=True"
    if called in {"np.load", "numpy.load"} and _text(given.get("allow_pickle")) not in {"", "False"}:
        yield "numpy.load with allow_pickle"
    if called in {"yaml.load", "yaml.load_all"} and not _is_safe(given.get("Loader")):
        yield "yaml.load without a safe Loader"
    if called in {"json.dump", "json.dumps"} and "allow_nan" not in given:
        yield f"{called} without allow_nan"


def _text(expression: ast.expr | None) -> str:
    return "" if expression is None else ast.unparse(expression)


def _is_safe(loader: ast.expr | None) -> bool:
    """Each loader that the expression names is a safe one."""
    named = re.findall(r"\w*Loader\w*", _text(loader))
    return bool(named) and set(named) <= {"SafeLoader", "CSafeLoader"}


OF_THIS_PROCESS = {
    file: [f"line {line}: imports pickle"]
    for file, line in {"engine/observe/watch.py": 14, "wings/own_script/hook/sitecustomize.py": 280}.items()
}
"""Files that read NCCL's flight recorder. Torch gives its records with source lines only in this form."""


def test_no_module_lets_data_run_code_or_writes_what_is_no_json() -> None:
    found = {str(file.relative_to(PACKAGE)): offences(file.read_text(encoding="utf-8")) for file in FILES}
    assert {file: words for file, words in found.items() if words} == OF_THIS_PROCESS


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("import pickle", "imports pickle"),
        ("from torch.distributed import broadcast_object_list", "imports broadcast_object_list"),
        ("dist.all_gather_object(a, b)", "uses all_gather_object"),
        ("act = dist.gather_object", "uses gather_object"),
        ("torch.serialization.pickle.loads(x)", "uses pickle"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("np.load(path, allow_pickle=True)", "numpy.load with allow_pickle"),
        ("eval(text)", "uses eval"),
        ("yaml.load(text)", "yaml.load without a safe Loader"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load without a safe Loader"),
        ("yaml.unsafe_load(text)", "uses unsafe_load"),
        ("json.dumps(x)", "json.dumps without allow_nan"),
    ],
)
def test_an_offence_is_found(source: str, offence: str) -> None:
    assert offences(f"\n{source}") == [f"line 2: {offence}"]


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path, mmap_mode='r')",
        "yaml.load(text, Loader=getattr(yaml, 'CSafeLoader', yaml.SafeLoader))",
        "model.eval()",
        "re.compile(text)",
        "json.dumps(x, allow_nan=False)",
    ],
)
def test_what_is_safe_is_let_through(source: str) -> None:
    assert offences(source) == []
