"""The profiles of clusters: kept in the cache by the cluster's name, and applied to every later plan and launch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import yaml

from trainspec_cli import __version__
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.node import cache_dir, cpu_name, make_cache
from trainspec_cli.core.reading.files import VERSION_LINE
from trainspec_cli.core.reading.yaml_file import read_versioned_yaml
from trainspec_cli.planner.calibration import PACE, efficiency_with
from trainspec_cli.planner.hardware.cluster import chip_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.tables import ClusterProfile
from trainspec_cli.run.folder.files import write_text

UNNAMED = "auto"


def profile_path(cluster: str) -> Path:
    """Return the file of a cluster's profile; it may not exist."""
    return cache_dir() / "profiles" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', cluster or UNNAMED).lstrip('.')}.yaml"


def list_profiles() -> list[Path]:
    return sorted((cache_dir() / "profiles").glob("*.yaml"))


def read_profile(path: Path) -> ClusterProfile:
    """Read a profile. Raises RecipeError for a file that is none."""
    try:
        return from_plain(ClusterProfile, read_versioned_yaml(path))
    except (RecipeError, ValueError, TypeError) as error:
        message = f"{path} is no profile of a cluster: {error}"
        hint = "write it again with trainspec calibrate"
        raise RecipeError(Problem("wrong_profile", message, file=str(path), hint=hint)) from error


def write_profile(path: Path, profile: ClusterProfile) -> None:
    if path.is_relative_to(cache_dir()):
        make_cache()
    head = "# Factors over the planner's shipped values, by trainspec calibrate; nine in ten lie within low and high.\n"
    write_text(path, head + VERSION_LINE + yaml.safe_dump(to_plain(profile), sort_keys=False))


def device_of(spec: RunSpec, machine: Machine | None) -> str:
    """Return the accelerator's name by the catalogue, or the processor's."""
    if machine is not None and machine.gpu_names and spec.cluster.device != "cpu":
        chip, _ = chip_of(machine)
        return chip.name if chip else machine.gpu_names[0]
    return spec.cluster.accelerator.name if spec.cluster.accelerator else cpu_name()


def find_profile(spec: RunSpec, machine: Machine | None) -> tuple[ClusterProfile | None, str]:
    """Return the profile that holds for this cluster, and a line that says so, or why one that is there does not.
    Raises RecipeError where the file is damaged."""
    path = profile_path(spec.cluster.name)
    if spec.cluster.profile == "off" or spec.cluster.pools or not path.is_file():
        return None, ""
    profile = read_profile(path)
    from importlib import metadata  # takes long to load, and few plans have a profile

    found = {"device": device_of(spec, machine), "torch": metadata.version("torch"), "trainspec": __version__}
    for what, here in found.items():
        if (made := getattr(profile, what)) != here:
            stale = f"the profile of {profile.cluster} is not used: it was made with {what} {made}, and this is {here}"
            return None, f"{stale}; trainspec calibrate makes it anew, trainspec calibrate --forget removes it"
    return profile, describe_profile(profile)


def describe_profile(profile: ClusterProfile) -> str:
    """Return one line: date, rows, and what it changed."""
    ranked = sorted(profile.parameters.items(), key=lambda item: -abs(item[1].factor - 1))
    moved = [f"{name} x {found.factor:.2f}" for name, found in ranked if found.informed and name != PACE][:3]
    pace = profile.parameters[PACE].factor
    changed = ", ".join((f"pace x {pace:.2f}", *moved))
    rows = f"{profile.rows} measured step{'s' if profile.rows > 1 else ''}"
    return f"profile of {profile.cluster}, {profile.date}, {rows}: {changed}; cluster.profile=off leaves it out"


def with_profile(spec: RunSpec, machine: Machine | None) -> tuple[RunSpec, str]:
    """Return the recipe with its cluster's efficiencies as calibrated (what it says itself stands above them), and a
    line that says so. A CPU's profile is applied where its probe is read."""
    profile, line = find_profile(spec, machine)
    if profile is None or profile.kind != "gpu":
        return spec, line if profile is None else ""
    values = efficiency_with(profile.factors, Efficiency()).as_dict() | (spec.cluster.efficiency or {})
    return replace(spec, cluster=replace(spec.cluster, efficiency=values)), line
