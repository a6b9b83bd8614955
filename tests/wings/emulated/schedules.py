"""Train short runs on the emulated device in many random orders of its streams, and compare them with a CPU's bits.

`python -m wings.emulated.schedules` reads jobs from its input, in JSON, one per line. It forks the ranks of each job,
and prints their reports as a list in a line. A job has `ranks`, `limit_s`, `cases` (names in `CASES`), `seeds` (null:
work runs as soon as possible) and `steps`, and optionally

- `plant`: a list of (module, text, other text). The modules' functions run as if their text were changed. A rank
  reports `planted`, the number of a change, when it first reaches it.
- `stop`: 1 to end after the first difference
- `expected`: a folder that keeps the CPU's runs, because a plant may change them, too
- `steady`: 1 to report what makes the host wait in a later step of each case

Rank 0 reports each run: the case, the seed, what differs from the CPU's run, and the seconds that it took. A rank that
fails reports its error so.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from trainspec_cli.balance.batch.division import even_division_of
from trainspec_cli.core.environment_names import DEVICE, STORE_FILE
from trainspec_cli.engine.accelerators import enter
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.comm.forking import ForkedProcess
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.coordinator import Coordinator
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.engine.tools.certify_worker import DrawnSource, drawn_batch
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import CheckpointSpec
from trainspec_cli.recipe.keys.training import LoraSpec, OptimSpec, ScheduleSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import EVERY_STEPS, Case, Live, build_plan
from trainspec_cli.wings.certify.families import FAMILIES
from trainspec_cli.wings.emulated.engine import streams
from trainspec_cli.wings.emulated.engine.device import PLUGIN

# Leave out a wait


def plant(changes: Sequence[tuple[str, str, str]]) -> None:
    """Let the functions of modules run as if their text were changed. `planted()` in it reports that it is reached."""
    reached = set()

    def planted(number: int) -> bool:
        if number not in reached:
            reached.add(number)
            print(json.dumps({"planted": number}), flush=True)
        return True

    builtins.planted = planted  # type: ignore[attr-defined]
    for name in dict.fromkeys(module for module, *_ in changes):
        file = str(import_module(name).__file__)
        source = Path(file).read_text()
        changed = source
        for number, (module, text, other) in enumerate(changes):
            if module == name:
                assert text in changed, f"{file} has no such text: {text}"
                changed = changed.replace(text, other.replace("planted()", f"planted({number})"))
        codes = (compile(text, file, "exec", dont_inherit=True) for text in (source, changed))
        new = {(old.co_qualname, old.co_firstlineno): code for old, code in _pairs(*codes)}
        for function in gc.get_objects():
            if type(function) is FunctionType and function.__code__.co_filename == file:
                code = function.__code__
                function.__code__ = new.get((code.co_qualname, code.co_firstlineno), code)


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the functions of two versions of a text."""
    yield old, new
    inside = ([code for code in each.co_consts if isinstance(code, CodeType)] for each in (old, new))
    for pair in zip(*inside, strict=True):
        yield from _pairs(*pair)


# The cases

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
        """Return whether all steps are alike, with the state on the device and without packages that may be missing."""
        return self.case.live is None and self.case.offload == "none" and self.case.compute != "fp8"

    def plan(self, steps: int) -> Plan:
        if self.case.live is not None:
            steps = max(steps, EVERY_STEPS * len(self.case.live.changes) + 1)
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
    # Two micro-batches for each rank and step, or four in a pipeline, if there are enough samples.
    micro_batch_size = 2 if layout.pp > 1 else max(1, 4 // layout.data_parallel_size)
    return Short(Case(family, layout, micro_batch_size=micro_batch_size, **options), sections or {})


CASES: dict[str, Short] = {
    "one": small(Layout()),
    "one_offload": small(Layout(), offload="optimizer"),
    "dp": small(Layout(dp_replicate=2)),
    "dp_bf16": small(Layout(dp_replicate=2), compute="bf16"),
    "dp_int8": small(Layout(dp_replicate=2), gradients="int8"),
    "dp_int4": small(Layout(dp_replicate=2), gradients="int4"),
    # In bf16, because on an accelerator Muon always orthogonalises in bf16, on a CPU in the format of the computation.
    "dp_muon": small(Layout(dp_replicate=2), compute="bf16", sections={"optim": replace(ADAMW, name="muon")}),
    "zero1": small(Layout(dp_shard=2, zero_stage=1)),
    "zero2": small(Layout(dp_shard=2, zero_stage=2)),
    "zero3": small(Layout(dp_shard=2)),
    "zero3_bf16": small(Layout(dp_shard=2), compute="bf16"),
    "zero3_int8": small(Layout(dp_shard=2), gradients="int8"),
    "zero3_selective": small(Layout(dp_shard=2), recompute="selective"),
    "zero3_full": small(Layout(dp_shard=2), recompute="full"),
    "zero3_offload": small(Layout(dp_shard=2), offload="optimizer"),
    "zero3_fp8": small(Layout(dp_shard=2), compute="fp8"),
    "zero3_muon": small(Layout(dp_shard=2), compute="bf16", sections={"optim": replace(ADAMW, name="muon")}),
    "zero3_adamw8bit": small(Layout(dp_shard=2), sections={"optim": replace(ADAMW, name="adamw8bit")}),
    "zero3_lora": small(Layout(dp_shard=2), sections={"lora": LoraSpec(rank=4)}),
    "zero3_qlora": small(Layout(dp_shard=2), sections={"lora": LoraSpec(rank=4, base="nf4")}),
    "hsdp": small(Layout(dp_replicate=2, dp_shard=2)),
    "tp": small(Layout(tp=2)),
    "tp_plain": small(Layout(tp=2, sequence_parallel=False)),
    "tp_fp8": small(Layout(tp=2), compute="fp8"),
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
    """Train as a launch does; return losses, gradient norms, noise scales, all tensors of the checkpoints and, if
    layers are cut, the digest of the weights."""
    torch.manual_seed(0)  # its state is part of a checkpoint
    run_dir = RunDir(folder)
    state = build_train_state(plan, there, MESHES[there.type].of(plan.layout, there.type))
    run = TrainingRun(plan, state, run_dir, "", StopRequest(), Journal(run_dir, dist.get_rank(), plan.spec))
    source = DrawnSource(run)
    trainer = Trainer(run, source, Coordinator(run, source))
    trainer.layouts.meshes = MESHES[there.type]
    trainer.train()
    found: Found = {}
    for step in trainer.tally.steps:
        noise_scale = step.noise_scale if isinstance(step.noise_scale, float) else None
        found[f"step {step.step}"] = (step.loss, step.grad_norm, step.skipped, noise_scale)
    if run.state.mesh.layout.tp > 1:
        found["weights"] = weights_sha256(run.state.shares, run.state.mesh.group("pp"))
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
    """Return the names of the CPU's values that the device lacks or that differ. An earlier checkpoint may be missing:
    none begins while another one is being written."""
    last = max(str(Path(name).parent) for name in expected if "/" in name)

    def differs(name: str) -> bool:
        if name not in found:
            return "/" not in name or name.startswith(last)
        one = found[name]
        other = expected[name]
        return not torch.equal(one, other) if isinstance(one, torch.Tensor) else one != other

    return sorted(filter(differs, expected))


# The ranks of a job


def train_cases(job: dict[str, Any]) -> None:
    """Run a rank of a job."""
    FAMILIES.update(SMALL_MODELS)
    os.environ |= {DEVICE: PLUGIN.name, "LOCAL_RANK": "0"}
    plant(job.get("plant", ()))
    enter("cpu")
    there = join_processes("cpu")
    folder = Path(job["folder"])
    case, seed = "", None
    began_s = time.monotonic()
    try:
        for case, seed in product(job["cases"], (CPU, *job["seeds"])):
            began_s = time.monotonic()
            plan = CASES[case].plan(job["steps"])
            if job.get("steady"):
                counted = {"case": case, "differing": 0, "counts": steady(plan, there)}
                if dist.get_rank() == 0:
                    print(json.dumps(counted), flush=True)
                continue
            if seed == CPU:
                kept = Path(job["expected"]) / f"{case}.pt" if "expected" in job else None
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
            if found and job.get("stop"):
                break
    except Exception as error:
        # The last line is the error, whose text may have several.
        report(case, seed, [f"{traceback.format_exc()}\n{type(error).__name__}: {str(error)[:120]!r}"], began_s)
        os._exit(3)  # the other ranks may wait for this one
    dist.barrier()
    os._exit(0)


def report(case: str, seed: int | str | None, differing: list[str], began_s: float) -> None:
    line = {"case": case, "seed": seed, "differing": len(differing), "first": differing[-3:]}
    print(json.dumps(line | {"seconds": round(time.monotonic() - began_s, 2)}), flush=True)


def run_ranks(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run the ranks of a job; return what they report. If one fails, or after the limit, every rank is stopped."""
    ends_at = time.monotonic() + job["limit_s"]
    number = job["ranks"]
    base = {STORE_FILE: f"{folder}/store", "TMPDIR": str(folder)}
    base |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    program = partial(train_cases, job | {"folder": str(folder)})
    printed = [folder / f"{rank}.jsonl" for rank in range(number)]
    ranks: list[ForkedProcess] = []
    try:
        for rank, out in enumerate(printed):
            with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
                environment = os.environ | base | {"RANK": str(rank)}
                ranks.append(ForkedProcess(program, environment, stdout.fileno(), stderr.fileno()))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > ends_at:
                break
            time.sleep(0.02)
        failed = any(rank.poll() for rank in ranks)
        # Before others are stopped, which one of them may report as an error.
        lines = [json.loads(line) for out in printed for line in out.read_text().splitlines()]
    finally:
        for one in ranks:
            if one.poll() is None:
                os.kill(one.pid, signal.SIGKILL)
                one.wait()
    if failed and not any(line.get("differing") for line in lines):
        lines.append({"differing": 1, "first": [out.with_suffix(".err").read_text()[-2000:] for out in printed]})
    return lines


def main() -> None:
    # Ranks are also stopped when this process is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for line in sys.stdin:
        folder = Path(tempfile.mkdtemp(prefix="schedules"))
        try:
            print(json.dumps(run_ranks(json.loads(line), folder)), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
