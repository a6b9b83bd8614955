"""The emulated device: a CPU's values to the bit, tensors that do not mix, memory that ends, order by waits alone."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.races import Ranks, find, processes
from lab.drawing import slow_after
from lab.ranks import outputs
from lab.waiting import PATIENCE_S
from wings.emulated.on_device import LEFT_OUT, SCHEDULES

from trainspec_cli.core.environment_names import STORE_FILE
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.accelerators import enter
from trainspec_cli.planner.hardware.rates import Efficiency, accelerators
from trainspec_cli.wings.emulated import DeviceDisturbance, Settings, read_settings
from trainspec_cli.wings.emulated.engine.costs import ChipCosts, costs_of, traffic_bytes
from trainspec_cli.wings.emulated.engine.streams import Stream

TESTS = Path(__file__).parents[2]
MIB = 2**20


def run(name: str, *arguments: str, **environment: str) -> Any:
    """Run a program of `on_device` in a process of its own."""
    (printed,) = run_ranks(1, name, *arguments, **environment)
    return printed


def run_ranks(number: int, name: str, *arguments: str, **environment: str) -> list[Any]:
    """Run a program of `on_device` in a process for each rank; return what each has printed."""
    with tempfile.TemporaryDirectory() as folder:
        job = {STORE_FILE: f"{folder}/store", "LOCAL_WORLD_SIZE": str(number), **environment}
        printed = outputs(TESTS / "wings/emulated/on_device.py", [(name, *arguments)] * number, job)
    return [json.loads(text) for text in printed]


def test_training_gives_the_bits_of_a_cpu_in_any_order_of_the_streams() -> None:
    assert run("bits") == {"None": True, "1": True, "2": True}


@pytest.mark.slow
def test_a_rank_with_several_stages_trains_with_the_same_bits_in_any_order_of_the_streams() -> None:
    for first, other in run_ranks(4, "several_stages"):
        assert len(first) > 10
        assert other == first


def test_an_unknown_device_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPEC_DEVICE", "emulatd")
    with pytest.raises(RecipeError) as error:
        enter("cpu")
    assert (error.value.problems[0].code, error.value.problems[0].path) == ("unknown_value", "TRAINSPEC_DEVICE")
    assert error.value.problems[0].hint.endswith(": emulated")


def test_tensors_of_host_and_device_do_not_mix_and_numbers_may() -> None:
    found = run("mixing")
    assert "emulated:0 and cpu" in found["refused"]
    assert found["number"] == [3.0, 3.0, 3.0]
    # torch.compile has no backend for such a device.
    assert found["uncompiled"] == {key: ["unsupported", key] for key in ("compile", "kernels.swiglu")}


@pytest.mark.parametrize("sizes", slow_after(1, ["0", "1"]))
def test_shards_are_copied_into_the_buffer_of_an_all_gather_whose_memory_is_free_once_a_stream_waits(
    sizes: str,
) -> None:
    """On a GPU, other tensors get the memory as early, and a missing wait shows only then."""
    found = run("gathering", TRAINSPEC_EMULATED=f"sizes={sizes}")
    assert found["values"] == ([] if sizes == "1" else [0.0, 0.0, 0.0, 3.0, 3.0, 4.0, 0.0, 0.0, 0.0])
    assert (found["own"], found["new"], found["held"]) == ([3, 3], 0, 0)


def test_what_makes_the_host_wait_is_counted() -> None:
    found = run("counting")
    assert set(found["silent"]) == {"operations"}
    assert (found["after"]["synchronisations"], found["after"]["hidden copies"]) == (1, 1)


@pytest.mark.parametrize("family", slow_after(1, ["dense", "moe", "windowed", "mamba", "hybrid"]))
def test_a_step_of_the_engine_never_waits_for_the_host(family: str) -> None:
    """Its outcome is copied to page-locked memory, and read when the next step is under way."""
    assert run("steady", family) == {"to read the outcome": 3}


def test_memory_ends_where_the_allocator_says_and_can_be_used_again() -> None:
    found = run("memory", TRAINSPEC_EMULATED="memory_gib=0.5")
    # Memory is mapped in pages of 20 MiB, of which 512 MiB hold 25.
    assert (found["number"], found["full"]) == (7, 7 * 64 * MIB)
    assert found["total"] == 512 * MIB
    assert "0.06 GiB" in found["failed"]
    assert found["again"] == 128 * MIB
    assert found["free"] == found["total"] - found["reserved"]
    assert (found["stats"]["num_ooms"], found["stats"]["num_alloc_retries"]) == (1, 1)


def test_random_numbers_do_not_depend_on_the_order_of_the_streams() -> None:
    first, second, third = run("random_numbers")
    assert first == second == third


@pytest.mark.parametrize(
    ("program", "without"),
    [
        *slow_after(
            0,
            [
                ("two_streams", "event"),
                ("kept_memory", "record_stream"),
                ("read_early", "synchronize"),
                ("reused_host_memory", "synchronize"),
                *(("loading", line) for line in LEFT_OUT),
            ],
        ),
    ],
)
def test_a_missing_wait_is_found(program: str, without: str) -> None:
    assert run("wrong_orders", program, "")["wrong"] == 0
    assert 0 < run("wrong_orders", program, without)["wrong"] <= SCHEDULES


QUICK_PLANTS = (
    "a batch in use is overwritten",
    "a checkpoint is written before its copy",
    "a step's noise is read early",
    "a gradient freed early",
    "the step's agreement",
    "sum over tp",
    "gathered parameters are read early",
    "gathered buffers are used again early",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_PLANTS)
def test_a_wait_that_the_engine_lacks_is_found(ranks: Ranks, name: str, tmp_path: Path) -> None:
    assert find(ranks, name, tmp_path) is not None


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero3", "1f1b", "ep", "zero3_offload", "moved", "tp_cp", "zero3_fp8", "tp_fp8"])
def test_training_gives_the_bits_of_a_cpu_run_in_random_orders(ranks: Ranks, case: str) -> None:
    if case.endswith("fp8"):
        pytest.importorskip("torchao")
    job = {"cases": [case], "seeds": [None, 1, 2, 3], "steps": 3}
    lines = ranks.run(processes(case), job, PATIENCE_S)
    assert [(line["seed"], line["first"]) for line in lines] == [(None, []), (1, []), (2, []), (3, [])]


WAITS = {
    # The numbers of rows for each rank: in two layers and two micro-batches.
    "ep": {"device to host": 4, "synchronisations": 4},
}
"""What makes the host wait in a step, by layout; nothing in all others that keep their state on the device."""


@pytest.mark.slow
def test_no_step_waits_for_the_host_in_any_layout(ranks: Ranks) -> None:
    from wings.emulated.schedules import CASES  # it takes a second to import

    cases = [name for name, short in CASES.items() if short.case.layout.world_size == 2 and short.is_steady]
    lines = ranks.run(2, {"cases": cases, "seeds": [], "steps": 2, "steady": 1}, PATIENCE_S)
    assert {line["case"]: line.get("counts", line.get("first")) for line in lines} == {
        case: WAITS.get(case, {}) for case in cases
    }


@pytest.mark.slow
def test_a_value_that_a_step_reads_is_counted(ranks: Ranks) -> None:
    line = "    norm = agreed[1].sqrt().float()\n"
    plant = [("trainspec_cli.engine.run.step", line, line + "    norm.item()\n")]
    job = {"cases": ["one"], "seeds": [], "steps": 2, "steady": 1, "plant": plant}
    (counted,) = ranks.run(1, job, PATIENCE_S)
    assert counted["counts"] == {"synchronisations": 1}


# Virtual time


VIRTUAL = "time=h100_sxm"
H100 = next(chip for chip in accelerators() if chip.name == "H100-SXM-80GB")
EFF = Efficiency()
MEMORY_S = 1 / (EFF.memory * H100.memory_tb_per_s * 1e12)
"""Seconds for a byte of memory traffic."""
MULTIPLY_S = 1 / (EFF.matmul * H100.matmul_bf16_tflops * 1e12)
"""Seconds for a bf16 FLOP."""


@pytest.fixture(scope="module")
def virtual() -> Any:
    return run("virtual_time", TRAINSPEC_EMULATED=VIRTUAL)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


def test_an_operation_lasts_what_its_flops_and_bytes_take_on_the_chip(virtual: Any) -> None:
    found = virtual["durations"]
    # Two more products in the same launch: the difference has neither a kernel's ramp nor a last wave.
    m, k, n = 256, 512, 128
    traffic_bytes = 2 * (m * k + k * n + m * n)
    product_s = 2 * m * k * n * MULTIPLY_S + EFF.gemm_memory * traffic_bytes * MEMORY_S
    assert found["products"]["3"] - found["products"]["1"] == close(2 * product_s)
    # Reads and writes of twice as many bytes; the part that the cache holds hardly changes.
    added_bytes = 2 * 64 * MIB
    issue_s = added_bytes * EFF.issue / (H100.load_store_tb_per_s * 1e12)
    added_s = found["sums"]["128"] - found["sums"]["64"]
    assert added_s - issue_s == pytest.approx(added_bytes * MEMORY_S, rel=0.02)
    assert (found["view"], found["empty"], found["to itself"]) == (0.0, 0.0, 0.0)
    assert found["copy"] == close(4 * 2**22 / 50e9)
    full_s, causal_s = found["attention"]
    flops = 4 * 2 * 4 * 256 * 256 * 64
    softmax_s = EFF.exponentials * flops / (4 * 64 * H100.tera_exponentials_per_s * 1e12)
    # Torch's kernel is FlashAttention 2, one generation older than an H100.
    attention_s = flops * MULTIPLY_S / (EFF.attention_forward * EFF.attention_older)
    assert full_s == close(attention_s + softmax_s + EFF.kernel_s)
    assert full_s - EFF.kernel_s == close(2 * (causal_s - EFF.kernel_s))


ATEN = torch.ops.aten
TABLE = torch.empty(1000, 8, device="meta")
ROWS = torch.empty(10, dtype=torch.int64, device="meta")
VALUES = torch.empty(10, 8, device="meta")
FOUND = {
    "add": (ATEN.add.Tensor, (VALUES, VALUES.new_empty(8).expand(10, 8)), {}, 320 + 32 + 320),
    "add_": (ATEN.add_.Tensor, (VALUES, VALUES), {}, 3 * 320),
    "zero_": (ATEN.zero_.default, (VALUES,), {}, 320),
    "foreach_copy_": (ATEN._foreach_copy_.default, ([VALUES, TABLE], [VALUES, TABLE]), {}, 2 * (320 + 32_000)),
    "zeros_like": (ATEN.zeros_like.default, (VALUES,), {}, 320),
    "embedding": (ATEN.embedding.default, (TABLE, ROWS), {}, 2 * 320 + 80),
    "index_add_": (ATEN.index_add_.default, (TABLE, 0, ROWS, VALUES), {}, 3 * (80 + 320)),
    "cat.out": (ATEN.cat.out, ([VALUES, VALUES],), {"out": torch.empty(20, 8, device="meta")}, 2 * 640),
}
"""Operation -> its arguments, and the bytes that it reads and writes."""


@pytest.mark.parametrize("name", FOUND)
def test_memory_traffic_is_what_an_operation_reads_and_writes(name: str) -> None:
    op, args, kwargs, nbytes = FOUND[name]
    assert traffic_bytes(op, args, kwargs, op(*args, **kwargs)) == nbytes


def test_operations_of_a_slow_rank_last_longer_and_its_copies_do_not(virtual: Any) -> None:
    plain, slow = virtual["durations"], virtual["slow"]
    assert slow["copy"] == close(plain["copy"])
    for name in ("products", "sums"):
        assert slow[name] == {key: close(2 * value) for key, value in plain[name].items()}


def test_the_chips_peak_is_known_without_emulated_time(virtual: Any) -> None:
    """Measured, it would shift all later virtual time, in those runs alone whose plan has no probe's peak."""
    assert virtual["peak"] == [H100.bf16_tflops * 1e12, 0.0]


def test_attention_over_documents_lasts_as_long_as_their_pairs_of_tokens(virtual: Any) -> None:
    found = virtual["documents"]
    half_s = found["all"] - found["half"]  # the difference is without the mask's own operations
    assert found["half"] - found["quarter"] == pytest.approx(half_s / 2, rel=1e-6)
    assert found["all"] - found["usual"] == pytest.approx(half_s * 999 / 500, rel=1e-6)
    assert found["usual quarter"] == close(found["usual"])  # torch's kernel computes masked pairs, too


def test_an_allocator_that_is_short_of_memory_waits_for_its_stream_and_keeps_the_host(virtual: Any) -> None:
    every, seldom = virtual["retries"]["0"], virtual["retries"]["30"]
    # The first one waits for a second of work on the device. A later one finds the stream empty.
    assert every == [pytest.approx(1.02, abs=1e-4), *[pytest.approx(0.02, abs=1e-4)] * 3, 4]
    assert seldom == [pytest.approx(every[0]), 0.0, 0.0, 0.0, 1]


def test_streams_overlap_and_an_event_orders_them(virtual: Any) -> None:
    found = virtual["overlap"]
    assert found["short"] < found["long"] / 2
    assert found["before the wait"] == close(found["short"])
    assert found["both"] == close(found["long"])


def test_the_host_spends_time_on_launches_and_waits_for_values_that_it_reads(virtual: Any) -> None:
    nothing, queued, viewed, read = virtual["host"]["launching"]
    assert nothing == 0.0
    assert queued == viewed == close(EFF.launch_s)
    # The addition starts when it is queued, lasts longer than the next launch, and is followed by the value's copy.
    read_alone = virtual["host"]["not launching"][3]
    assert read == close(EFF.launch_s + read_alone)
    added_bytes = 2 * 4 * 2**20
    cached = EFF.cache_reuse * H100.cache_mb * 1e6 / (H100.cache_mb * 1e6 + added_bytes)
    added_s = added_bytes * ((1 - cached) * MEMORY_S + EFF.issue / (H100.load_store_tb_per_s * 1e12))
    assert read_alone == pytest.approx(added_s + 2 * EFF.kernel_s, rel=1e-4)


def test_a_rank_is_slow_for_a_while() -> None:
    costs = costs_of(read_settings(f"{VIRTUAL},slowness=3,slow_from_s=0.25,slow_until_s=0.5"), {})
    assert costs is not None
    factors = [costs.factor(Stream(), at_s) for at_s in (0.0, 0.25, 0.4375, 0.5)]
    assert factors == [1.0, 3.0, 3.0, 1.0]


def test_a_disturbance_returns() -> None:
    costs = costs_of(read_settings(f"{VIRTUAL};slowness=3,slow_from_s=1,slow_until_s=2,slow_every_s=8"), {})
    assert costs is not None
    factors = [costs.factor(Stream(), at_s) for at_s in (0.5, 1.5, 2.5, 8.5, 9.5, 17.5, 1.0, 2.0, 9.0, 10.0)]
    assert factors == [1.0, 3.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 3.0, 1.0]


def costs_on(settings: str, ranks: int = 8) -> list[ChipCosts]:
    """Return the costs of ranks on two nodes."""
    job = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // 2)}
    found = [costs_of(read_settings(f"{VIRTUAL},{settings}"), {"RANK": str(rank), **job}) for rank in range(ranks)]
    return [costs for costs in found if costs is not None]


def test_a_disturbance_concerns_its_place_and_several_add_up() -> None:
    several = costs_on("slowness=2,slow_rank=3;slowness=1.5,slow_node=1;read_ms=4;host_slowness=3,slow_rank=3")
    assert [costs.factor(Stream(), 0.0) for costs in several] == [1, 1, 1, 2, 1.5, 1.5, 1.5, 1.5]
    assert [costs.host_s(0.0, work="read") for costs in several[2:4]] == [close(0.004), close(0.012)]
    assert [costs.host_s(0.0, 1.0, "write") for costs in several[2:4]] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("place", "slow"),
    [
        ("", {(0, 4), (1, 5), (0, 1, 4, 5)}),
        ("slow_node=1", {(0, 4), (1, 5), (0, 1, 4, 5)}),
        ("slow_node=2", set()),
        ("slow_rank=1", {(0, 1), (1, 5), (0, 1, 4, 5)}),
    ],
)
def test_a_slow_link_lengthens_the_exchanges_that_use_it(place: str, slow: set[tuple[int, ...]]) -> None:
    groups = [(0, 1), (4, 5), (0, 4), (1, 5), (0, 1, 4, 5)]
    costs = costs_on(f"link_slowness=3,{place}".strip(","))[0]
    longer = {}
    for ranks in groups:
        latency_s, usual_s = (costs.exchange_s("allreduce", ranks, nbytes) for nbytes in (1, 2**24))
        longer[ranks] = (costs.disturbed_exchange_s("allreduce", ranks, 2**24, 0.0, "") - latency_s) / (
            usual_s - latency_s
        )
    assert longer == {ranks: close(3.0 if ranks in slow else 1.0) for ranks in groups}


def test_a_delayed_link_lengthens_an_exchange_by_its_messages_in_a_row() -> None:
    costs = costs_on("link_delay_us=100")[0]
    for kind, messages in (("allreduce", 6), ("allgather", 3), ("send", 1)):
        usual_s = costs.exchange_s(kind, (0, 1, 4, 5), 8)
        assert costs.disturbed_exchange_s(kind, (0, 1, 4, 5), 8, 0.0, "") - usual_s == close(messages * 1e-4)


def test_all_ranks_draw_the_same_noise_of_an_exchange() -> None:
    found = [
        costs.disturbed_exchange_s("allreduce", (0, 4), 2**20, 0.0, "7 of group 1")
        for costs in costs_on("link_jitter=0.1")
    ]
    others = costs_on("link_jitter=0.1")[0].disturbed_exchange_s("allreduce", (0, 4), 2**20, 0.0, "8 of group 1")
    assert len(set(found)) == 1
    assert others != found[0]


def test_host_work_takes_virtual_time_and_its_results_come_after_it(virtual: Any) -> None:
    worked, slept, handed = virtual["host work"]
    assert (worked, slept) == (close(0.004), close(0.25))
    assert handed == close(1.5)


def test_a_chip_that_the_catalogue_does_not_have_is_refused() -> None:
    assert costs_of(Settings(), {}) is None
    with pytest.raises(RecipeError) as error:
        costs_of(Settings(time="h100"), {})
    assert error.value.problems[0].code == "unknown_value"
    assert "h100_sxm" in error.value.problems[0].hint


# Exchanges


@pytest.fixture(scope="module")
def late() -> list[Any]:
    return run_ranks(4, "late_rank", TRAINSPEC_EMULATED=f"{VIRTUAL},launch_us=0,jitter=0.1")


def test_an_exchange_starts_when_the_last_rank_arrives(late: list[Any]) -> None:
    *early, last = late
    assert [found["value"] for found in late] == [24.0] * 4
    # The ring model: three hops inside the node, and each rank sends 3/4 of the bytes over its link.
    latency_s = EFF.collective_latency_s + 3 * EFF.hop_latency_s
    link = EFF.link_nvswitch * H100.link_gb_per_s * 1e9
    own_bytes = 4 * 2**18
    sum_s = 2 * (latency_s + own_bytes * 3 / 4 / link)
    gather_s = latency_s + 4 * own_bytes * 3 / 4 / link
    expected = {"all_reduce": sum_s, "all_gather": gather_s, "functional": gather_s, "reduce_scatter": gather_s}
    expected["all_to_all"] = latency_s + 4 * own_bytes * 3 / 4 / (link * EFF.all_to_all)
    for name, transfer_s in expected.items():
        computing_s, waiting_s = last[name]
        assert computing_s > EFF.kernel_s
        assert waiting_s == close(transfer_s)
        assert [found[name] for found in early] == [[0.0, close(computing_s + transfer_s)]] * 3
    computing_s, waiting_s = last["message"]
    assert waiting_s == close(EFF.collective_latency_s + own_bytes / link)
    assert [found["message"] for found in early] == [[0.0, close(computing_s + waiting_s)], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("dense", {"dp_replicate": 2}),
        ("dense", {"dp_shard": 2, "zero_stage": 3}),
        ("dense", {"tp": 2}),
        ("dense", {"pp": 2}),
        ("dense", {"pp": 2, "pipeline_schedule": "zbv"}),
        ("moe", {"dp_shard": 2, "ep": 2}),
    ],
)
def test_the_exposed_communication_of_a_step_is_the_true_one(family: str, layout: dict[str, Any]) -> None:
    of_ranks = run_ranks(
        2, "exposed", json.dumps([family, layout]), TRAINSPEC_EMULATED=f"{VIRTUAL},launch_us=0,jitter=0.05"
    )
    for steps in of_ranks:
        for step in steps[1:]:  # in the first one, groups connect
            assert step["true"] > 0
            assert step["reported"] == pytest.approx(step["true"], abs=1e-3)
            assert step["part"] == pytest.approx(step["true"], abs=1e-3)


@pytest.mark.slow
def test_virtual_time_is_the_same_in_every_run(late: list[Any]) -> None:
    again = run_ranks(4, "late_rank", TRAINSPEC_EMULATED=f"{VIRTUAL},launch_us=0,jitter=0.1")
    assert again == late
    assert len({found["all_reduce"][0] for found in late}) == 2


@pytest.mark.slow
def test_ranks_on_other_nodes_use_the_network(late: list[Any]) -> None:
    settings = f"{VIRTUAL},launch_us=0,jitter=0.1"
    apart = run_ranks(4, "late_rank", TRAINSPEC_EMULATED=settings, LOCAL_WORLD_SIZE="1")
    network = EFF.nic * 400e9 / 8
    assert apart[3]["message"][0] == late[3]["message"][0]
    assert apart[3]["message"][1] == close(EFF.collective_latency_s + 4 * 2**18 / network)


@pytest.mark.slow
def test_ranks_that_run_different_exchanges_all_fail_and_name_both() -> None:
    found = run_ranks(3, "mismatched")
    assert found[0] == found[1] == found[2]
    line = r"on_device\.py:\d+"
    assert re.search(
        rf"rank 0, 2: allreduce of float32 \(8,\) at \S+{line}; rank 1: allgather\S* of .* at \S+{line}$", found[0]
    )


@pytest.mark.slow
def test_a_message_of_another_size_than_its_receiver_expects_is_refused() -> None:
    found = run_ranks(2, "other_size")
    assert found[0] == found[1]
    assert re.search(r"rank 0: send of float32 \(4,\) at .*; rank 1: recv of float32 \(8,\) at ", found[0])


@pytest.mark.slow
def test_a_rank_that_leaves_finishes_its_exchanges_first() -> None:
    assert run_ranks(2, "leaving") == [32.0, 0]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_with_those_that_wait() -> None:
    found = run_ranks(3, "missing", TRAINSPEC_EMULATED="timeout_s=3")
    assert found[2] == ""
    for text in found[:2]:
        assert re.search(r"rank 2 has not arrived; rank 0, 1: allreduce of float32 \(8,\)", text)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", Settings()),
        ("order=7", Settings(order=7)),
        ("memory_gib=0.5,order=1", Settings(1, 0.5)),
        (
            "time=h100_sxm,slowness=2,slow_rank=3;link_slowness=4,slow_from_s=5",
            Settings(
                time="h100_sxm",
                disturbances=(
                    DeviceDisturbance(slowness=2.0, slow_rank=3),
                    DeviceDisturbance(link_slowness=4.0, slow_from_s=5.0),
                ),
            ),
        ),
        ("sizes=1", Settings(sizes=1)),
    ],
)
def test_settings(text: str, settings: Settings) -> None:
    assert read_settings(text) == settings


@pytest.mark.parametrize(
    "text",
    [
        *("ordr=7", "order=x", "order", "memory_gib=", "time=", "order=7,time=h100_sxm", "sizes=2", "sizes=1,order=3"),
        *(
            "slowness=2",
            "slow_from_s=1",
            "time=h100_sxm,slowness=nan",
            "time=h100_sxm,slowness=-1",
            "slow_rank=1.5,time=h100_sxm",
            "jitter=0.1;time=h100_sxm",
            "time=h100_sxm,slowness=2,slow_from_s=3,slow_until_s=2",
            "time=h100_sxm;slowness=2,slow_until_s=3,slow_every_s=2",
        ),
    ],
)
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_settings(text)
    assert error.value.problems[0].code == "usage"
