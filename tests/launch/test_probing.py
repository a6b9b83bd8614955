"""Which probes are kept: those that tell of the machine and not of its neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.launch import probing
from trainspec_cli.planner.plan import plan
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.batching import BatchingSpec
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.cluster import ClusterSpec, Machine
from trainspec_cli.spec.data import DataSpec
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.optim import OptimSpec
from trainspec_cli.spec.probe import BUSY, Curve, MachineProbe, MatmulCurves, Passes, Reference
from trainspec_cli.spec.run import RunSpec, TrainSection

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
PLAN = plan(
    RunSpec(
        model=DecoderModel(1, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
        data=DataSpec(seq_len=256, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=16),
        train=TrainSection(max_steps=1),
        cluster=ClusterSpec(devices_per_node=2, device="cpu"),
    ),
    MACHINE,
)
CURVE = Curve((1.0, 2.0), (1.0, 2.0))
CURVES = ("loss", "add", "cast", "optimizer", "all_reduce", "all_gather", "reduce_scatter")
PASSES = ("attention", "attention_narrow", "norm", "rope", "swiglu")
PROBE = MachineProbe(
    processes=2,
    compute="bf16",
    empty_step_s={},
    empty_block_s={},
    small=Reference(PLAN, {}, 0.0),
    large=Reference(PLAN, {}, 0.0),
    matmul=MatmulCurves(CURVE, CURVE, CURVE),
    bare_bytes=1.0,
    displaced=0.0,
    **dict.fromkeys(CURVES, CURVE),
    **dict.fromkeys(PASSES, Passes(CURVE, CURVE)),
)


class Ended:
    stop_requested, exit_code = False, 0


@pytest.mark.parametrize(("displaced", "probes"), [(BUSY / 2, 1), (2 * BUSY, 2)])
def test_a_disturbed_probe_is_used_and_not_kept(
    displaced: float, probes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    told, started = replace(PROBE, displaced=displaced), []

    def leave_figures(job: Any, *_: object) -> Ended:
        write_json(job.root / "probe.json", to_plain(told))
        return Ended()

    monkeypatch.setattr(probing, "supervise", leave_figures)
    for _ in range(2):
        assert probing.probe_machine(PLAN, MACHINE, lambda: started.append(1)) == told
    assert len(started) == probes
