"""What tests of several rooms share."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.plan import plan
from trainspec_cli.rundir.events import PARTS
from trainspec_cli.spec.batching import BatchingSpec
from trainspec_cli.spec.cluster import ClusterSpec, Machine
from trainspec_cli.spec.data import DataSpec
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.optim import OptimSpec
from trainspec_cli.spec.probe import Curve, MachineProbe, MatmulCurves, Passes, Reference
from trainspec_cli.spec.run import RunSpec, TrainSection

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
SPEC = RunSpec(
    model=DecoderModel(1, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
CURVES = ("loss", "add", "cast", "optimizer", "all_reduce", "all_gather", "reduce_scatter")
PASSES = ("attention", "attention_narrow", "norm", "rope", "swiglu")


@pytest.fixture
def made_up_probe() -> MachineProbe:
    """A machine on which everything takes a second a unit."""
    curve, reference = Curve((1.0, 2.0), (1.0, 2.0)), Reference(plan(SPEC, MACHINE), dict.fromkeys(PARTS, 1.0), 0.0)
    return MachineProbe(
        processes=2,
        compute="bf16",
        empty_step_s=dict.fromkeys(PARTS, 1.0),
        empty_block_s=dict.fromkeys(PARTS, 1.0),
        small=reference,
        large=reference,
        matmul=MatmulCurves(curve, curve, curve),
        bare_bytes=1.0,
        displaced=0.0,
        **dict.fromkeys(CURVES, curve),
        **dict.fromkeys(PASSES, Passes(curve, curve)),
    )
