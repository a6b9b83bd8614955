"""torchtitan's own trainer on the samples of speed.py: Llama 3 by its flavours, blocks compiled, nothing recomputed.

Written against torchtitan 0.3, whose configuration is Python. Its attention is FlexAttention, which has no backward on
a CPU.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from trainspec_cli.data.corpus import bpe

from .workloads import Workload

FLAVOURS = {2048: "1B", 4096: "8B"}
"""By the hidden size."""
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29611"}


class Samples(BaseDataLoader):
    """Batches that lie in memory. When step `warmup` asks for its own, and when the last does, the clock is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        batches: Any = None
        warmup: int = 0

    marks_s: list[float] = []  # noqa: RUF012 - the trainer makes the loader, and keeps it

    def __init__(self, config: Config, **_given: Any):
        self.config = config

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batches = self.config.batches
        positions = torch.arange(batches.shape[2]).expand(batches.shape[1:]).contiguous()
        for step, ids in enumerate(batches):
            if step in (self.config.warmup, len(batches) - 1):
                torch.cuda.synchronize()
                self.marks_s.append(time.perf_counter())
            yield {"input": ids, "positions": positions}, ids.roll(-1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to go on from."""


def train(workload: Workload, batches: torch.Tensor, warmup: int) -> float:
    """-> seconds of a step."""
    os.environ.update(ONE_PROCESS)
    with tempfile.TemporaryDirectory() as folder:
        bpe.train(["no text is read"], bpe.MIN_VOCAB_SIZE).save(str(Path(folder, "tokenizer.json")))
        trainer = config_of(workload, batches, warmup, folder).build()
        trainer.train()
        trainer.close()
    started, ended = Samples.marks_s
    return (ended - started) / (len(batches) - 1 - warmup)


def config_of(workload: Workload, batches: torch.Tensor, warmup: int, folder: str) -> Trainer.Config:
    spec = model_registry(FLAVOURS[workload.model.hidden_size])
    spec.model.layers = spec.model.layers[: workload.model.num_layers]
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        hf_assets_path=folder,
        dump_folder=folder,
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            local_batch_size=workload.batch_size, seq_len=workload.seq_len, steps=len(batches), max_norm=1.0
        ),
        dataloader=Samples.Config(batches=batches, warmup=warmup),
        checkpoint=CheckpointManager.Config(),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True),
    )
