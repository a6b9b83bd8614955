"""Jobs whose workers are the stand-in, on real torchrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSection, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.job.job import Job, build_job

STANDIN = str(Path(__file__).with_name("standin_worker.py"))


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    def make(stop_grace_s: float = 30.0) -> Plan:
        model = DecoderModel(2, 64, 4, 2, 16, 160, 512)
        spec = RunSpec(
            model=model,
            data=DataSpec(seq_len=8, source="python_stdlib"),
            optim=OptimSpec(lr=0.1),
            batching=BatchingSpec(global_batch_size=8),
            train=TrainSection(max_steps=20),
            run=RunSection(stop_grace_s=stop_grace_s),
        )
        return Plan(spec, Layout(dp_replicate=2), "cpu", 1, 2, "fp32", 4, 1, "none", "none", 1000, 6000.0)

    return make


@pytest.fixture
def machine() -> Machine:
    return Machine(hostname="here", cpu_cores=2, memory_bytes=2**30)


@pytest.fixture
def make_job(tmp_path: Path, make_plan: Callable[..., Plan], machine: Machine) -> Callable[..., Job]:
    def make(mode: str, stop_grace_s: float = 30.0) -> Job:
        return build_job(make_plan(stop_grace_s), tmp_path / "run", machine, worker=(STANDIN, mode))

    return make
