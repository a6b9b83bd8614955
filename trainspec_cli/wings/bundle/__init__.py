"""A folder that installs trainspec and trains where no network is: wheels, recipes, data, a list of what is in it."""

from trainspec_cli.wings.bundle.installer import (
    INSTALLER,
    RECORD,
    WHEELS,
    BundleFault,
    BundleRecord,
    examine,
    platform_here,
    read_bundle,
    runs_here,
    sha256_of,
    unfit_machine,
)
from trainspec_cli.wings.bundle.make import Carried, WantedBundle, WantedRecipe, carry, copy_recipes, make_bundle
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
    "Carried",
    "WantedBundle",
    "WantedRecipe",
    "WheelTarget",
    "carry",
    "check_target",
    "copy_recipes",
    "examine",
    "make_bundle",
    "missing_requirements",
    "own_wheel",
    "platform_here",
    "python_here",
    "read_bundle",
    "read_wheel",
    "runs_here",
    "sha256_of",
    "unfit_machine",
]
