"""Training that attaches itself: attached.py KIND FOLDER EPOCHS [SECONDS]; KIND is plain, own_loader, ddp, fsdp2 or
accelerated. FOLDER gets the final weights and, rank by rank, the samples that each step has taken."""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from trainspec_cli import attach

KIND, FOLDER, EPOCHS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
SECONDS = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
SAMPLES, BATCH_SIZE, EVERY = 50, 8, 5


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    if KIND == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if KIND == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        return fully_shard(model)
    return model


def main() -> None:
    if KIND in ("ddp", "fsdp2"):
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    backward = torch.Tensor.backward
    if KIND == "accelerated":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        backward = accelerator.backward
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(3 + rank)
    random.seed(rank)
    np.random.seed(rank)
    dataset = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    run = attach(FOLDER / "checkpoints")
    loader = run.sharded(dataset, BATCH_SIZE, seed=1)
    if KIND == "own_loader":
        loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, shuffle=True)
    steps = run.steps(loader, model=model, optimizer=optimizer, scheduler=scheduler, epochs=EPOCHS, every=EVERY)
    with (FOLDER / f"samples{rank}.txt").open("a") as taken:
        for (samples,) in steps:
            print(run.step + 1, *samples.tolist(), file=taken, flush=True)
            noise = random.random() + np.random.rand()
            loss = (model(samples[:, None].float().expand(-1, 8) / SAMPLES + noise) + torch.randn(8)).square().mean()
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            time.sleep(SECONDS)
    run.evaluated(loss)
    print("stopped" if run.is_stopping else "trained", run.step)
    weights = model.module.state_dict() if KIND == "ddp" else model.state_dict()
    weights = {name: one.full_tensor() if KIND == "fsdp2" else one for name, one in weights.items()}
    if rank == 0:
        torch.save(weights, FOLDER / "weights.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


main()
