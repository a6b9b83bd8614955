"""`torchrun -m trainspec_cli.engine.tools.certify_worker FOLDER`: what plans' arithmetic comes to, for a judge outside.

FOLDER/runs.json names the runs, one after another; each has a folder beside FOLDER with plan.json and run.json. They
train on what is drawn from the seed, and leave gradients.stage*.npz (every parameter's full gradient of the first step)
and witness.json (losses and digests) there.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainspec_cli.engine.batch import MicroBatch, held_part
from trainspec_cli.engine.build.train_state import TrainState, build_train_state
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver
from trainspec_cli.engine.checkpoint.store import load_newest
from trainspec_cli.engine.comm.joining import join_processes, leave_processes
from trainspec_cli.engine.digest import weights_sha256
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.optim.update import clear_gradients
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.shares import unique_shares
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import ConvModel
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.plan import Plan


def main() -> None:
    folder = Path(sys.argv[1])
    names = read_json(folder / "runs.json")
    device = join_processes(from_plain(Plan, read_json(folder.parent / names[0] / "plan.json")).device)
    for name in names:
        testify(folder.parent / name, device)
    leave_processes()


def testify(folder: Path, device: torch.device) -> None:
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    run: dict[str, Any] = read_json(folder / "run.json")
    torch.compiler.reset()
    mesh = mesh_of(plan.layout, device.type)
    state = build_train_state(plan, device, mesh)
    told: dict[str, Any] = {}
    if run["gradients"]:
        told["loss"] = first_gradients(plan, state, folder)
    source = folder.parent / run["continues"] if run["continues"] else None
    told |= train(plan, state, run["steps"], save_at=run["save_at"], folder=folder, source=source)
    if run["resume"]:
        state = build_train_state(plan, device, mesh)
        told["resumed"] = train(plan, state, run["steps"], save_at=None, folder=folder, source=folder)
    if dist.get_rank() == 0:
        write_json(folder / "witness.json", told)
    dist.barrier()


@lru_cache
def mesh_of(layout: Layout, device_type: str) -> Mesh:
    """One for all runs of a layout: each group keeps threads, and some hundred runs of groups would be thousands."""
    return build_mesh(layout, device_type)


def first_gradients(plan: Plan, state: TrainState, folder: Path) -> float:
    """Write the gradients of the first step's batch; -> its loss."""
    loss = compute_gradients(state, drawn_batch(plan, state, step=0), plan.tokens_per_step).double()
    dist.all_reduce(loss)
    write_gradients(state, folder)
    clear_gradients(state.shares)
    return loss.item()


def train(
    plan: Plan, state: TrainState, steps: int, *, save_at: int | None, folder: Path, source: Path | None
) -> dict[str, Any]:
    """Up to `steps`, from the first or from the checkpoint in `source`."""
    restored = load_newest(RunDir(source), state.held, state.device) if source else None
    losses = []
    for step in range(restored.manifest.step if restored else 0, steps):
        losses.append(_step(plan, state, step))
        if step + 1 == save_at:
            _save(plan, state, RunDir(folder), step + 1)
    return {"losses": losses, "weights_sha256": weights_sha256(state.shares, state.mesh.group("pp"))}


def _step(plan: Plan, state: TrainState, step: int) -> float:
    outcome = train_step(
        state,
        drawn_batch(plan, state, step),
        global_tokens=plan.tokens_per_step,
        clip_norm=plan.spec.optim.grad_clip_norm,
    )
    assert outcome is not None, "a step of one replica group always counts"
    return outcome.loss.item()


def _save(plan: Plan, state: TrainState, run_dir: RunDir, step: int) -> None:
    saver = Saver(run_dir, state.held, state.device, keep_last=1)
    saver.save(About(step, samples=0, seed=plan.spec.train.seed, recipe_digest=""))
    saver.close()


def drawn_batch(plan: Plan, state: TrainState, step: int) -> list[MicroBatch]:
    """This rank's micro-batches of a step's global batch, which is the same for every layout."""
    generator = torch.Generator().manual_seed(plan.spec.train.seed * 1_000_003 + step)
    inputs, targets = drawn_samples(plan.spec, generator)
    ranks, rank = plan.layout.data_parallel_size, state.mesh.data_rank
    mine = (samples.unflatten(0, (-1, ranks))[:, rank].to(state.device) for samples in (inputs, targets))
    parts = zip(*(samples.split(plan.micro_batch_size) for samples in mine), strict=True)
    return [held_part(part, state.positions_S) for part in parts]


def drawn_samples(spec: RunSpec, generator: torch.Generator) -> MicroBatch:
    """A global batch of tokens and those that follow, or of images and labels."""
    model, samples = spec.model, spec.batching.global_batch_size
    if isinstance(model, ConvModel):
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


if __name__ == "__main__":
    main()
