"""Host tensors without values take virtual time and no memory."""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from trainspec_cli.planner.time.data_parallel import HOST_BYTES_PER_S
from trainspec_cli.wings.emulated.engine import host
from trainspec_cli.wings.emulated.engine.host import HostMemory, HostSizes
from trainspec_cli.wings.emulated.engine.streams import HOST

VALUES = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    counted = HostMemory()
    monkeypatch.setattr(host, "HOST_MEMORY", counted)
    monkeypatch.setattr(HOST, "is_virtual", True)
    return counted


def test_an_offloaded_update_takes_its_traffic_and_no_memory(memory: HostMemory) -> None:
    with HostSizes():  # torch loads modules on first use
        torch.zeros_like(torch.empty(1, device="meta"), device="cpu")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = HOST.now_s
    with HostSizes():
        parameter = torch.empty(VALUES, device="meta")
        parameter = torch.empty_like(parameter, device="cpu")
        gradient, *moments = (torch.zeros_like(parameter) for _ in range(3))
        made_s = HOST.now_s
        steps = [torch.zeros(())]
        lists = [parameter], [gradient], moments[:1], moments[1:], [], steps
        options = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **options)
        updated_s = HOST.now_s
        (norm,) = torch._foreach_norm([gradient])
        normed_s = HOST.now_s
    assert memory.live_bytes == 4 * 4 * VALUES
    assert made_s - began_s == pytest.approx(4 * 4 * VALUES / HOST_BYTES_PER_S)
    # Four tensors are read, and all of them except the gradient are written.
    assert updated_s - made_s == pytest.approx(7 * 4 * VALUES / HOST_BYTES_PER_S)
    assert normed_s - updated_s == pytest.approx(4 * VALUES / HOST_BYTES_PER_S)
    assert float(norm) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 2**17
    del parameter, gradient, moments, lists
    gc.collect()
    assert (memory.live_bytes, memory.peak_bytes) == (0, 4 * 4 * VALUES)


def test_small_tensors_have_values_and_views_share_memory(memory: HostMemory) -> None:
    with HostSizes():
        assert torch.arange(8, device="cpu").sum().item() == 28
        large = torch.zeros(VALUES, device="cpu")
        assert large.view(2, -1)[1].untyped_storage().data_ptr() == large.untyped_storage().data_ptr()
        assert (large + 1).data_ptr() != large.data_ptr()
        assert large.add_(1) is large
        assert large[:8].tolist() == [0.0] * 8, "not computed"


def test_page_locked_memory_is_rounded_up_to_a_power_of_two(memory: HostMemory) -> None:
    kept = [
        memory.new_tensor(torch.empty(values, dtype=torch.uint8, device="meta")) for values in (2**21, 2**21 + 1, 5)
    ]
    for one in kept:
        memory.lock(one)
    assert memory.live_bytes == 2**21 + 2**22
