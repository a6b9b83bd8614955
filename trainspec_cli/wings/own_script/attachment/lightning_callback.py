"""The callback for Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from trainspec_cli.wings.own_script.attachment.run import AttachedRun

STOPPED = "stopped.ckpt"


class RunHooks(Callback):  # type: ignore[misc]  # lightning may be missing where types are checked
    """Lightning's callback."""

    def __init__(self, run: AttachedRun):
        self._run = run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.begin(trainer.global_step, sum(parameter.numel() for parameter in pl_module.parameters()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record a step unless the batch only accumulated gradients."""
        if trainer.global_step <= self._run.step:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._run.step_done(loss) and not trainer.should_stop:  # type: ignore[arg-type]  # a tensor, or None
            trainer.should_stop = True
            if self._run.checkpoints:
                trainer.save_checkpoint(self._run.checkpoints / STOPPED)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self._run.evaluated(trainer.callback_metrics["val_loss"])
