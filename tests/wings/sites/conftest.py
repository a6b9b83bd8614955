from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lab.sites import SitesLab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., SitesLab]]:
    """Return a function that creates runs of several distant sites; sites that still run at the end are stopped."""
    pytest.importorskip("cryptography")
    import torch.distributed as dist
    from lab.sites import SitesLab

    # A process group that contains only this process.
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
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
            site.saves.clear()  # reference cycles are collected late
    dist.destroy_process_group()
