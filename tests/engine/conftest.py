import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def compile_anew():
    """What earlier tests have compiled counts against the compiler's limits."""
    torch._dynamo.reset()
