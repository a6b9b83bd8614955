"""A Trainer with the run's callback: attached_trainers.py transformers | lightning. It trains until it is stopped."""

import sys
import time

import torch

from trainspec_cli import attach

STEPS = 5000


class Data(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        time.sleep(0.01)
        return {"x": torch.full((8,), place / 1000), "labels": torch.ones(8)}


def with_transformers() -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            made = self.linear(x)
            return {"loss": (made - labels).square().mean(), "logits": made}

    asked = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=STEPS,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        disable_tqdm=True,
    )
    run = attach()
    heldout = torch.utils.data.Subset(Data(), range(4))
    trainer = Trainer(Model(), asked, train_dataset=Data(), eval_dataset=heldout)
    trainer.add_callback(run.transformers_callback())
    trainer.train()
    print("saved at step", get_last_checkpoint("out").rpartition("-")[2])


def with_lightning() -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return (self.linear(batch["x"]) - batch["labels"]).square().mean()

        def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
            self.log("val_loss", self.training_step(batch, number))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    run = attach()
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        val_check_interval=4,
        callbacks=[run.lightning_callback()],
    )
    loaders = (
        torch.utils.data.DataLoader(data, batch_size=2) for data in (Data(), torch.utils.data.Subset(Data(), range(4)))
    )
    trainer.fit(Model(), *loaders)
    saved = torch.load(run.checkpoints / "stopped.ckpt", weights_only=False)
    print("saved at step", saved["global_step"])


with_transformers() if sys.argv[1] == "transformers" else with_lightning()
