"""Devices of any vendor take one path; where there is no chip, torch's accelerator is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.engine import accelerators
from trainspec_cli.engine.accelerators import (
    KINDS,
    allocator_count,
    chip_name,
    devices_here,
    enter,
    own_stream,
    physical_device,
    process_group_backends,
    random_state,
    release_unused,
    set_random_state,
    started_kind,
    synchronise,
    synchronise_stream,
)
from trainspec_cli.engine.checkpoint.files import rng_parts, set_rng

CPU = torch.device("cpu")
Put = Callable[[str, Any], None]
CHIPS = ("cuda", "xpu", "hpu")


class Accelerator:
    """Stands in for torch.accelerator: records the calls."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def set_device_index(self, device: torch.device) -> None:
        self.noted.append(f"current {device}")

    def device_count(self) -> int:
        return 3

    def synchronize(self, device: torch.device) -> None:
        self.noted.append(f"wait for {device}")

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: self.noted.append(f"wait for the stream of {device}"))

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {"num_alloc_retries": 4}

    def empty_cache(self) -> None:
        self.noted.append("empty cache")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    stand_in = Accelerator()
    monkeypatch.setattr(torch, "accelerator", stand_in)
    return stand_in


@pytest.mark.parametrize("kind", CHIPS)
def test_a_process_enters_the_device_of_its_number(
    kind: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert enter(kind) == torch.device(kind, 2)
    assert accelerator.noted == [f"current {kind}:2"]
    assert devices_here(kind) == [torch.device(kind, index) for index in range(3)]


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_a_kind_without_numbers_has_one_device(
    kind: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert enter(kind) == torch.device(kind)
    assert accelerator.noted == []
    assert devices_here(kind) == [torch.device(kind)]


def test_backends_of_process_groups_are_those_that_torch_names() -> None:
    """What torch registers itself; hccl comes with Habana's and Ascend's plugins."""
    registered = torch.distributed.Backend.default_device_backend_map
    assert {kind: KINDS[kind].collectives for kind in ("cpu", "cuda", "xpu", "mps")} == {
        kind: str(registered[kind]) for kind in ("cpu", "cuda", "xpu", "mps")
    }
    assert process_group_backends("cpu") == "gloo"
    assert process_group_backends("cuda") == "cpu:gloo,cuda:nccl"
    assert process_group_backends("xpu") == "cpu:gloo,xpu:xccl"
    assert process_group_backends("npu") == "cpu:gloo,npu:hccl"


def test_the_kinds_that_keep_the_count_of_updates_are_those_of_torchs_optimizers() -> None:
    from torch.optim.optimizer import _get_capturable_supported_devices

    of_torch = {"cuda", "xpu", "hpu"}
    assert of_torch <= set(_get_capturable_supported_devices())
    assert {kind for kind, one in KINDS.items() if one.capturable} == of_torch | {"npu"}


@pytest.mark.parametrize("kind", CHIPS)
def test_a_chip_is_awaited_and_counted_and_a_cpu_is_not(kind: str, accelerator: Accelerator) -> None:
    chip = torch.device(kind, 1)
    for device in (chip, CPU):
        synchronise(device)
        synchronise_stream(device)
        release_unused(device)
    assert accelerator.noted == [f"wait for {chip}", f"wait for the stream of {chip}", "empty cache"]
    assert allocator_count(chip, "num_alloc_retries") == 4
    assert allocator_count(chip, "num_device_alloc") == 0, "it has allocated nothing yet"
    assert allocator_count(CPU, "num_alloc_retries") == 0


def test_work_beside_the_computation_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(accelerators.torch, "Stream", lambda device: made.append(device) or "a stream")
    assert own_stream(torch.device("xpu", 1)) == "a stream"
    with own_stream(CPU):
        assert made == [torch.device("xpu", 1)]


# Random numbers and names, of which each kind's own module knows


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Put a stand-in where torch has a kind's module; torch remembers which it found."""

    def put(kind: str, module: Any) -> None:
        monkeypatch.setattr(torch, kind, module, raising=False)
        torch.get_device_module.cache_clear()

    yield put
    torch.get_device_module.cache_clear()


class OwnModule:
    """Stands in for torch.xpu and the like: its random numbers are one byte."""

    def __init__(self, started: bool = True) -> None:
        self.states: dict[torch.device, torch.Tensor] = {}
        self.started = started

    def is_initialized(self) -> bool:
        return self.started

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states.get(device, torch.tensor([7], dtype=torch.uint8))

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device] = state

    def get_device_name(self, device: torch.device) -> str:
        return f"chip {device.index}"


@pytest.mark.parametrize("kind", CHIPS)
def test_a_checkpoint_holds_the_random_numbers_of_the_chip(kind: str, modules: Put) -> None:
    own = OwnModule()
    modules(kind, own)
    chip = torch.device(kind, 1)
    host, device = parts = rng_parts(3, chip)
    assert (host.name, device.name) == ("rng.3.cpu", f"rng.3.{kind}")
    assert device.tensor.tolist() == random_state(chip).tolist() == [7]
    set_rng(parts, chip)
    assert own.states.keys() == {chip}
    set_random_state(torch.tensor([9], dtype=torch.uint8), chip)
    assert rng_parts(3, chip)[1].tensor.tolist() == [9]


def test_a_chip_tells_its_name_and_one_that_cannot_is_called_as_its_kind(modules: Put) -> None:
    modules("xpu", OwnModule())
    assert chip_name(torch.device("xpu", 1)) == "chip 1"
    assert chip_name(torch.device("mps")) == "mps"


def test_a_chip_that_is_not_in_use_is_not_started(modules: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = torch.device("xpu")
    for found, is_started, told in ((chip, True, "xpu"), (chip, False, None), (None, True, None)):
        stand_in = SimpleNamespace(current_accelerator=lambda found=found: found)
        monkeypatch.setattr(torch, "accelerator", stand_in)
        modules("xpu", OwnModule(is_started))
        assert started_kind() == told


def test_a_device_is_told_by_its_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of one GPU are on one device, and a device that knows no place is not told from others."""
    places = {0: (0, 1, 0), 1: (0, 1, 0), 2: (0, 2, 0)}
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")

    def properties_of(device: torch.device) -> Any:
        return SimpleNamespace(**dict(zip(names, places[device.index or 0], strict=True)))

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_properties=properties_of))
    first, slice_, other = (physical_device(torch.device("cuda", index)) for index in range(3))
    assert first == slice_ != other and first is not None
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert physical_device(torch.device("mps")) is None
