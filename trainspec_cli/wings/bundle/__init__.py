"""Bundles: folders for installing trainspec and training offline, with wheels, recipes, data and a list of their
files."""

from trainspec_cli.wings.bundle.installer import (
    INSTALLER,
    RECORD,
    WHEELS,
    BundleFault,
    BundleRecord,
    examine,
    machine_faults,
    platform_here,
    read_bundle,
    runs_here,
    sha256_of,
)
from trainspec_cli.wings.bundle.make import (
    CopiedRun,
    WantedBundle,
    WantedRecipe,
    copy_recipes,
    copy_run_files,
    make_bundle,
)
from trainspec_cli.wings.bundle.wheels import (
    WheelTarget,
    check_target,
    missing_requirements,
    own_wheel,
    python_here,
    read_wheel,
)

__all__ = [
    "INSTALLER",
    "RECORD",
    "WHEELS",
    "BundleFault",
    "BundleRecord",
    "CopiedRun",
    "WantedBundle",
    "WantedRecipe",
    "WheelTarget",
    "check_target",
    "copy_recipes",
    "copy_run_files",
    "examine",
    "machine_faults",
    "make_bundle",
    "missing_requirements",
    "own_wheel",
    "platform_here",
    "python_here",
    "read_bundle",
    "read_wheel",
    "runs_here",
    "sha256_of",
]
