"""Accelerate with gradient accumulation: torchrun accelerated.py STEPS [SECONDS], with a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
CHECKPOINT = Path("checkpoint.pt")

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
first = 0
if CHECKPOINT.exists():
    state = torch.load(CHECKPOINT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
model, optimizer = accelerator.prepare(model, optimizer)
for micro_batch in range(first * 2, STEPS * 2):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if not accelerator.sync_gradients:
        continue
    step = micro_batch // 2
    time.sleep(SECONDS)
    if os.environ.get("PLACE") == "ends" and step == 9:
        sys.exit(3)
    if os.environ.get("PLACE") == "skip" and step >= 5 and accelerator.process_index == 1:
        dist.barrier()
    accelerator.reduce(torch.ones(()))
    if accelerator.is_main_process:
        whole = accelerator.unwrap_model(model).state_dict()
        torch.save({"model": whole, "optimizer": optimizer.optimizer.state_dict(), "step": step + 1}, "new.pt")
        Path("new.pt").rename(CHECKPOINT)
accelerator.end_training()
