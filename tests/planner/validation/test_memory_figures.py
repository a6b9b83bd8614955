"""What a metric counts: all that a device shows, what its allocator holds, what tensors need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.hardware.rates import find_accelerator, models
from trainspec_cli.planner.memory.predict import CONTEXT_BYTES, GROUP_BYTES
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.validation.backtest import memory_figure, predicted_as
from trainspec_cli.recipe.keys.layout import Layout


def setup_of(dp_shard: int = 8, micro_batch_size: float = 1.0) -> Setup:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = Fabric(chip, 8, 8, 8, 450.0, 400.0)
    return Setup(models()["llama3_8b"], Layout(dp_shard=dp_shard), fabric, 8192, micro_batch_size, 8)


def test_a_device_shows_more_than_its_allocator_and_that_more_than_tensors() -> None:
    setup = setup_of()
    shown, held, needed = (predicted_as(f"peak ({name})", setup) for name in ("nvidia-smi", "torch reserved", "torch"))
    assert shown > held > needed
    assert shown - held == pytest.approx(CONTEXT_BYTES + GROUP_BYTES)  # the context, and one communicator


def test_the_allocator_gives_its_cache_back_before_the_device_is_full() -> None:
    setup = setup_of(micro_batch_size=1.12)
    assert predicted_as("torch", setup) < 80 * GIB
    assert predicted_as("nvidia-smi", setup) == 80 * GIB


def test_tensors_alone_can_exceed_the_device() -> None:
    setup = setup_of(dp_shard=1)
    assert predicted_as("nvidia-smi", setup) > 100 * GIB


def test_relative_figures_are_over_the_run_without_recomputation() -> None:
    plain = setup_of()
    row = {"metric": "activation memory relative to TP-only baseline", "value": "100", "unit": "%"}
    assert memory_figure(row, plain) == (pytest.approx(1.0), 1.0)
    full = memory_figure(row, replace(plain, recompute=RECOMPUTE["full"]))[0]
    assert full is not None and full < 0.15


def test_units() -> None:
    row = {"metric": "peak memory", "value": "1024", "unit": "MiB"}
    assert memory_figure(row, setup_of())[1] == GIB
    assert memory_figure({"peak_mem_gib": "1", "mem_kind": "torch"}, setup_of())[1] == GIB
    assert memory_figure({}, setup_of()) == (None, None)
    decimal = {"metric": "LoRA max GPU RAM", "value": "1", "unit": "GB", "source": "Lightning-AI/litgpt"}
    assert memory_figure(decimal, setup_of())[1] == 1e9
    assert memory_figure(decimal | {"source": "nvidia-smi"}, setup_of())[1] == GIB
