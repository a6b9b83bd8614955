from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.recipe.results.tools import AllReduceRate, LinksResult, PairRate, PingRate, SpeedResult
from trainspec_cli.wings.doctor.examine import check_measured_links, compare, diagnose, refuse_unfit


def report(host: str, matmul: float = 1e12, memory: float = 1e11, *checks: Check) -> NodeReport:
    return NodeReport(host, 0.0, checks, SpeedResult("2.13", None, None, 1, matmul, memory, 0))


def test_the_slowest_node_is_reported_in_each_figure() -> None:
    worst, other = compare([report("a"), report("b", matmul=0.9e12), report("c", memory=0.5e11)])
    assert (worst.host, worst.figure, worst.ratio) == ("c", "memory_bytes_per_s", 0.5)
    assert worst.text.startswith("c is slowest") and "memory: 50%" in worst.text
    assert (other.host, other.ratio) == ("b", 0.9)


def test_a_node_much_slower_than_the_others_is_refused_by_name() -> None:
    with pytest.raises(MachineError) as caught:
        refuse_unfit([report("a"), report("b"), report("c", matmul=0.4e12)])
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (4, "slow_host")
    assert problem.message.startswith("c is slowest") and "matmuls: 40%" in problem.message
    assert "cluster.slurm.exclude=c" in problem.hint


def test_all_unfit_nodes_are_reported_together() -> None:
    broken = Check("disk", "fail", "0 bytes free", "free some")
    with pytest.raises(MachineError) as caught:
        refuse_unfit([report("a", 1e12, 1e11, broken), report("b", matmul=0.1e12), report("c")])
    assert [problem.code for problem in caught.value.problems] == ["unfit_host", "slow_host"]
    assert [problem.environment for problem in caught.value.problems] == [True, True]
    assert caught.value.problems[0].message.startswith("a ")
    assert caught.value.problems[0].message.endswith("disk: 0 bytes free")
    assert caught.value.problems[0].hint.startswith("free some; ")


def test_the_diagnosis_has_the_worst_status_and_the_slowest_node() -> None:
    small = Check("/dev/shm", "warn", "64 MiB free", "give the container more")
    diagnosis = diagnose([report("a"), report("b", 1e12, 1e11, small), report("c", matmul=0.95e12)], None)
    assert (diagnosis.status, diagnosis.slowest) == ("warn", "c")


def test_a_node_whose_measurement_does_not_end_is_the_slowest() -> None:
    late = NodeReport("b", 0.0, (Check("speed", "fail", "did not end within 120 s", "run it there"),))
    diagnosis = diagnose([report("a"), late, report("c", matmul=0.95e12)], None)
    assert (diagnosis.status, diagnosis.slowest) == ("fail", "b")
    full = NodeReport("b", 0.0, (Check("disk", "fail", "0 bytes free", "free some"),))
    assert diagnose([report("a"), full, report("c", matmul=0.95e12)], None).slowest == "c"


def test_a_report_does_not_change_in_json() -> None:
    for sent in (report("a", 1e12, 1e11, Check("disk", "warn", "slow")), NodeReport("b", 1.5, (), None, heard_at=2.5)):
        assert from_plain(NodeReport, json.loads(json_text(to_plain(sent)))) == sent


def test_the_keys_of_the_json_do_not_change() -> None:
    here, bare = report("a"), NodeReport("b", 0.0, (Check("speed", "fail", "torch failed"),))
    plain = diagnose([here, bare], LinksResult((AllReduceRate(4096, 0.001, 4e6),), ())).as_json()
    assert list(plain) == ["status", "hosts", "between", "slowest", "links"]
    assert [set(host) for host in plain["hosts"]] == [{"host", "time", "checks", "speed"}] * 2
    assert set(plain["hosts"][0]["speed"]) > {"matmul_flops", "memory_bytes_per_s", "torch", "slowest_device"}
    assert plain["hosts"][1]["speed"] == {}, "a speed that was not measured has no figures"
    assert plain["links"]["all_reduce"] == [{"bytes": 4096, "seconds": 0.001, "bus_bytes_per_s": 4e6}]
    assert replace(here, heard_at=3.0).as_json()["heard_at"] == 3.0


def measured(hosts: str, slow: dict[str, float]) -> LinksResult:
    """Pairs of one-letter nodes at 1 GB/s, except those in `slow`."""
    sizes = (PingRate(4096, 8e-5, 4096 / 8e-5),)
    return LinksResult((), tuple(PairRate((a, b), slow.get(a + b, 1e9), sizes) for a, b in combinations(hosts, 2)))


def warnings(hosts: str, slow: dict[str, float]) -> list[str]:
    return [check.found for check in check_measured_links(measured(hosts, slow)) if check.status == "warn"]


def test_equal_links_are_shown_with_rate_and_latency() -> None:
    checks = check_measured_links(measured("abc", {}))
    assert [check.status for check in checks] == ["ok"] * 3
    assert all(fact in checks[0].found for fact in ("a - b: ", "1 GB/s", "4.00 KiB in 0.08 ms"))


def test_a_bad_cable_is_found_although_most_pairs_are_slow() -> None:
    found = warnings("abc", {"ac": 0.1e9, "bc": 0.12e9})
    assert [words.partition(":")[0] for words in found[:2]] == ["a - c", "b - c"]
    (slow_node,) = found[2:]
    assert " c " in slow_node and "120 MB/s, 12%" in slow_node


def test_a_slow_link_between_two_nodes_is_not_the_fault_of_either() -> None:
    (pair,) = warnings("abcd", {"bc": 0.3e9})
    assert pair.startswith("b - c: 300 MB/s, 4.00 KiB in 0.08 ms: 30%")


def test_a_single_pair_is_not_compared() -> None:
    assert warnings("ab", {"ab": 1e3}) == []


def test_all_reduces_are_shown() -> None:
    (check,) = check_measured_links(LinksResult((AllReduceRate(4096, 0.001, 4e6),), ()))
    assert "4.00 KiB in 1.00 ms" in check.found and "4 MB/s" in check.found


@pytest.mark.parametrize(("ratio", "status"), [(0.85, "ok"), (0.84, "warn"), (0.6, "warn"), (0.59, "fail")])
def test_how_much_slower_a_node_may_be(ratio: float, status: str) -> None:
    diagnosis = diagnose([report("a"), report("b", matmul=ratio * 1e12)], None)
    assert (diagnosis.status, diagnosis.between[0].name, diagnosis.between[0].status) == (status, "slowest", status)
    if status == "fail":
        with pytest.raises(MachineError, match="b is slowest"):
            refuse_unfit([report("a"), report("b", matmul=ratio * 1e12)])
    else:
        refuse_unfit([report("a"), report("b", matmul=ratio * 1e12)])


@pytest.mark.parametrize(("seconds", "part"), [(0.99, None), (1.0, "1.0 s ahead of"), (-1.0, "1.0 s behind")])
def test_clocks_may_be_less_than_a_second_apart(seconds: float, part: str | None) -> None:
    off = replace(report("a"), time=100.0 + seconds, heard_at=100.0)
    found = [check.found for check in diagnose([off, report("b")], None).between if check.name == "clock"]
    assert len(found) == (part is not None) and all(f"a is {part}" in text for text in found)


def test_the_speeds_of_a_node_are_shown_with_its_checks() -> None:
    (host,) = diagnose([report("a", 2e12, 3e11, Check("disk", "ok", "fast"))], None).hosts
    assert [(check.name, check.found) for check in host.checks] == [
        ("disk", "fast"),
        ("matmuls", "2 TFLOP/s"),
        ("memory", "300 GB/s"),
    ]
    alone = diagnose([NodeReport("a", 0.0, ())], None)
    assert (alone.hosts[0].checks, alone.between) == ((), ()), "a single node is not compared and has no links"


def test_a_node_is_compared_with_the_median_of_the_others() -> None:
    worst, _ = compare([report("a", 1e12), report("b", 3e12), report("c", 10e12), report("d", 4e12)])
    assert (worst.host, worst.ratio) == ("a", 0.25)
