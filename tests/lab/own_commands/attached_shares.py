"""Data-parallel training whose shares follow the ranks' speeds: attached_shares.py FOLDER EPOCHS LARGEST, where rank 1
takes thrice as long for a sample. LARGEST 0: equal shares. FOLDER gets the final weights and, rank by rank, the samples
that each step has taken."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainspec_cli import attach

FOLDER, EPOCHS, LARGEST = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SAMPLES, BATCH_SIZE, SAMPLE_S = 240, 12, 0.006

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.linspace(-1, 1, SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
dataset = torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.pow(2).sum(1, keepdim=True))
run = attach(FOLDER / "checkpoints")
loader = run.sharded(dataset, BATCH_SIZE, seed=1, largest_share=LARGEST or None)
with (FOLDER / f"samples{rank}_{ranks}.txt").open("a") as taken:
    for numbers, inputs, targets in run.steps(loader, model=model, optimizer=optimizer, epochs=EPOCHS, every=5):
        print(run.step + 1, *numbers.tolist(), file=taken, flush=True)
        loss = (model(inputs) - targets).square().mean()
        time.sleep(len(numbers) * SAMPLE_S * (3 if rank == 1 else 1))
        run.weighted(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
print("ended after step", run.step)
if rank == 0:
    torch.save(model.module.state_dict(), FOLDER / "weights.pt")
dist.destroy_process_group()
