"""Who may import whom: the rooms of the package have doors, and torch lives in one of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lab.drawing import slow_after

from trainspec_cli.cli.main import COMMANDS

PACKAGE = Path(__file__).parent.parent / "trainspec_cli"

TRUNK = {
    "core": set(),
    "recipe": set(),
    "recipe/compose": {"recipe"},
    "data/huggingface": {"recipe"},
    "data/corpus": {"recipe", "data/huggingface"},
    "data/weights": {"recipe", "data/huggingface"},
    "planner/pipeline": {"recipe"},
    "balance/batch": {"recipe"},
    "balance/decisions": {"recipe", "balance/batch", "planner/pipeline"},
    "run/folder": {"recipe"},
    "run/channel": {"recipe", "run/folder"},
    "run/recovery": {"recipe", "balance/batch"},
    "reporter/diagnosis": {"recipe", "run/folder", "run/recovery", "balance/decisions"},
    "planner": {
        "recipe",
        "planner/pipeline",
        "balance/batch",
        "balance/decisions",
        "run/recovery",
        "reporter/diagnosis",
    },
    "balance": {
        *("recipe", "planner", "planner/pipeline", "balance/batch", "balance/decisions"),
        *("run/channel", "run/folder", "run/recovery"),
    },
    "reporter": {"recipe", "run/folder"},
    "run": {
        *("recipe", "data/huggingface", "data/corpus", "data/weights", "planner/pipeline"),
        *("balance/batch", "balance/decisions", "run/channel", "run/folder", "run/recovery"),
    },
    "engine": {
        *("recipe", "data/huggingface", "data/corpus", "data/weights", "planner/pipeline"),
        *("balance/batch", "balance/decisions", "run/channel", "run/folder", "run/recovery"),
    },
    "session": {
        *("recipe", "recipe/compose", "data/huggingface", "data/corpus", "data/weights"),
        *("planner", "balance", "balance/batch", "balance/decisions", "run"),
        *("run/channel", "run/folder", "run/recovery"),
        *("reporter", "reporter/diagnosis"),
    },
    "cli": {"recipe", "recipe/compose", "data/corpus", "planner", "run", "run/folder", "reporter", "session"},
}
"""Room of the trunk -> the rooms that it may import, apart from `core`. A folder that is named here is a separate room;
`planner/pipeline` is one file, which the engine runs by, and has memory/caching_allocator.py with it."""
WINGS = sorted(folder.name for folder in (PACKAGE / "wings").iterdir() if (folder / "__init__.py").is_file())
TRUNK_IMPORTS_WINGS = {
    "own_script": {"__init__.py"},  # the type that attach() returns, for type checkers alone
}
"""Wing -> files of the trunk that still import it. It may only become shorter."""
TORCH = {"torch", "torchao", "triton", "liger_kernel", "fla"}
ASSEMBLERS = {"build", "run", "tools", "__main__"}
"""Folders of the engine that join the others; the others import neither them nor one another, but for `comm`."""


def room_of(name: str) -> str:
    """Return the room of a module, named by its dotted or slashed path below the package."""
    parts = tuple(re.split(r"[./]", name.removesuffix(".py")))
    if parts[:3] == ("planner", "memory", "caching_allocator"):
        return "planner/pipeline"
    below = "/".join(parts[:2])
    return below if below in TRUNK or parts[0] == "wings" else parts[0]


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return the imports and classes of `file`, wherever they stand in it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)))


def imports(file: Path) -> Iterator[str]:
    """Dotted names that `file` imports anywhere in it: `from a.b import c` gives `a.b.c`."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(folder: Path) -> set[tuple[str, str]]:
    """(room, file that imports it)"""
    return {
        (room_of(name.removeprefix(f"{PACKAGE.name}.")), file.relative_to(PACKAGE).as_posix())
        for file in folder.rglob("*.py")
        for name in imports(file)
        if name.startswith(f"{PACKAGE.name}.") and not name.endswith(".__version__")
    }


def test_rooms_keep_to_their_doors() -> None:
    wrong = [
        f"{file} imports {other}"
        for other, file in imported_rooms(PACKAGE)
        if "/" in file and (room := room_of(file)) in TRUNK and not other.startswith("wings/")
        if other not in TRUNK[room] | {"core", room}
    ]
    assert sorted(wrong) == []


def test_the_trunk_imports_no_wing() -> None:
    """Wings plug in through `core/wings.py`; the exceptions are what is left to move."""
    found: dict[str, set[str]] = {}
    for other, file in imported_rooms(PACKAGE):
        if other.startswith("wings/") and not file.startswith("wings/"):
            found.setdefault(other.removeprefix("wings/"), set()).add(file)
    assert found == TRUNK_IMPORTS_WINGS


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_no_other_wing(wing: str) -> None:
    others = {other for other, _ in imported_rooms(PACKAGE / "wings" / wing)}
    assert [other for other in others if other.startswith("wings/") and other != f"wings/{wing}"] == []


def test_doors_lead_to_no_circle() -> None:
    check_no_circle(TRUNK)


def check_no_circle(doors: dict[str, set[str]]) -> None:
    left = dict(doors)
    while left:
        leaves = {room for room, others in left.items() if not others & left.keys()}
        assert leaves, f"these import one another in a circle: {sorted(left)}"
        left = {room: others for room, others in left.items() if room not in leaves}


def test_the_face_imports_a_room_only_when_one_of_its_functions_is_called() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert at_once == ["__future__", "typing"]


def test_no_room_has_the_name_of_a_function_of_the_face() -> None:
    """Importing a room sets it as an attribute of the package, where it would take the function's place."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions
    assert not functions & {path.stem for path in PACKAGE.iterdir()}


def test_names_of_environment_variables_stand_in_one_module() -> None:
    """In messages too, they are put together from there."""
    quoted = re.compile(r"""["']TRAINSPEC_[A-Z_]+["']""")
    files = {file.name for file in PACKAGE.rglob("*.py") if quoted.search(file.read_text(encoding="utf-8"))}
    hook = "sitecustomize.py"  # it runs without the package; tests/wings/own_script/test_hook.py compares the names
    assert files == {"environment_names.py", hook}


NOT_OURS = {"hf_datasets", "torch"}
"""First folders of other projects' files that comments name."""


def test_comments_name_files_that_are_there() -> None:
    naming = re.compile(r"`((?:\w+/)+\w+\.py)`")
    missing = []
    for file in PACKAGE.rglob("*.py"):
        room = PACKAGE / file.relative_to(PACKAGE).parts[0]
        for name in naming.findall(file.read_text(encoding="utf-8")):
            places = (PACKAGE.parent, PACKAGE, room, file.parent)
            if name.split("/")[0] not in NOT_OURS and not any((place / name).is_file() for place in places):
                missing.append(f"{file.relative_to(PACKAGE)}: {name}")
    assert sorted(missing) == []


def test_a_name_of_a_class_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


UNTYPED = {
    "engine/kernels/adamw.py": "torch's parameter groups",
    "engine/optim/whole.py": "torch's parameter groups",
    "engine/optim/own.py": "torch's parameter groups",
    "engine/parallel/expert.py": "keyword arguments of torch's checkpoint()",
    "wings/emulated/engine/device.py": "keyword arguments of torch's operations",
    "wings/emulated/engine/exchanges.py": "keyword arguments of torch's operations",
}
"""Files that may hold values without types by name, and what these are. Records are dataclasses; a plain value on its
way to or from a file is a `JsonObject`."""


def test_values_by_name_have_types() -> None:
    files = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bdict\[str, Any\]", file.read_text(encoding="utf-8"))
    }
    assert sorted(files - UNTYPED.keys()) == []


TORCH_IN_SCRIPTS = {
    *(f"wings/own_script/attachment/{name}.py" for name in ("run", "loop", "torch_state", "shares")),
    *("wings/own_script/attachment/transformers_callback.py", "__init__.py"),
}
"""They run in the user's script, which has imported torch: all but torch_state.py name its types alone, or import
it when a function is called. The face names types of torch in signatures alone."""


def test_torch_is_imported_in_the_engine_and_in_users_scripts_alone() -> None:
    """The part of a wing that runs in the workers is its folder `engine`."""
    importers = {
        file.relative_to(PACKAGE)
        for file in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] in TORCH for name in imports(file))
    }
    outside = {file.as_posix() for file in importers if "engine" not in (file.parts[0], *file.parts[2:3])}
    assert outside == TORCH_IN_SCRIPTS
    loading = subprocess.run(
        [sys.executable, "-c", "import sys, trainspec_cli; trainspec_cli.attach(); print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert loading.stdout == "False\n", loading.stderr


def test_what_cuda_alone_has_stands_in_one_module() -> None:
    """Everything else asks torch.accelerator, torch.Event and torch.Stream, or the device's own module."""
    naming = re.compile(r"\btorch\.cuda\.|\bfrom torch import .*\bcuda\b|\bfrom torch\.cuda\b|\.is_cuda\b|\.cuda\(")
    files = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if naming.search(file.read_text(encoding="utf-8"))
    }
    assert files == {"engine/cuda_only.py"}


def test_folders_of_the_engine_do_not_import_one_another() -> None:
    engine = PACKAGE / "engine"
    folders = {folder.name for folder in engine.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    pairs = [
        f"{file.relative_to(engine)} imports {parts[2]}"
        for folder in sorted(folders - ASSEMBLERS)
        for file in (engine / folder).rglob("*.py")
        for parts in (name.split(".") for name in imports(file))
        if parts[:2] == [PACKAGE.name, "engine"] and parts[2] in (folders | ASSEMBLERS) - {folder, "comm"}
    ]
    assert pairs == []


def test_folders_of_the_session_lead_to_no_circle() -> None:
    session = PACKAGE / "session"
    wings = {folder.name for folder in session.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    doors = {
        wing: {
            parts[2]
            for file in (session / wing).rglob("*.py")
            for parts in (name.split(".") for name in imports(file))
            if parts[:2] == [PACKAGE.name, "session"] and parts[2] in wings - {wing}
        }
        for wing in wings
    }
    check_no_circle(doors)


OF_OTHER_PLANS = (
    *("trainspec_cli.run.folder.events", "trainspec_cli.data.weights", "trainspec_cli.data.huggingface"),
    *("trainspec_cli.balance.disturbance", "trainspec_cli.planner.pools.plan", "trainspec_cli.wings.sites.rules"),
)
FORBIDDEN = {
    "--help": ("torch", "hydra", "omegaconf", "rich", "typer"),
    **{f"{name} --help": ("torch", "hydra") for name in COMMANDS},
    "validate recipe=tiny": ("torch",),
    "show recipe=tiny": ("torch",),
    "list recipe": ("torch", "hydra"),
    "plan recipe=qwen3_0_6b cluster=h100": ("torch", "numpy", "psutil", *OF_OTHER_PLANS),
}
"""Command line -> modules it must not load."""
OFTEN_TYPED = ("--help", "launch --help", "validate recipe=tiny", "list recipe", "plan recipe=qwen3_0_6b cluster=h100")

LOADED = """
import sys
from trainspec_cli.__main__ import run
code = run(sys.argv[1:])
print("loaded:", *sorted(sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize("command_line", [*OFTEN_TYPED, *slow_after(0, sorted(FORBIDDEN.keys() - OFTEN_TYPED))])
def test_commands_load_no_more_than_they_need(command_line: str) -> None:
    ran = subprocess.run([sys.executable, "-c", LOADED, *command_line.split()], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.rpartition("loaded:")[2].split()
    assert [module for module in FORBIDDEN[command_line] if module in loaded] == []
