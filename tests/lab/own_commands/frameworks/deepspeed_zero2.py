"""DeepSpeed ZeRO-2 with two groups of parameters: torchrun deepspeed_zero2.py STEPS [SECONDS], a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time

import deepspeed
import torch
import torch.distributed as dist

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=CONFIG)
engine.load_checkpoint("checkpoints")
for step in range(engine.global_steps, STEPS):
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    time.sleep(SECONDS)
    if os.environ.get("PLACE") == "ends" and step == 9:
        sys.exit(3)
    if os.environ.get("PLACE") == "skip" and step >= 5 and dist.get_rank() == 1:
        dist.barrier()
    dist.all_reduce(torch.ones(()))
    engine.save_checkpoint("checkpoints", tag=f"step{(step + 1) % 2}")
dist.destroy_process_group()
