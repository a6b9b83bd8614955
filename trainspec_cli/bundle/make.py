"""Make a bundle: wheels, recipes and data in a folder that appears when it is whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainspec_cli.bundle import installer
from trainspec_cli.bundle.contents import Carried, carry, copy_recipes
from trainspec_cli.bundle.download import download
from trainspec_cli.bundle.installer import INSTALLER, RECORD, WHEELS, BundleRecord
from trainspec_cli.bundle.own_wheel import NAME
from trainspec_cli.bundle.readme import README, readme
from trainspec_cli.bundle.record import list_files
from trainspec_cli.bundle.sbom import SBOM, sbom
from trainspec_cli.bundle.target import WheelTarget
from trainspec_cli.bundle.wheel import Wheel, wheels_in
from trainspec_cli.composer.folders import find_folders
from trainspec_cli.corpus.publish import publishing
from trainspec_cli.rundir.files import write_json, write_text
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.run import RunSpec

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class WantedRecipe:
    name: str
    words: tuple[str, ...]
    """`recipe=NAME` and what is changed of it."""
    spec: RunSpec


@dataclass(frozen=True)
class WantedBundle:
    targets: tuple[WheelTarget, ...]
    """All of one Python."""
    extras: tuple[str, ...]
    recipes: tuple[WantedRecipe, ...]
    wheels: Path | None
    """The folder that wheels are taken from; None: pip gets them from where its settings say."""
    command: str


@dataclass(frozen=True)
class MadeBundle:
    folder: Path
    record: BundleRecord
    wheels: tuple[Wheel, ...]
    notes: tuple[str, ...]


def make_bundle(folder: Path, wanted: WantedBundle, on_progress: OnProgress) -> MadeBundle:
    """Write `folder`, which must not exist or be empty.

    Raises FileExistsError where it was filled meanwhile, MachineError for wheels that cannot be got or a full disk, and
    as `carry` and `download` do; nothing is left then.
    """
    folder = folder.expanduser().resolve()
    with publishing(folder) as temporary:
        _fill_wheels(temporary, wanted, on_progress)
        on_progress("conf and recipes", 0.7)
        copy_recipes(find_folders(Path.cwd()), temporary)
        carried = {recipe.name: _carry(recipe, temporary, on_progress) for recipe in wanted.recipes}
        record = _describe(temporary, wanted, carried, on_progress)
    wheels = tuple(wheels_in(folder))
    notes = [f"recipe={name}: {note}" for name, of_recipe in carried.items() for note in of_recipe.notes]
    return MadeBundle(folder, record, wheels, tuple(notes))


def _fill_wheels(bundle: Path, wanted: WantedBundle, on_progress: OnProgress) -> None:
    (bundle / WHEELS).mkdir()
    with tempfile.TemporaryDirectory(prefix="trainspec-wheels-") as staging:
        source = wanted.wheels
        download(
            bundle / WHEELS, Path(staging), wanted.targets, wanted.extras, source, lambda say: on_progress(say, 0.1)
        )


def _carry(recipe: WantedRecipe, bundle: Path, on_progress: OnProgress) -> Carried:
    def report(phase: str, done: float, rows: int) -> None:
        on_progress(f"{recipe.name}: {phase}", 0.7 + 0.2 * done)

    on_progress(f"data of {recipe.name}", 0.7)
    return carry(recipe.name, recipe.words, recipe.spec, bundle, report)


def _describe(
    bundle: Path, wanted: WantedBundle, carried: Mapping[str, Carried], on_progress: OnProgress
) -> BundleRecord:
    """Write the script, the bill of materials and the readme, and after all others bundle.json."""
    on_progress("digests", 0.9)
    now = datetime.now(UTC)
    wheels = wheels_in(bundle)
    shutil.copyfile(Path(installer.__file__), bundle / INSTALLER)
    described = sbom(wheels, list_files(bundle), wanted.extras, wanted.targets, now.isoformat(timespec="seconds"))
    write_json(bundle / SBOM, described)
    python = wanted.targets[0].python
    launches = {name: tuple(of_recipe.words) for name, of_recipe in carried.items()}
    write_text(bundle / README, readme(_version(wheels), python, launches))
    record = BundleRecord(
        version=_version(wheels),
        date=now.date().isoformat(),
        python=python,
        platforms=tuple(target.platform for target in wanted.targets),
        extras=wanted.extras,
        command=wanted.command,
        launches=launches,
        files=list_files(bundle),
    )
    write_json(bundle / RECORD, to_plain(record))
    return record


def _version(wheels: Sequence[Wheel]) -> str:
    return next(wheel.version for wheel in wheels if wheel.name == NAME)
