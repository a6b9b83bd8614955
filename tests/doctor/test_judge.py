from __future__ import annotations

from typing import Any

import pytest

from trainspec_cli.doctor.diagnosis import diagnose
from trainspec_cli.doctor.judge import compare, refuse_unfit
from trainspec_cli.errors import MachineError


def report(host: str, matmul: float = 1e12, memory: float = 1e11, *checks: dict[str, str]) -> dict[str, Any]:
    return {
        "host": host,
        "time": 0.0,
        "checks": list(checks),
        "speed": {"matmul_flops": matmul, "memory_bytes_per_s": memory},
    }


def test_the_slowest_host_is_named_with_what_it_is_slow_at() -> None:
    worst, other = compare([report("a"), report("b", matmul=0.9e12), report("c", memory=0.5e11)])
    assert (worst.host, worst.figure, worst.ratio) == ("c", "memory_bytes_per_s", 0.5)
    assert worst.words == "c is slowest at memory: 50% of what the others do"
    assert (other.host, other.ratio) == ("b", 0.9)


def test_one_host_has_nobody_to_be_compared_with() -> None:
    assert compare([report("a")]) == []


def test_hosts_alike_are_let_in() -> None:
    refuse_unfit([report("a"), report("b", matmul=0.8e12)])


def test_a_host_far_below_the_others_is_refused_by_name() -> None:
    with pytest.raises(MachineError) as caught:
        refuse_unfit([report("a"), report("b"), report("c", matmul=0.4e12)])
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (4, "slow_host")
    assert problem.message == (
        "c is slowest at matrix products: 40% of what the others do, and every step would wait for it"
    )
    assert "cluster.slurm.exclude=c" in problem.hint


def test_every_unfit_host_is_told_at_once() -> None:
    broken = {"name": "disk", "status": "fail", "found": "0 bytes free", "advice": "free some"}
    with pytest.raises(MachineError) as caught:
        refuse_unfit([report("a", 1e12, 1e11, broken), report("b", matmul=0.1e12), report("c")])
    assert [problem.code for problem in caught.value.problems] == ["unfit_host", "slow_host"]
    assert caught.value.problems[0].message == "a is not fit: disk: 0 bytes free"


def test_the_diagnosis_has_the_worst_status_and_the_slowest_host() -> None:
    little = {"name": "/dev/shm", "status": "warn", "found": "64 MiB free", "advice": "give the container more"}
    diagnosis = diagnose([report("a"), report("b", 1e12, 1e11, little), report("c", matmul=0.95e12)], None)
    assert (diagnosis["status"], diagnosis["slowest"]) == ("warn", "c")


def test_a_clock_that_is_off_is_told() -> None:
    late = report("a") | {"time": 95.0, "heard_at": 100.0}
    on_time = report("b") | {"time": 99.9, "heard_at": 100.0}
    (clock,) = [check for check in diagnose([late, on_time], None)["between"] if check["name"] == "clock"]
    assert (clock["status"], clock["found"]) == ("warn", "a is 5.0 s behind the first host")


def test_a_slow_host_fails_the_diagnosis() -> None:
    assert diagnose([report("a"), report("b", memory=0.2e11)], None)["status"] == "fail"
