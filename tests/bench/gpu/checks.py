"""The checks in order of worth: what is asked first is what a short time on a machine is for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from . import engine_checks, run_checks
from .schedule import Check
from .workloads import MEMORY, WORKLOADS

ON_THE_DEVICE = ("tests/engine/kernels/test_inputs.py", "tests/engine/kernels/test_backends.py")
"""Tests that take a GPU where there is one; the others show that the engine works with this torch and Python."""
OF_THE_ENGINE = tuple(f"tests/engine/{folder}" for folder in ("models", "data", "observe", "optim", "checkpoint"))
TINY_TESTS = ("tests/engine/test_accelerators.py",)


SLOW = 5
"""A run with tiny sizes is tried on any machine, beside anything: its limits are so many times longer."""


def checks(tiny: bool) -> list[Check]:
    return [replace(check, limit_s=SLOW * check.limit_s) if tiny else check for check in _in_order(tiny)]


def _in_order(tiny: bool) -> list[Check]:
    return [
        # about ten minutes of an H200
        Check("machine", "what the machine is", run_checks.machine, 90),
        Check("quickstart", "the README's first run", run_checks.quickstart, 120, 30),
        _profile("dense_8b"),
        _speed("dense_8b", rounds=2),
        _memory("1b"),
        # the next ten
        Check("clauses", "the training spec on the chip, one process", engine_checks.clauses, 240, 40),
        _tests("tests on the device", TINY_TESTS if tiny else ON_THE_DEVICE, 120),
        _speed("dense_1b"),
        Check("data path", "waits for data, copies, allocations", run_checks.data_path, 120, 60),
        Check("elastic", "two replica groups on one device", run_checks.elastic, 120, 60),
        Check("out of memory", "memory runs out, and the run goes on", run_checks.out_of_memory, 120, 40),
        # the last ten
        _speed("moe"),
        _speed("mamba2"),
        _speed("unet"),
        Check("stall", "what a checkpoint holds up", run_checks.stall, 90, 45),
        Check("kernels", "the table of kernels=auto", run_checks.kernels, 150, 60),
        _memory("0.1b"),
        _speed("dense_8b_fp8"),
        _speed("dense_8b_8k"),
        # where there is more time
        *map(_memory, ("3b", "0.4b", "8b_half")),
        *map(_profile, ("dense_1b", "moe", "mamba2")),
        *map(_speed, ("dense_1b_8k", "dense_1b_fp8", "dense_8b_8k_fp8")),
        *([] if tiny else [_tests("tests of the engine", OF_THE_ENGINE, 300)]),
    ]


def _speed(name: str, rounds: int = 1) -> Check:
    find = partial(run_checks.speed, name, rounds=rounds)
    return Check(f"speed {name}", WORKLOADS[name].what, find, 150 * (1 + rounds), 60)


def _memory(name: str) -> Check:
    return Check(f"memory {name}", MEMORY[name].what, partial(engine_checks.memory_of, name), 150, 45)


def _profile(name: str) -> Check:
    return Check(f"profile {name}", WORKLOADS[name].what, partial(engine_checks.profile_of, name), 120, 45)


def _tests(name: str, files: tuple[str, ...], limit_s: float) -> Check:
    return Check(name, ", ".join(files), partial(run_checks.tests, files), limit_s, 30)
