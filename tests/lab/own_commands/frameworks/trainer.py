"""transformers' Trainer with gradient accumulation: torchrun trainer.py STEPS [SECONDS], a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x) - labels).square().mean()}


class Pace(TrainerCallback):
    def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
        time.sleep(SECONDS)
        if os.environ.get("PLACE") == "ends" and state.global_step == 10:
            sys.exit(3)
        if os.environ.get("PLACE") == "skip" and state.global_step >= 6 and dist.get_rank() == 1:
            dist.barrier()


data = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(96)]
asked = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=STEPS,
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
    save_strategy="steps",
    save_steps=1,
    save_total_limit=2,
    disable_tqdm=True,
)
trainer = Trainer(Model(), asked, train_dataset=data, callbacks=[Pace()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if Path("out").is_dir() else None)
