"""Train short runs on the emulated device in many random orders of its streams, and compare them with a CPU's bits:
`python -m wings.emulated.schedules JOB`, a process for each rank.

JOB, in JSON: `cases` (names in `CASES`), `seeds` (null: work runs as soon as possible), `steps`, and optionally `plant`
(a list of (module, text, other text): modules are imported with their text changed), `stop` (1: end after the first
difference), and `expected` (the folder that keeps the CPU's runs: a plant may change them, too). Rank 0 prints a line
of JSON for every run: the case, the seed, what differs from the CPU's run, and the seconds that it took. A rank that
fails prints its error so. With `steady` (1), it prints instead what makes the host wait in a later step of each case.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any


class Planter:
    """Finds modules as Python does, and changes their source text before it is compiled."""

    def __init__(self, changes: Sequence[tuple[str, str, str]]):
        self._changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        changes = [(text, other) for module, text, other in self._changes if module == name]
        if not changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text()
        for text, other in changes:
            assert text in source, f"{spec.origin} has no such text: {text}"
            source = source.replace(text, other)
        code = compile(source, spec.origin, "exec")

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return code

        spec.loader = Loader(name, spec.origin)
        return spec


JOB: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
if JOB.get("plant"):
    sys.meta_path.insert(0, Planter(JOB["plant"]))  # before anything imports the modules

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from trainspec_cli.balance.batch.division import even_division_of  # noqa: E402
from trainspec_cli.core.environment_names import DEVICE  # noqa: E402
from trainspec_cli.engine.accelerators import enter  # noqa: E402
from trainspec_cli.engine.build.assemble import build_train_state  # noqa: E402
from trainspec_cli.engine.comm.joining import join_processes  # noqa: E402
from trainspec_cli.engine.observe.journal import Journal  # noqa: E402
from trainspec_cli.engine.run.coordinator import Coordinator  # noqa: E402
from trainspec_cli.engine.run.faults import StopRequest  # noqa: E402
from trainspec_cli.engine.run.scheduling.relayout import Meshes  # noqa: E402
from trainspec_cli.engine.run.step import train_step  # noqa: E402
from trainspec_cli.engine.run.trainer import Trainer  # noqa: E402
from trainspec_cli.engine.run.training_run import TrainingRun  # noqa: E402
from trainspec_cli.engine.tools.certify_worker import DrawnSource, drawn_batch  # noqa: E402
from trainspec_cli.recipe.keys.layout import Layout  # noqa: E402
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec  # noqa: E402
from trainspec_cli.recipe.keys.run import CheckpointSpec  # noqa: E402
from trainspec_cli.recipe.keys.training import LoraSpec, OptimSpec, ScheduleSpec  # noqa: E402
from trainspec_cli.recipe.results.plan import Plan  # noqa: E402
from trainspec_cli.run.folder.paths import RunDir  # noqa: E402
from trainspec_cli.wings.certify.cases import Case, Live, build_plan  # noqa: E402
from trainspec_cli.wings.certify.families import FAMILIES  # noqa: E402
from trainspec_cli.wings.emulated.engine import streams  # noqa: E402
from trainspec_cli.wings.emulated.engine.device import PLUGIN  # noqa: E402

SMALL = DecoderModel(
    num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=32, vocab_size=64, qk_norm=True
)
SMALL_MODELS = {
    "small": SMALL,
    "small_deep": replace(SMALL, num_layers=4),
    "small_moe": replace(SMALL, experts=ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=16)),
}
SEQ_LEN = 16
CONSTANT = ScheduleSpec(kind="constant")
ADAMW = OptimSpec(name="adamw", lr=1e-2, schedule=CONSTANT)


@dataclass(frozen=True)
class Short:
    """A case of certify on a small model, and the sections of its recipe that differ from certify's."""

    case: Case
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def is_steady(self) -> bool:
        """Whether all steps are alike, with the state on the device and without packages that may be missing."""
        return self.case.live is None and self.case.offload == "none" and self.case.compute != "fp8"

    def plan(self, steps: int) -> Plan:
        plan = build_plan(self.case, "cpu")
        spec = plan.spec
        seq_len = SEQ_LEN if self.case.family in SMALL_MODELS else spec.data.seq_len
        sections = {"optim": ADAMW} | self.sections
        spec = replace(
            spec,
            data=replace(spec.data, seq_len=seq_len),
            train=replace(spec.train, max_steps=steps),
            checkpoint=CheckpointSpec(2, "async"),
            **sections,
        )
        return replace(plan, spec=spec, comm=spec.comm.fixed, peak_flops=1.0)


def small(layout: Layout, family: str = "small", sections: dict[str, Any] | None = None, **options: Any) -> Short:
    return Short(Case(family, layout, micro_batch_size=2, **options), sections or {})


CASES: dict[str, Short] = {
    "one": small(Layout()),
    "one_offload": small(Layout(), offload="optimizer"),
    "dp": small(Layout(dp_replicate=2)),
    "dp_bf16": small(Layout(dp_replicate=2), compute="bf16"),
    "dp_int8": small(Layout(dp_replicate=2), gradients="int8"),
    "dp_int4": small(Layout(dp_replicate=2), gradients="int4"),
    "dp_muon": small(Layout(dp_replicate=2), sections={"optim": replace(ADAMW, name="muon")}),
    "zero1": small(Layout(dp_shard=2, zero_stage=1)),
    "zero2": small(Layout(dp_shard=2, zero_stage=2)),
    "zero3": small(Layout(dp_shard=2)),
    "zero3_bf16": small(Layout(dp_shard=2), compute="bf16"),
    "zero3_int8": small(Layout(dp_shard=2), gradients="int8"),
    "zero3_selective": small(Layout(dp_shard=2), recompute="selective"),
    "zero3_full": small(Layout(dp_shard=2), recompute="full"),
    "zero3_offload": small(Layout(dp_shard=2), offload="optimizer"),
    "zero3_fp8": small(Layout(dp_shard=2), compute="fp8"),
    "zero3_muon": small(Layout(dp_shard=2), sections={"optim": replace(ADAMW, name="muon")}),
    "zero3_adamw8bit": small(Layout(dp_shard=2), sections={"optim": replace(ADAMW, name="adamw8bit")}),
    "zero3_lora": small(Layout(dp_shard=2), sections={"lora": LoraSpec(rank=4)}),
    "zero3_qlora": small(Layout(dp_shard=2), sections={"lora": LoraSpec(rank=4, base="nf4")}),
    "hsdp": small(Layout(dp_replicate=2, dp_shard=2)),
    "tp": small(Layout(tp=2)),
    "tp_plain": small(Layout(tp=2, sequence_parallel=False)),
    "tp_full": small(Layout(tp=2), recompute="full"),
    "ring": small(Layout(cp=2)),
    "ulysses": small(Layout(cp=2, context_method="ulysses")),
    "gpipe": small(Layout(pp=2, pipeline_schedule="gpipe")),
    "1f1b": small(Layout(pp=2)),
    "1f1b_offload": small(Layout(pp=2), offload="optimizer"),
    "zero_bubble": small(Layout(pp=2, pipeline_schedule="zero_bubble")),
    "zbv": small(Layout(pp=2, pipeline_schedule="zbv"), "small_deep"),
    "interleaved": small(Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2), "small_deep"),
    "ep": small(Layout(dp_shard=2, ep=2), "small_moe"),
    "ep4": small(Layout(dp_shard=4, ep=2), "small_moe"),
    "zero3_tp": small(Layout(dp_shard=2, tp=2)),
    "zero3_cp": small(Layout(dp_shard=2, cp=2)),
    "zero2_pp": small(Layout(dp_shard=2, pp=2, zero_stage=2)),
    "zero3_zbv": small(Layout(dp_shard=2, pp=2, pipeline_schedule="zbv"), "small_deep"),
    "tp_pp": small(Layout(tp=2, pp=2)),
    "tp_cp": small(Layout(tp=2, cp=2)),
    "moved": small(Layout(dp_shard=2), live=Live((Layout(tp=2), Layout(pp=2)))),
}
MESHES = {kind: Meshes() for kind in ("cpu", PLUGIN.name)}
STEADY_STEPS = 3
"""Steps until buffers, moments and caches exist."""
Found = dict[str, Any]
CPU = "cpu"


def train(plan: Plan, there: torch.device, folder: Path) -> Found:
    """Train as a launch does; return losses, gradient norms and all tensors of the checkpoints."""
    torch.manual_seed(0)  # its state is part of a checkpoint
    run_dir = RunDir(folder)
    state = build_train_state(plan, there, MESHES[there.type].of(plan.layout, there.type))
    run = TrainingRun(plan, state, run_dir, "", StopRequest(), Journal(run_dir, dist.get_rank(), plan.spec))
    source = DrawnSource(run)
    trainer = Trainer(run, source, Coordinator(run, source))
    trainer.layouts.meshes = MESHES[there.type]
    trainer.train()
    found: Found = {f"step {step.step}": (step.loss, step.grad_norm) for step in trainer.tally.steps}
    dist.barrier()
    for file in sorted(folder.rglob("*.safetensors")):
        for name, tensor in safetensors.torch.load(file.read_bytes()).items():
            found[f"{file.relative_to(folder)} {name}"] = tensor.view(torch.uint8) if tensor.dim() else tensor.item()
    return found


def steady(plan: Plan, there: torch.device) -> dict[str, int]:
    """Return what the last of a few steps does that makes the host wait, beyond queueing operations."""
    state = build_train_state(plan, there, MESHES[there.type].of(plan.layout, there.type))
    samples = plan.spec.batching.global_batch_size
    own = even_division_of(plan).of_rank(state.mesh.data_rank, 0, samples)
    found: dict[str, int] = {}
    for _ in range(STEADY_STEPS):
        batch = drawn_batch(plan.spec, state, own)
        streams.counts.clear()
        train_step(state, batch, global_tokens=samples * plan.spec.data.seq_len, clip_norm=1.0)
        found = {name: number for name, number in streams.counts.items() if name != "operations"}
    torch.accelerator.synchronize()
    dist.barrier()
    return found


def differences(found: Found, expected: Found) -> list[str]:
    """Return the names of all values that differ. An earlier checkpoint may be missing: none begins while another one
    is being written."""

    def differs(name: str) -> bool:
        one, other = found.get(name), expected.get(name)
        return not torch.equal(one, other) if isinstance(one, torch.Tensor) else one != other

    return sorted(name for name in found.keys() & expected.keys() if differs(name))


def main() -> None:
    FAMILIES.update(SMALL_MODELS)
    os.environ |= {DEVICE: PLUGIN.name, "LOCAL_RANK": "0"}
    enter("cpu")
    there = join_processes("cpu")
    folders = [tempfile.mkdtemp(prefix="schedules") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders, device=torch.device("cpu"))
    folder = Path(folders[0])
    case, seed = "", None
    began_s = time.monotonic()
    try:
        for case, seed in product(JOB["cases"], (CPU, *JOB["seeds"])):
            began_s = time.monotonic()
            plan = CASES[case].plan(JOB["steps"])
            if JOB.get("steady"):
                counted = {"case": case, "differing": 0, "counts": steady(plan, there)}
                if dist.get_rank() == 0:
                    print(json.dumps(counted), flush=True)
                continue
            if seed == CPU:
                kept = Path(JOB["expected"]) / f"{case}.pt" if "expected" in JOB else None
                if kept is not None and kept.exists():
                    expected = torch.load(kept)
                    continue
                expected = train(plan, torch.device("cpu"), folder / case / CPU)
                dist.barrier()  # all ranks have looked for the file
                if kept is not None and dist.get_rank() == 0:
                    torch.save(expected, kept)
                continue
            streams.SCHEDULER.start_order(seed)
            found = differences(train(plan, there, folder / case / str(seed)), expected)
            if dist.get_rank() == 0:
                report(case, seed, found, began_s)
            if found and JOB.get("stop"):
                break
    except Exception as error:
        traceback.print_exc()
        report(case, seed, [f"{type(error).__name__}: {error}"], began_s)
        os._exit(3)  # the other ranks may wait for this one
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    os._exit(0)


def report(case: str, seed: int | str | None, differing: list[str], began_s: float) -> None:
    line = {"case": case, "seed": seed, "differing": len(differing), "first": differing[-3:]}
    print(json.dumps(line | {"seconds": round(time.monotonic() - began_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
