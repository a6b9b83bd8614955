"""The runs that `trainspec certify` judges: plans trained on samples that are drawn from their seed.

Each leaves gradients.stage*.npz (every parameter's full gradient of the first step; of a run of the trainer, of the one
after the last), weights.stage*.npz (every whole parameter after the last) and result.json (losses, digests, which
samples were taken).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples, even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.optim.optimizer import clear_gradients, set_learning_rate
from trainspec_cli.engine.run.coordinator import TrainProgress
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.shares import Share, unique_shares
from trainspec_cli.engine.tools.certify_batches import drawn_batch, drawn_tokens, taken_by_all, taken_positions
from trainspec_cli.engine.tools.certify_live import run_live
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import (
    DRAWN_BATCHES,
    DRAWN_TOKENS,
    CertifyRequest,
    CertifyResult,
    CertifyRun,
    CertifyRunResult,
    TrainedSteps,
)
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir


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
    plan = wanted.plan
    own = folder / name
    if wanted.live:
        return run_and_leave(wanted, own, device)
    mesh = MESHES.of(plan.layout, device.type)
    state = build_train_state(plan, device, mesh)
    if wanted.inputs:
        leave_inputs(wanted, state, own)
    if wanted.gradients:
        first = own_samples(wanted, state, 0, plan.spec.batching.global_batch_size)
        leave_gradients(plan, state, own, first, wanted.exchanges)
    source = folder / wanted.continues if wanted.continues else None
    trained = train(wanted, state, own, source)
    if wanted.steps:
        write_parameters(state, own, "weights", lambda share: share.parameter)
    if not wanted.resume:
        return CertifyRunResult(trained, None)
    resumed = train(replace(wanted, save_at=None), build_train_state(plan, device, mesh), own, source=own)
    return CertifyRunResult(trained, resumed)


def run_and_leave(wanted: CertifyRun, own: Path, device: torch.device) -> CertifyRunResult:
    """Make a run of the trainer, and leave its last weights and the gradients that the next step would have."""
    trainer, trained, live = run_live(wanted, RunDir(own / "run"), device, MESHES)
    state = trainer.state
    division = trainer.coordinator.batches.division
    samples = trainer.progress.samples
    write_parameters(state, own, "weights", lambda share: share.parameter)
    if wanted.gradients:
        following = division.of_rank(state.mesh.data_rank, samples, wanted.plan.spec.batching.global_batch_size)
        leave_gradients(wanted.plan, state, own, following)
    return CertifyRunResult(trained, None, live)


def leave_inputs(wanted: CertifyRun, state: TrainState, folder: Path) -> None:
    """Write the first weights, and what the run trains on."""
    write_parameters(state, folder, "first", lambda share: share.parameter)
    if dist.get_rank() == 0:
        tokens = drawn_tokens(wanted.plan.spec, wanted.steps, wanted.clip_from)
        np.savez(folder / DRAWN_BATCHES, **{DRAWN_TOKENS: tokens})  # type: ignore[arg-type]


MESHES = Meshes()
"""The groups of all runs: each group keeps threads, and some hundred meshes have thousands."""


def leave_gradients(plan: Plan, state: TrainState, folder: Path, own: OwnSamples, exchanges: int = 1) -> None:
    """Write the gradients of a batch, of which `own` is this rank's part: the mean of so many exchanges of them."""
    means: dict[int, Tensor] = {}  # by share: a tied embedding stands twice under one name
    for _ in range(exchanges):
        compute_gradients(state, drawn_batch(plan.spec, state, own), plan.tokens_per_step)
        for share in state.shares:
            if (gradient := share.parameter.grad) is not None:
                part = gradient.detach() / exchanges
                means[id(share)] = means[id(share)] + part if id(share) in means else part
        clear_gradients(state.shares)
        state.compression.settle(torch.zeros(()))
    write_parameters(state, folder, "gradients", lambda share: means.get(id(share)))
    state.compression.clear()


def train(wanted: CertifyRun, state: TrainState, folder: Path, source: Path | None) -> TrainedSteps:
    """Train up to the last step, from the first or from the checkpoint in `source`; the recipe says how many samples
    each step takes."""
    spec = wanted.plan.spec
    pace = StepPace(wanted.plan)
    progress = TrainProgress()
    if source is not None and (restored := load_newest(RunDir(source), state.held, state.device)):
        progress = TrainProgress(restored.manifest.step, restored.manifest.about.samples)
    losses = []
    norms = []
    taken = []
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
        taken.append((state.mesh.data_rank, taken_positions(own)))
        progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
        if progress.step == wanted.save_at:
            _save(wanted.plan, state, RunDir(folder), progress)
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    return TrainedSteps(tuple(losses), min(norms, default=None), sha256, taken_by_all(taken))


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


def write_parameters(state: TrainState, folder: Path, name: str, tensor_of: Callable[[Share], Tensor | None]) -> None:
    """Write what `tensor_of` gives for each parameter: each pipeline rank its stages'. A None is left out."""
    whole: dict[str, np.ndarray] = {}
    for share in unique_shares(state.shares):
        if (tensor := tensor_of(share)) is not None:
            whole[share.name] = share.gather(tensor.detach()).float().cpu().numpy()
    if state.mesh.stage.get_local_rank() == 0:
        np.savez(folder / f"{name}.stage{state.mesh.rank('pp')}.npz", **whole)  # type: ignore[arg-type]
    dist.barrier()
