from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist


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
    """Reset the compiler, because the programs of earlier tests count against its limits."""
    torch._dynamo.reset()
