"""Sharded training with FSDP2: torchrun fsdp2.py STEPS [SECONDS], with a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
CHECKPOINT, WHOLE = Path("checkpoint.pt"), StateDictOptions(full_state_dict=True, cpu_offload=True)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if CHECKPOINT.exists():
    state = torch.load(CHECKPOINT)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=WHOLE
    )
    first = state["step"]
for step in range(first, STEPS):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(SECONDS)
    if os.environ.get("PLACE") == "ends" and step == 9:
        sys.exit(3)
    if os.environ.get("PLACE") == "skip" and step >= 5 and dist.get_rank() == 1:
        dist.barrier()
    weights, updates = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": updates, "step": step + 1}, "new.pt")
        Path("new.pt").rename(CHECKPOINT)
dist.destroy_process_group()
