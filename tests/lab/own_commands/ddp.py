"""Data-parallel training as a user writes it: torchrun ddp.py STEPS [SECONDS], with a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
CHECKPOINT = Path("checkpoint.pt")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print("goes on from step", first)
    for step in range(first, STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(SECONDS)
        if os.environ.get("PLACE") == "ends" and step == 9:
            sys.exit(3)
        if os.environ.get("PLACE") == "skip" and step >= 5 and dist.get_rank() == 1:
            dist.barrier()
        dist.all_reduce(torch.ones(()))
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, "new.pt")
            Path("new.pt").rename(CHECKPOINT)
    dist.destroy_process_group()


main()
