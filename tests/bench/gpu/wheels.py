"""The packages that a GPU's machine without a network may lack, as wheels in one folder.

    python -m tests.bench.gpu.wheels FOLDER [--there OUT] [--python 3.12] [--most-mib 64]

Collects what this project needs and what its peers need (torchtitan), for Python 3.12 on Linux x86_64, without torch
and what torch brings. `--there OUT`: the results of an earlier `python -m tests.bench.gpu --all OUT`; what that machine
has is left out. A package that exists as an archive of source alone is built here. `python -m tests.bench.gpu --all OUT
--wheels FOLDER` installs from the folder, into an environment that also sees the machine's own packages.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import re
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ImportError:  # the machine lacks it, and its pip has a copy
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

from .record import last_lines, read_json

WANTED = (
    *("hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "typer>=0.19", "rich>=13.7", "psutil>=5.9", "jinja2>=3.1"),
    *("nvidia-ml-py>=12.535", "safetensors>=0.4.3", "tokenizers>=0.20", "pytest>=8.2", "pytest-timeout>=2.3"),
    *("pytest-xdist>=3.6", "hypothesis>=6.100", "hatchling>=1.26", "packaging>=24"),
    *("torchao>=0.17", "liger-kernel>=0.8", "fla-core>=0.6", "torchtitan>=0.3"),
)
"""Most needed first: where the folder is full, the last ones stay out, and are named."""
OF_TORCH = ("torch", "triton", "torchvision", "torchaudio", "numpy", "sympy", "networkx", "mpmath", "setuptools", "pip")
"""They come with torch, or are too large to bring."""
HEAVY = (
    "pandas",
    "pyarrow",
    "scipy",
    "transformers",
    "datasets",
    "torchdata",
    "tensorboard",
    "grpcio",
    "wandb",
    "aiohttp",
)
"""Of peers and their data, which are not read: the samples lie in memory."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PLATFORMS += ("manylinux_2_24_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--there", type=Path, metavar="OUT")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--most-mib", type=float, default=64.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    record = read_json(options.there / "results.json")["checks"]["machine"] if options.there else {}
    there = {canonicalize_name(name) for name in record.get("found", {}).get("machine", {}).get("packages", {})}
    left_out = collect(options.folder, options.python, there, options.most_mib * MIB)
    wheels = sorted(options.folder.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(file.stat().st_size for file in wheels) / MIB:.1f} MiB, in {options.folder}")
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")


def collect(folder: Path, python: str, there: set[str], most_bytes: float) -> dict[str, str]:
    """Bring every wanted package that is not there, with what each needs; return what stays out, and why."""
    passed_over = there | {*map(canonicalize_name, (*OF_TORCH, *HEAVY))}
    left_out: dict[str, str] = {}
    waiting = list(map(Requirement, WANTED))
    seen = set(passed_over)
    while waiting:
        wanted = waiting.pop(0)
        name = canonicalize_name(wanted.name)
        if name in seen or name.startswith("nvidia-cu"):
            continue
        seen.add(name)
        try:
            wheel = bring(wanted, folder, python)
        except subprocess.CalledProcessError as error:
            left_out[str(wanted)] = last_lines(error.stderr).splitlines()[-1]
            continue
        if sum(file.stat().st_size for file in folder.glob("*.whl")) > most_bytes:
            left_out[str(wanted)] = f"the folder would be larger than {most_bytes / MIB:.0f} MiB"
            wheel.unlink()
            continue
        waiting += needs_of(wheel, python)
    return left_out


def bring(wanted: Requirement, folder: Path, python: str) -> Path:
    """Return the wheel in the folder: the one that is there, a published one, or one built here from source."""
    if found := _in_folder(wanted, folder):
        return found
    given = [f"{wanted.name}{wanted.specifier}", "--no-deps", "--quiet", "--disable-pip-version-check"]
    aimed = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    aimed += [part for platform in PLATFORMS for part in ("--platform", platform)]
    try:
        _pip("download", *given, *aimed, "-d", str(folder))
    except subprocess.CalledProcessError:
        _pip("wheel", *given, "-w", str(folder))
    found = _in_folder(wanted, folder)
    assert found, f"pip left no wheel of {wanted}"
    return found


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, capture_output=True, text=True)


def _in_folder(wanted: Requirement, folder: Path) -> Path | None:
    for file in folder.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(file.name)
        if name == canonicalize_name(wanted.name) and wanted.specifier.contains(version, prereleases=True):
            return file
    return None


def needs_of(wheel: Path, python: str) -> list[Requirement]:
    """Return what a wheel asks for on Linux, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    where = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    where |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    needs = map(Requirement, asked)
    return [need for need in needs if need.marker is None or need.marker.evaluate(where)]


# On the machine


def install(folder: Path, venv: Path) -> str:
    """Return the Python of an environment with the folder's wheels that are missing here and all that is here.

    A virtual environment made from within another one sees the packages of the interpreter below, and not those of the
    other: their folders are named to it.
    """
    python = venv / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "outer.pth").write_text("\n".join(outer_packages()) + "\n")
    missing = [file for file in sorted(folder.glob("*.whl")) if not _is_here(file)]
    if missing:
        given = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "--find-links", str(folder)]
        command = [python, "-m", "pip", "install", *given, *missing]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            shutil.rmtree(venv)
            sys.exit(f"the wheels in {folder} could not be installed: {last_lines(ended.stderr)}")
    print(f"installed {len(missing)} wheels in {venv}: {', '.join(file.name.split('-')[0] for file in missing)}")
    return str(python)


def outer_packages() -> Iterable[str]:
    """Return the folders of packages that this Python reads."""
    return [folder for folder in site.getsitepackages() if Path(folder).is_dir()]


def _is_here(wheel: Path) -> bool:
    name, *_ = parse_wheel_filename(wheel.name)
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
