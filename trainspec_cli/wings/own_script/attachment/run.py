"""A run as seen by the user's script: `run = attach()`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat, TypeVar

from trainspec_cli.core.environment_names import LAUNCH_ID, PROGRESS
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script.attachment.record import StepRecord
from trainspec_cli.wings.own_script.attachment.shares import ShardedBatches, Shares
from trainspec_cli.wings.own_script.attachment.stopping import ScriptRanks, StopSignal

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset
    from transformers import TrainerCallback

Batch = TypeVar("Batch")


class AttachedRun:
    """A script's run. `step`: number of steps across all starts. `is_stopping`: whether the run was asked to stop, in
    which case the script should end. Ranks are those of torch.distributed, JAX or TensorFlow, which the script must
    initialise before it first uses this object."""

    def __init__(self, run: RunDir | None, checkpoints: Path | None, progress: Path | None = None):
        """`progress`: the folder where this launch's processes count their steps."""
        self.folder = run.root if run else None
        self.checkpoints = checkpoints
        self.step = 0
        self.is_stopping = False
        self._run = run
        self._progress = progress
        self._signal = StopSignal()
        self._ranks: ScriptRanks | None = None
        self.shares: Shares | None = None
        """Sample shares that adapt to the ranks' speeds; None for equal shares."""
        self._record: StepRecord | None = None

    # PyTorch loops

    def sharded(
        self,
        dataset: Dataset[Batch],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        largest_share: int | None = None,
        **options: object,
    ) -> DataLoader[Batch]:
        """Return a loader whose order depends only on `seed` and the epoch. `batch_size` is the number of samples per
        step across all ranks, which take equal shares. `options` are passed to torch's DataLoader, such as num_workers.

        With `largest_share`, sample shares adapt to the ranks' measured speeds, as in a run of a recipe, and no rank
        takes more than this many samples per step. The loss must then be passed to `weighted`."""
        from torch.utils.data import DataLoader

        ranks = self._join()
        samples = len(dataset)  # type: ignore[arg-type]  # torch's Dataset has no __len__; map-style data sets have it
        sharding = {"rank": ranks.number, "ranks": ranks.count}
        counts: tuple[int, ...] = ()
        if largest_share is not None:
            self.shares = Shares(self._run, ranks, batch_size, largest_share)
            counts = self.shares.even_counts
        batches = ShardedBatches(samples, batch_size, **sharding, seed=seed, shuffle=shuffle, counts=counts)
        return DataLoader(dataset, batch_sampler=batches, **options)  # type: ignore[arg-type]

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples, weighted by its share of the step. DistributedDataParallel
        averages gradients over ranks. With this weight, the average is the gradient of the mean loss over all samples.
        Call this once per step."""
        return self.shares.weighted(loss) if self.shares else loss

    def steps(
        self,
        loader: Iterable[Batch],
        *,
        model: Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        epochs: int = 1,
        every: int = 100,
        keep: int = 2,
    ) -> Iterator[Batch]:
        """Yield the batches of all epochs, one per step, starting from the newest checkpoint. A checkpoint is written
        every `every` steps, at the end, and when the run is asked to stop; a stop request also ends the iteration."""
        from trainspec_cli.wings.own_script.attachment.loop import StepLoop

        return StepLoop(self, self._join(), model, optimizer, scheduler, every, keep).run(loader, epochs)

    # Any framework

    def begin(self, step: int = 0, parameters: int = 0, restored_from: Path | None = None) -> None:
        """Report that training starts after `step`. Calling this is optional: otherwise the first `step_done` reports
        it."""
        ranks = self._join()
        self.step = step
        self._signal.listen()
        self._record = StepRecord(self._run, ranks.number, ranks.count)
        self._record.begin(step, parameters, str(restored_from) if restored_from else None)

    def step_done(self, loss: SupportsFloat | None = None, *, grad_norm: SupportsFloat | None = None) -> bool:
        """Count a step; return True if the script should save and exit because the run was asked to stop."""
        if self._record is None:
            self.begin(self.step)
        self.log(loss=loss, grad_norm=grad_norm)
        self.step += 1
        self.record.step(self.step)
        self.is_stopping = self._join().agree(self._signal.requested) or self.is_stopping
        return self.is_stopping

    def log(
        self,
        loss: SupportsFloat | None = None,
        *,
        grad_norm: SupportsFloat | None = None,
        lr: SupportsFloat | None = None,
    ) -> None:
        """Record metrics for the current step. Tensors on a GPU are read at the end of the step."""
        given = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        self.record.log({name: value for name, value in given.items() if value is not None})

    def evaluated(
        self, heldout_loss: SupportsFloat, *, accuracy: SupportsFloat | None = None, seconds: float = 0.0
    ) -> None:
        """Record the loss on held-out data after the newest step, and the duration of the evaluation."""
        self.record.evaluated(self.step, heldout_loss, accuracy, seconds)

    # Callbacks for trainers

    def transformers_callback(self) -> TrainerCallback:
        """Return a callback for transformers' Trainer. It records steps, losses and held-out losses, and makes the
        Trainer save and exit when the run is asked to stop."""
        from trainspec_cli.wings.own_script.attachment.transformers_callback import RunCallback

        return RunCallback(self)

    def lightning_callback(self) -> Callback:
        """Return the equivalent callback for Lightning. On a stop request, it writes the checkpoint `stopped.ckpt` to
        `checkpoints`."""
        from trainspec_cli.wings.own_script.attachment.lightning_callback import RunHooks

        return RunHooks(self)

    # For the other modules in this package

    @property
    def record(self) -> StepRecord:
        if self._record is None:
            self.begin(self.step)
        assert self._record is not None, "`begin` creates it"
        return self._record

    def _join(self) -> ScriptRanks:
        """Return the ranks. They are determined on first use, after the script has initialised them."""
        if self._ranks is None:
            self._ranks = ScriptRanks(self._progress)
        return self._ranks


def connect(checkpoints: str | Path | None) -> AttachedRun:
    """Return the run that `trainspec run` started this process for. Outside a run, return a run without a folder, and
    print a note to stderr."""
    launch, _, progress = os.environ.get(PROGRESS, "").partition(":")
    inside = bool(launch) and launch == os.environ.get(LAUNCH_ID) and Path(progress).is_dir()
    run = RunDir(Path(progress).parents[1]) if inside else None
    if run is None and os.environ.get("RANK", "0") == "0":
        kept = f"; checkpoints are in {checkpoints}" if checkpoints else ", and no checkpoint is written"
        print(f"trainspec: not started by `trainspec run`: no events are written{kept}", file=sys.stderr)
    if checkpoints is None and run is not None:
        checkpoints = run.own_checkpoints
    return AttachedRun(run, Path(checkpoints).absolute() if checkpoints else None, Path(progress) if inside else None)
