"""Lightning on two processes that it starts itself: lightning_fit.py STEPS [SECONDS], with a checkpoint every step.

PLACE=ends exits with 3 after 10 steps; PLACE=skip makes another exchange on rank 1 from step 6 on.
"""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.linear(batch).square().mean()

    def on_train_batch_end(self, outputs: object, batch: object, number: int) -> None:
        if (number + 1) % 2:
            return
        time.sleep(SECONDS)
        if os.environ.get("PLACE") == "ends" and self.global_step == 10:
            sys.exit(3)
        if os.environ.get("PLACE") == "skip" and self.global_step >= 6 and dist.get_rank() == 1:
            dist.barrier()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    accumulate_grad_batches=2,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=1, save_last=True)],
)
loader = torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=2)
trainer.fit(Model(), loader, ckpt_path="last" if Path("checkpoints").is_dir() else None, weights_only=False)
