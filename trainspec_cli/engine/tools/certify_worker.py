"""The runs that `trainspec certify` judges: plans trained on samples that are drawn from their seed.

Each leaves gradients.stage*.npz (every parameter's full gradient of the first step), weights.stage*.npz (every whole
parameter after the last) and result.json (losses, digests, which samples were taken).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver
from trainspec_cli.engine.checkpoint.store import load_newest
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.data.loader import cut_micro_batches, positions_of
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.optim.optimizer import clear_gradients, set_learning_rate
from trainspec_cli.engine.run.coordinator import TrainProgress
from trainspec_cli.engine.run.pace import StepPace
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.shares import Share, unique_shares
from trainspec_cli.policy.division import OwnSamples, even_division_of
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
        leave_first_gradients(wanted, state, own)
    source = folder / wanted.continues if wanted.continues else None
    trained = train(wanted, state, own, source)
    if wanted.steps:
        write_parameters(state, own, "weights", lambda share: share.parameter)
    if not wanted.resume:
        return CertifyRunResult(trained, None)
    resumed = train(replace(wanted, save_at=None), build_train_state(plan, device, mesh), own, source=own)
    return CertifyRunResult(trained, resumed)


@lru_cache
def mesh_of(layout: Layout, device_type: str) -> Mesh:
    """Build one mesh for all runs of a layout: each group keeps threads, and some hundred meshes have thousands."""
    return build_mesh(layout, device_type)


def leave_first_gradients(wanted: CertifyRun, state: TrainState, folder: Path) -> None:
    """Write the gradients of the first step's batch."""
    plan = wanted.plan
    micro_batches = drawn_batch(plan.spec, state, own_samples(wanted, state, 0, plan.spec.batching.global_batch_size))
    compute_gradients(state, micro_batches, plan.tokens_per_step)
    write_parameters(state, folder, "gradients", lambda share: share.parameter.grad)
    clear_gradients(state.shares)


def train(wanted: CertifyRun, state: TrainState, folder: Path, source: Path | None) -> TrainedSteps:
    """Train up to the last step, from the first or from the checkpoint in `source`; the recipe says how many samples
    each step takes."""
    spec, pace, progress = wanted.plan.spec, StepPace(wanted.plan), TrainProgress()
    if source is not None and (restored := load_newest(RunDir(source), state.held, state.device)):
        progress = TrainProgress(restored.manifest.step, restored.manifest.about.samples)
    losses, norms, taken = [], [], []
    while progress.step < wanted.steps and (batch := pace.batch(progress)):
        clips = wanted.clip_from is not None and progress.step >= wanted.clip_from
        start = batch.samples * (wanted.clip_from or 0) if clips else progress.samples
        own = own_samples(wanted, state, start, batch.samples)
        set_learning_rate(state.optimizer, batch.lr)
        outcome = train_step(
            state,
            drawn_batch(spec, state, own),
            global_tokens=batch.samples * spec.data.seq_len,
            clip_norm=wanted.clip_norm if clips else spec.optim.grad_clip_norm,
        )
        assert outcome is not None, "a step of one replica group always counts"
        losses.append(outcome.loss.item())
        norms += [outcome.grad_norm.item()] if clips else []
        taken.append(taken_positions(own))
        progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
        if progress.step == wanted.save_at:
            _save(wanted.plan, state, RunDir(folder), progress)
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    return TrainedSteps(tuple(losses), min(norms, default=None), sha256, taken_by_all(state.mesh, taken))


def _save(plan: Plan, state: TrainState, run_dir: RunDir, progress: TrainProgress) -> None:
    saver = Saver(run_dir, state.held, state.device, keep_last=1)
    saver.save(About(progress.step, progress.samples, seed=plan.spec.train.seed, recipe_digest=""))
    saver.close()


def own_samples(wanted: CertifyRun, state: TrainState, start: int, samples: int) -> OwnSamples:
    """Return this rank's part of a step's samples, which begin at `start`."""
    division = even_division_of(wanted.plan)
    if wanted.weights:
        division = replace(division, weights=wanted.weights)
    return division.of_rank(state.mesh.data_rank, start, samples)


def taken_positions(own: OwnSamples) -> list[int]:
    runs = (range(start, start + size) for start, size in zip(own.starts, own.sizes, strict=True))
    return [position for run in runs for position in run]


def taken_by_all(mesh: Mesh, taken: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return what all ranks together took in each step; ranks that work on the same samples are to take the same."""
    of_ranks = gather_json([mesh.data_rank, taken], _read_taken)
    steps = zip(*(steps for _, steps in dict.fromkeys(of_ranks)), strict=True)
    return tuple(tuple(sorted(position for own in step for position in own)) for step in steps)


def _read_taken(received: list[Any]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    data_rank, steps = received
    return int(data_rank), tuple(tuple(map(int, step)) for step in steps)


def drawn_batch(spec: RunSpec, state: TrainState, own: OwnSamples) -> list[MicroBatch]:
    """Return the micro-batches of `own`; the sample at a position is the same for every layout and division.

    Samples are drawn in blocks of the first step's batch, each from a generator of its own.
    """
    positions, block_size = positions_of(own), spec.batching.global_batch_size
    blocks = range(int(positions.min()) // block_size, int(positions.max()) // block_size + 1)
    seeds = (spec.train.seed * 1_000_003 + block for block in blocks)
    drawn = zip(*(drawn_samples(spec, torch.Generator().manual_seed(seed)) for seed in seeds), strict=True)
    mine = tuple(torch.cat(tensors)[positions - blocks[0] * block_size].to(state.device) for tensors in drawn)
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


def write_parameters(state: TrainState, folder: Path, name: str, tensor_of: Callable[[Share], Tensor | None]) -> None:
    """Write what `tensor_of` gives for each parameter: each pipeline rank its stages'. A None is left out."""
    whole: dict[str, np.ndarray] = {}
    for share in unique_shares(state.shares):
        if (tensor := tensor_of(share)) is not None:
            whole[share.name] = share.gather(tensor.detach()).float().cpu().numpy()
    if state.mesh.stage.get_local_rank() == 0:
        np.savez(folder / f"{name}.stage{state.mesh.rank('pp')}.npz", **whole)  # type: ignore[arg-type]
    dist.barrier()
