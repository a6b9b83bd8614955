"""The emulated device without values: the same allocations as with values, and one rank in place of a world."""

from __future__ import annotations

import json
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.drawing import slow_after
from wings.emulated.on_device import plan_of
from wings.emulated.test_device import run
from wings.emulated.test_planned import planned

from trainspec_cli.__main__ import run as run_command
from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.wings.emulated.engine.allocation_log import AllocationLog
from trainspec_cli.wings.emulated.planned import time_step
from trainspec_cli.wings.emulated.rehearsal import RankRehearsal

SIZES = {"TRAINSPEC_EMULATED": "sizes=1"}


@pytest.mark.parametrize("families", slow_after(1, ["dense", "moe windowed mamba hybrid"]))
def test_allocations_are_the_same_with_and_without_values(families: str) -> None:
    with_values = run("allocations", families)
    without = run("allocations", families, **SIZES)
    assert list(without) == families.split()
    for family, sizes in without.items():
        assert sizes.pop("losses") == [[0.0, 0.0]] * 3
        assert all(0 < loss < 10 and not skipped for loss, skipped in with_values[family].pop("losses"))
        assert sizes == with_values[family]
        assert len(sizes["sizes"]) > 1000


def test_the_stages_of_a_rank_share_the_streams_of_fsdp2_and_thus_their_memory() -> None:
    """The pools are those of the compute stream, and of the streams for gathering and for reducing."""
    assert run("pools", **SIZES) == 3


def test_the_host_reads_zeros_and_what_depends_on_values_is_refused() -> None:
    found = run("without_values", TRAINSPEC_EMULATED="sizes=1,memory_gib=300")
    assert found["numbers"] == [0.0, 0, False]
    assert found["copies"] == [[[0.0, 0.0]] * 3] * 2
    assert found["large"] == [2**38, 0]
    assert [name.split()[0] for name in found["refused"]] == ["nonzero", "index", "_unique2"]
    assert found["allocated"] == 512


def test_a_step_records_a_few_events_for_each_wait_of_a_layer() -> None:
    """A layer that gathers parameters does so in each pass; with tensor parallelism it exchanges four times in each,
    and an exchange of the backward has a wait of its own. Two events are around every wait and, in another stream,
    around every exchange."""
    expected = {
        "dp": lambda layers, micro_batches: 14 + 6 * layers + 4 * micro_batches,
        "zero3": lambda layers, micro_batches: 10 + (14 * layers + 12) * micro_batches,
        "tp": lambda layers, micro_batches: 14 + 4 * layers + (24 * layers + 20) * micro_batches,
    }
    for case, number in run("marks", **SIZES).items():
        name, layers, micro_batches = case.split()
        assert number == expected[name](int(layers), int(micro_batches)), case


def test_the_log_knows_what_is_live_at_the_peak() -> None:
    log = AllocationLog()
    kept = log.add(100, "kept")
    released = log.add(50, "released")
    log.end(released)
    highest = log.add(70, "highest")
    log.end(highest)
    log.add(40, "later")
    assert log.at_peak == [kept, highest]
    log.begin()
    assert [block.shape for block in log.at_peak] == ["kept", "later"]


@pytest.mark.parametrize(
    ("family", "layout"),
    slow_after(
        0,
        [
            ("dense", {"tp": 2}),
            ("dense", {"dp_shard": 2}),
            ("dense", {"pp": 2}),
            ("tied", {"pp": 2}),
            ("dense", {"cp": 2}),
            ("moe", {"dp_replicate": 2}),
        ],
    ),
)
def test_a_rank_without_peers_uses_the_memory_of_one_with_peers(
    family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    case = json.dumps([family, layout, "adamw"])
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, "rehearsed", case, str(rank), str(tmp_path)) for rank in range(2)]
    alone = run("rehearsed", case, "1", "alone", **SIZES)
    together = ranks[1].result()
    for found in (alone, together):
        found.pop("seconds")
    if "tp" not in layout:
        # Exchanges beside the computation keep their memory until they end, which depends on the peers.
        for name in ("peak_bytes", "reserved_bytes", "peak"):
            one, other = alone.pop(name), together.pop(name)
            assert name == "peak" or one <= other
    assert alone == together


@pytest.mark.parametrize("layout", slow_after(0, [{"pp": 2}, {"pp": 2, "pipeline_schedule": "zbv"}]))
def test_a_replayed_pipeline_takes_the_time_of_ranks_that_wait_for_one_another(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    case = json.dumps(["dense", layout, "adamw"])
    chip = "h100_sxm"
    together = {"TRAINSPEC_EMULATED": f"time={chip},launch_us=0", "LOCAL_WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(run, "rehearsed", case, str(rank), str(tmp_path), **together) for rank in range(2)]
    step_s = max(sum(rank.result()["time_s"].values()) for rank in ranks)
    alone = [from_plain(RankRehearsal, run("rehearsed", case, str(rank), "alone", chip, **SIZES)) for rank in range(2)]
    plan = plan_of("dense", Layout(**layout), "adamw", chip)
    assert alone[0].pipeline is not None
    plan = replace(plan, grad_accum_steps=alone[0].pipeline.micro_batches)
    replayed = time_step(replace(planned(), plan=plan, kinds=(0, 1)), alone)
    assert replayed is not None
    assert replayed.step_s == pytest.approx(step_s, rel=1e-3)
    assert min(replayed.parts_s["hand_over"], replayed.parts_s["bubble"]) > 2e-3 * step_s


def rehearse(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run_command(["rehearse", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


SMALL = ["recipe=llama3_8b", "model.num_layers=2", "cluster.num_nodes=1", "batching.global_batch_size=8"]
TWO_BY_TWO = [*SMALL, "layout.tp=2", "layout.pp=2", "layout.dp_shard=1", "cluster.devices_per_node=4"]


@pytest.mark.slow
def test_memory_ends_where_the_allocator_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The peak is the planned one. With one block less, the tensor of the peak does not fit."""
    done = rehearse(capsys, *TWO_BY_TWO, "--ranks=2", "--steps=1")
    (rank,) = done["ranks"]
    found = rank["rehearsed"]
    assert rank["planned_tensors_bytes"] == pytest.approx(found["peak_bytes"], rel=0.01)
    assert rank["planned_allocator_bytes"] == pytest.approx(found["reserved_bytes"], rel=0.1)
    assert found["peak"]["part"] == "forward of micro-batch 1, stage 1", "the loss, with all micro-batches before it"
    assert sum(group["bytes"] for group in found["peak"]["largest"]) == found["peak_bytes"]
    assert found["state_bytes"] < found["checkpoint_bytes"] * 1.01 < found["peak_bytes"]
    least_gib = (found["peak_bytes"] + done["outside_bytes"]) / GIB
    failing = rehearse(capsys, *TWO_BY_TWO, "--ranks=2", "--steps=1", f"--memory-gib={least_gib - 1e-6!r}", code=3)
    (rank,) = failing["ranks"]
    failed = rank["rehearsed"]["failed"]
    assert failed["bytes"] > 2**20 and failed["origin"] and failed["shape"]
    assert rank["rehearsed"]["peak"]["part"] == found["peak"]["part"]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        ([*TWO_BY_TWO, "--ranks=4"], 2, "unknown_value"),
        ([*TWO_BY_TWO, "--ranks=first"], 2, "unknown_value"),
        ([*TWO_BY_TWO, "--memory-gib=1"], 2, "usage"),
        ([*TWO_BY_TWO, "disturb=slow_device", "--ranks=0"], 2, "usage"),
        ([*TWO_BY_TWO, "--trace=/proc/none/trace.json"], 2, "output_exists"),
        ([*TWO_BY_TWO, "--html=."], 2, "output_exists"),
        (
            ["model=llama3_8b", "cluster=a100_40gb", "cluster.num_nodes=1", "cluster.devices_per_node=1"],
            3,
            "does_not_fit",
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rehearse(capsys, *arguments, code=code)
    assert [one["code"] for one in found["errors"]] == [problem]


OFFLOADED = [
    [*SMALL, "cluster.devices_per_node=4", "offload=optimizer", *layout]
    for layout in (
        ["layout.dp_shard=4", "layout.zero_stage=3", "batching.micro_batch_size=1"],
        ["layout.dp_replicate=2", "layout.tp=2"],
        ["layout.pp=2", "layout.dp_shard=2", "recompute=full"],
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", OFFLOADED)
def test_offloaded_state_is_in_host_memory_and_updated_there(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The host holds 16 bytes per parameter; page-locked parameters and gradients are rounded up to powers of two."""
    done = rehearse(capsys, *arguments, "compile=false")
    (found,) = (one["rehearsed"] for one in done["ranks"] if one["rehearsed"]["rank"] == done["step"]["rank"])
    state_bytes = found["checkpoint_bytes"] * 16 / 12
    assert state_bytes < found["host_bytes"] < 1.5 * state_bytes
    assert found["state_bytes"] < 2**24
    rehearsed_s, planned_s = (done["step"][name]["optimizer"] for name in ("parts_s", "planned_parts_s"))
    # The copy of the last gradients may be waited for: 4 bytes each at 50 GB/s.
    assert 0.99 * planned_s < rehearsed_s < planned_s + found["checkpoint_bytes"] / 3 / 50e9 + 0.001
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < found["host_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [*SMALL, "cluster.devices_per_node=8", "layout.dp_shard=8"],
        [*SMALL, "cluster.devices_per_node=8", "layout.tp=4", "layout.dp_replicate=2", "recompute=full"],
        [*SMALL, "cluster.devices_per_node=8", "layout.cp=2", "layout.dp_shard=4"],
        [
            *SMALL,
            "cluster.devices_per_node=8",
            "layout.dp_replicate=8",
            "recompute=selective",
            "batching.micro_batch_size=1",
        ],
        ["recipe=llama3_8b", "model.num_layers=8", "cluster.num_nodes=1", "batching.global_batch_size=16", "comm=int8"],
        [*SMALL, "cluster.devices_per_node=4", "layout.dp_shard=4", "precision.matmul=fp8"],
        *OFFLOADED,
        ["recipe=mixtral_8x7b", "model.num_layers=2", "cluster.num_nodes=1", "layout.ep=4", "layout.dp_shard=8"],
        ["recipe=mixtral_8x7b", "model.num_layers=2", "cluster.num_nodes=4", "layout.tp=4", "layout.dp_shard=8"],
        ["recipe=qwen3_8b", "model.num_layers=4", "cluster.num_nodes=1", "layout.pp=2", "layout.tp=2"],
        [
            *("recipe=qwen3_1_7b", "model.num_layers=8", "cluster.num_nodes=2", "batching.global_batch_size=64"),
            *("layout.pp=4", "layout.cp=2", "layout.dp_replicate=2", "recompute=full"),
            *("layout.pipeline_schedule=interleaved", "layout.virtual_stages=2", "--ranks=1,13"),
        ],
    ],
)
def test_peaks_are_those_of_the_plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for rank in rehearse(capsys, *arguments)["ranks"]:
        assert rank["planned_tensors_bytes"] == pytest.approx(rank["rehearsed"]["peak_bytes"], rel=0.02)


@pytest.mark.slow
def test_a_rank_of_a_large_model_needs_little_time_and_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """405 billion parameters on 16,384 devices: less than 60 s and 4 GB."""
    layout = ["layout.tp=8", "layout.pp=16", "layout.dp_shard=128"]
    done = rehearse(capsys, "recipe=llama3_405b", *layout, "--ranks=0")
    (rank,) = done["ranks"]
    assert done["world_size"] == 16384
    # The plan lacks 32 MiB, one tensor of a sequence's part (1024 tokens): in a pipeline, the backward keeps it while
    # weights' gradients are computed during an exchange.
    lacking_bytes = rank["rehearsed"]["peak_bytes"] - rank["planned_tensors_bytes"]
    assert lacking_bytes == pytest.approx(2**25, rel=0.01)
    assert rank["rehearsed"]["seconds"] < 60
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 4e9
