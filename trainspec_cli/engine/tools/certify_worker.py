"""The runs that `trainspec certify` judges: plans trained on samples that are drawn from their seed.

Each leaves gradients.stage*.npz (every parameter's full gradient of the first step) and result.json (losses, digests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver
from trainspec_cli.engine.checkpoint.store import load_newest
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.optim.optimizer import clear_gradients
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.policy.division import even_division
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.tools import CertifyRequest, CertifyResult, CertifyRun, CertifyRunResult, TrainedSteps


def run(request: CertifyRequest) -> CertifyResult:
    """Run all of the request's plans, which take as many processes, one after another."""
    device = join_processes(next(iter(request.runs.values())).plan.device)
    for name, wanted in request.runs.items():
        result = run_one(wanted, Path(request.folder), name, device)
        if dist.get_rank() == 0:
            write_json(Path(request.folder, name, "result.json"), to_plain(result))
        dist.barrier()
    return CertifyResult(len(request.runs))


def run_one(wanted: CertifyRun, folder: Path, name: str, device: torch.device) -> CertifyRunResult:
    torch.compiler.reset()
    plan, own = wanted.plan, folder / name
    mesh = mesh_of(plan.layout, device.type)
    state = build_train_state(plan, device, mesh)
    if wanted.gradients:
        leave_first_gradients(plan, state, own)
    source = folder / wanted.continues if wanted.continues else None
    trained = train(wanted, state, own, source)
    if not wanted.resume:
        return CertifyRunResult(trained, None)
    resumed = train(replace(wanted, save_at=None), build_train_state(plan, device, mesh), own, source=own)
    return CertifyRunResult(trained, resumed)


@lru_cache
def mesh_of(layout: Layout, device_type: str) -> Mesh:
    """Build one mesh for all runs of a layout: each group keeps threads, and some hundred meshes have thousands."""
    return build_mesh(layout, device_type)


def leave_first_gradients(plan: Plan, state: TrainState, folder: Path) -> None:
    """Write the gradients of the first step's batch."""
    compute_gradients(state, drawn_batch(plan, state, step=0), plan.tokens_per_step)
    write_gradients(state, folder)
    clear_gradients(state.shares)


def train(wanted: CertifyRun, state: TrainState, folder: Path, source: Path | None) -> TrainedSteps:
    """Train up to the last step, from the first or from the checkpoint in `source`."""
    restored = load_newest(RunDir(source), state.held, state.device) if source else None
    losses, norms = [], []
    for step in range(restored.manifest.step if restored else 0, wanted.steps):
        clips = wanted.clip_from is not None and step >= wanted.clip_from
        drawn = min(step, step if wanted.clip_from is None else wanted.clip_from)
        outcome = train_step(
            state,
            drawn_batch(wanted.plan, state, drawn),
            global_tokens=wanted.plan.tokens_per_step,
            clip_norm=wanted.clip_norm if clips else wanted.plan.spec.optim.grad_clip_norm,
        )
        assert outcome is not None, "a step of one replica group always counts"
        losses.append(outcome.loss.item())
        norms += [outcome.grad_norm.item()] if clips else []
        if step + 1 == wanted.save_at:
            _save(wanted.plan, state, RunDir(folder), step + 1)
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    return TrainedSteps(tuple(losses), min(norms, default=None), sha256)


def _save(plan: Plan, state: TrainState, run_dir: RunDir, step: int) -> None:
    saver = Saver(run_dir, state.held, state.device, keep_last=1)
    saver.save(About(step, samples=0, seed=plan.spec.train.seed, recipe_digest=""))
    saver.close()


def drawn_batch(plan: Plan, state: TrainState, step: int, weights: Sequence[float] = ()) -> list[MicroBatch]:
    """This rank's micro-batches of a step's global batch, which is the same for every layout.

    `weights` are the shares of the data-parallel ranks; without them they are equal.
    """
    generator = torch.Generator().manual_seed(plan.spec.train.seed * 1_000_003 + step)
    inputs, targets = drawn_samples(plan.spec, generator)
    division = even_division(plan.layout, plan.micro_batch_size, keeps_micro_batches=plan.spec.model.unit == "samples")
    if weights:
        division = replace(division, weights=tuple(weights))
    own = division.of_rank(state.mesh.data_rank, 0, len(inputs))
    mine = tuple(samples[positions_of(own)].to(state.device) for samples in (inputs, targets))
    return [held_part(part, state.positions_S) for part in cut_micro_batches(mine, own)]


def drawn_samples(spec: RunSpec, generator: torch.Generator) -> MicroBatch:
    """A global batch of tokens and those that follow, or of images and labels."""
    model, samples = spec.model, spec.batching.global_batch_size
    if model.unit == "samples":
        images = torch.randn((samples, model.in_channels, *model.input_size), generator=generator)
        labelled = model.input_size if model.segments else ()
        return images, torch.randint(model.num_classes, (samples, *labelled), generator=generator)
    drawn = torch.randint(model.vocab_size, (samples, spec.data.seq_len + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def write_gradients(state: TrainState, folder: Path) -> None:
    """Each pipeline rank writes its stages'; a parameter without a gradient is left out."""
    gradients: dict[str, np.ndarray] = {}
    for share in unique_shares(state.shares):
        if share.parameter.grad is not None:
            gradients[share.name] = share.gather(share.parameter.grad).float().cpu().numpy()
    if state.mesh.stage.get_local_rank() == 0:
        np.savez(folder / f"gradients.stage{state.mesh.rank('pp')}.npz", **gradients)  # type: ignore[arg-type]
    dist.barrier()
