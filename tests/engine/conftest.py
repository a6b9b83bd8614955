from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lab.sites import SitesLab


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_of_earlier_meshes():
    """DTensor keeps the placements that it has met: an equal mesh of a later test would be given an earlier one, whose
    process groups are gone."""
    yield
    if "torch.distributed.tensor" in sys.modules:
        debug = import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()


@pytest.fixture
def compile_anew():
    """What earlier tests have compiled counts against the compiler's limits."""
    torch._dynamo.reset()


@pytest.fixture
def lab(one_process: None, tmp_path: Path) -> Iterator[Callable[..., SitesLab]]:
    """Return what makes runs of several far-apart sites; those that are left are stopped."""
    pytest.importorskip("cryptography")
    from lab.sites import SitesLab

    made: list[SitesLab] = []

    def make(name: str = "lab", **settings: Any) -> SitesLab:
        folder = tmp_path / name
        folder.mkdir()
        made.append(SitesLab(folder, **settings))
        return made[-1]

    yield make
    for one in made:
        for site in one.started:
            site.stop.requested = True
            site.saves.clear()  # what is in a circle is collected late
