"""The checks in order of worth: what is asked first is what a short time on a machine is for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from . import engine_checks, run_checks
from .schedule import Check
from .workloads import MEMORY, WORKLOADS, Workload

ON_THE_DEVICE = ("tests/engine/kernels/test_inputs.py", "tests/engine/kernels/test_backends.py")
"""Tests that take a GPU where there is one; the others show that the engine works with this torch and Python."""
OF_THE_ENGINE = tuple(f"tests/engine/{folder}" for folder in ("models", "data", "observe", "optim", "checkpoint"))
TINY_TESTS = ("tests/engine/test_accelerators.py",)


SLOW = 5
"""A run with tiny sizes is tried on any machine, beside anything: its limits are so many times longer."""


def checks(tiny: bool) -> list[Check]:
    return [replace(check, limit_s=SLOW * check.limit_s) if tiny else check for check in _in_order(tiny)]


def _in_order(tiny: bool) -> list[Check]:
    first, *others = WORKLOADS
    return [
        Check("machine", "what the machine is", run_checks.machine, 90),
        Check("quickstart", "the README's first run", run_checks.quickstart, 150, 30),
        _profile(first),
        _speed(first, WORKLOADS[first]),
        *(_memory(name, workload) for name, workload in list(MEMORY.items())[:2]),
        Check("clauses", "the training spec on the chip, one process", engine_checks.clauses, 240, 40),
        _tests("tests on the device", TINY_TESTS if tiny else ON_THE_DEVICE, 180),
        *(_speed(name, WORKLOADS[name]) for name in others[:4]),
        Check("data path", "waits for data, copies, allocations", run_checks.data_path, 180, 60),
        Check("kernels", "the table of kernels=auto", run_checks.kernels, 240, 60),
        Check("stall", "what a checkpoint holds up", run_checks.stall, 150, 45),
        Check("out of memory", "memory runs out, and the run goes on", run_checks.out_of_memory, 150, 40),
        Check("elastic", "two replica groups on one device", run_checks.elastic, 150, 60),
        *(_memory(name, workload) for name, workload in list(MEMORY.items())[2:]),
        *(_profile(name) for name in others if name in ("dense_1b", "moe", "mamba2")),
        *(_speed(name, WORKLOADS[name]) for name in others[4:]),
        *([] if tiny else [_tests("tests of the engine", OF_THE_ENGINE, 300)]),
    ]


def _speed(name: str, workload: Workload) -> Check:
    return Check(f"speed {name}", workload.what, partial(run_checks.speed, name), 300, 60)


def _memory(name: str, workload: Workload) -> Check:
    return Check(f"memory {name}", workload.what, partial(engine_checks.memory_of, name), 200, 45)


def _profile(name: str) -> Check:
    return Check(f"profile {name}", WORKLOADS[name].what, partial(engine_checks.profile_of, name), 150, 45)


def _tests(name: str, files: tuple[str, ...], limit_s: float) -> Check:
    return Check(name, ", ".join(files), partial(run_checks.tests, files), limit_s, 30)
