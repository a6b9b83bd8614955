"""What a job's container must see of this machine's folders, and what it cannot do."""

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
"""The folder of the Hub's cache whose files are links to others beside it."""


def check_container(plan: Plan) -> None:
    """Raise RecipeError where the run could not be started in its container; make the cache, which it mounts."""
    slurm = plan.spec.cluster.slurm
    if slurm.container_image is None:
        return
    wanted = plan.spec.run.dir
    mounts(slurm, [Path.cwd(), *([] if wanted == AUTO else [Path(wanted).absolute()])])
    if plan.kernels.open_ops:
        message = "auto kernels are measured by the first node's own Python, and the run trains in a container"
        raise RecipeError(Problem("unsupported", message, "kernels", "type kernels=default"))
    make_cache()


def folders_read(plan: Plan, data_folder: Path | None) -> list[Path]:
    """Return the folders outside a run's own that its workers read: the cache, the data, and the weights it begins
    with. None without a container."""
    if plan.spec.cluster.slurm.container_image is None:
        return []
    return [cache_dir().absolute(), *_data(plan, data_folder), *_weights(plan)]


def _data(plan: Plan, data_folder: Path | None) -> Iterator[Path]:
    if data_folder is None:
        return
    yield data_folder.absolute()
    if plan.spec.model.unit != "samples":
        collection = Collection.open(data_folder)
        for folder in (*(part.folder for part in collection.parts.values()), *collection.validation.values()):
            yield folder.path.absolute()
            # Shards that other programs have written stay where they are, and the manifest names them.
            shards = [shard for split in SPLITS for shard in folder.manifest.split(split).shards]
            yield from (Path(shard.file).parent for shard in shards if Path(shard.file).is_absolute())


def _weights(plan: Plan) -> Iterator[Path]:
    init = plan.spec.init
    if (folder := init.hugging_face) is not None:
        yield (folder.parent.parent if folder.parent.name == SNAPSHOTS else folder).absolute()
    elif (folder := init.other or init.run) is not None:
        yield folder.absolute()


def unseen_image(slurm: SlurmSpec) -> Iterator[str]:
    """Yield a warning where the image is a file or folder that is not seen here; a login node need not see it."""
    image = slurm.container_image
    if image is not None and image.startswith(("/", "./", "../")) and not expand(image).exists():
        yield f"cluster.slurm.container_image is {image}, which this node does not see; the job's nodes must"
