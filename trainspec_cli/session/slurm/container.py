"""Requirements of a job's container: the folders on this machine that it mounts, and unsupported options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.node import cache_dir, make_cache
from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.shards import SPLITS
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import SlurmSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.slurm.container import mounts

SNAPSHOTS = "snapshots"
"""Folder of the Hub's cache whose files are links into a neighbouring folder."""


def check_container(plan: Plan) -> None:
    """Raise RecipeError if the run cannot be started in its container. Also create the cache, which the container
    mounts."""
    slurm = plan.spec.cluster.slurm
    if slurm.container_image is None:
        return
    wanted = plan.spec.run.dir
    mounts(slurm, [Path.cwd(), *([] if wanted == AUTO else [Path(wanted).absolute()])])
    if plan.kernels.open_ops:
        message = "the first node measures auto kernels with its Python outside the container"
        raise RecipeError(Problem("unsupported", message, "kernels", "set kernels=default"))
    make_cache()


def folders_read(plan: Plan, data_folder: Path | None) -> list[Path]:
    """Return the folders outside the run folder that its workers read: the cache, the data and the initial weights.
    Empty if the job uses no container."""
    if plan.spec.cluster.slurm.container_image is None:
        return []
    weights = []
    init = plan.spec.init
    if (folder := init.hugging_face) is not None:
        weights.append((folder.parent.parent if folder.parent.name == SNAPSHOTS else folder).absolute())
    elif (folder := init.other or init.run) is not None:
        weights.append(folder.absolute())
    return [cache_dir().absolute(), *_data(plan, data_folder), *weights]


def _data(plan: Plan, data_folder: Path | None) -> Iterator[Path]:
    if data_folder is None:
        return
    yield data_folder.absolute()
    if plan.spec.model.unit != "samples":
        collection = Collection.open(data_folder)
        for folder in (*(part.folder for part in collection.parts.values()), *collection.validation.values()):
            yield folder.path.absolute()
            # Shards written by other programs stay in place, and the manifest refers to them.
            shards = [shard for split in SPLITS for shard in folder.manifest.split(split).shards]
            yield from (Path(shard.file).parent for shard in shards if Path(shard.file).is_absolute())


def unseen_image(slurm: SlurmSpec) -> Iterator[str]:
    """Yield a warning if the image is a path that does not exist here. It is only a warning because a login node need
    not see the image."""
    image = slurm.container_image
    if image is not None and image.startswith(("/", "./", "../")) and not expand(image).exists():
        yield f"cluster.slurm.container_image is {image}, which does not exist on this node; the job's nodes need it"
