"""A PyTorch training loop that resumes from its newest checkpoint with bitwise identical results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.wings.own_script.attachment import torch_state
from trainspec_cli.wings.own_script.attachment.record import attach_counter
from trainspec_cli.wings.own_script.attachment.shares import ShardedBatches
from trainspec_cli.wings.own_script.attachment.stopping import ScriptRanks
from trainspec_cli.wings.own_script.attachment.torch_state import Trained

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainspec_cli.wings.own_script.attachment.run import AttachedRun

Batch = TypeVar("Batch")


@dataclass
class DataPosition:
    """The position in the data: the first `batch` batches of the epoch are done. `began` is this rank's random state at
    the start of the epoch, and `random` is the state after the newest step. Checkpoints store the fields under these
    names."""

    epoch: int = 0
    batch: int = 0
    began: dict[str, object] = field(default_factory=dict)
    random: dict[str, object] = field(default_factory=dict)


class StepLoop:
    """Yields the batches of a loop, counts its steps and writes checkpoints."""

    def __init__(
        self,
        run: AttachedRun,
        ranks: ScriptRanks,
        model: Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        every: int,
        keep: int,
    ):
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise RecipeError(Problem("out_of_range", f"{name}={value}; it must be 1 or more", name))
        self._run = run
        self._ranks = ranks
        self._every = every
        self._keep = keep
        self._trained = Trained(model, optimizer, {"scheduler": scheduler} if scheduler else {})
        self._saved_step = -1
        if run.shares and self._trained.is_sharded:
            message = "rank speeds cannot be measured for a sharded model, because forward passes wait for other ranks"
            raise RecipeError(Problem("unsupported", message, "largest_share", "leave largest_share out"))

    def run(self, loader: Iterable[Batch], epochs: int) -> Iterator[Batch]:
        position = self._restore(loader)
        while position.epoch < epochs and not self._run.is_stopping:
            for batch in self._batches(loader, position):
                if self._run.shares:
                    self._run.shares.begin_step()
                yield batch
                position.batch += 1
                if self._run.shares:
                    self._run.shares.end_step()
                self._run.log(lr=self._trained.optimizer.param_groups[0]["lr"])
                if self._run.step_done():
                    break
                if self._run.step % self._every == 0:
                    self._save(position)
            else:
                position = DataPosition(position.epoch + 1)
        # The last step started an exchange, which is still pending.
        self._ranks.finish_exchanges()
        self._save(position)

    def _batches(self, loader: Iterable[Batch], position: DataPosition) -> Iterator[Batch]:
        """Yield the rest of an epoch.

        If a loader does not come from `sharded`, its order depends on torch's random numbers. Its epoch therefore
        starts again with the same random state, skipping the finished batches."""
        if position.began:
            torch_state.set_random_state(position.began)
        else:
            position.began = torch_state.random_state()
        passed = position.batch
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, ShardedBatches):
            sampler.epoch = position.epoch
            sampler.first = position.batch
            passed = 0
            self._share(sampler)
        elif set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None):
            set_epoch(position.epoch)
        batches = iter(loader)
        for _ in range(passed):
            next(batches)
        if position.random:
            torch_state.set_random_state(position.random)
            position.random = {}
        end = object()
        while True:
            began_s = time.monotonic()
            if isinstance(sampler, ShardedBatches) and self._share(sampler):
                # The sample shares have changed, so start the rest of the epoch again. The sampler draws no random
                # numbers, but torch's loader does, so restore the random state.
                sampler.first = position.batch
                kept = torch_state.random_state()
                batches = iter(loader)
                torch_state.set_random_state(kept)
            batch = next(batches, end)
            self._run.record.waited(time.monotonic() - began_s)
            if batch is end:
                return
            yield batch  # type: ignore[misc]  # it is not the sentinel

    def _share(self, sampler: ShardedBatches) -> bool:
        """Pass the sample shares for the next step to the sampler. Return whether they have changed."""
        counts = self._run.shares.divide(self._run.step) if self._run.shares else sampler.counts
        changed = counts != sampler.counts
        sampler.counts = counts
        return changed

    def _restore(self, loader: Iterable[Batch]) -> DataPosition:
        """Restore the newest valid checkpoint, which rank 0 chooses for all ranks."""
        attach_counter(self._ranks.number, self._ranks.count)
        folder = self._run.checkpoints
        mine = None
        if folder and self._ranks.number == 0:
            mine = torch_state.newest_sound(folder)
        chosen = self._ranks.gather(None if mine is None else str(mine))[0]
        path = None if chosen is None else Path(str(chosen))
        position = DataPosition()
        step = 0
        if path is not None:
            state = torch_state.read_state(path)
            # Ranks that the checkpoint does not contain start at its position, and keep their own random states.
            places: Any = state["places"]
            ranks = self._ranks.count
            was = len(places)
            if ranks != was and not isinstance(getattr(loader, "batch_sampler", None), ShardedBatches):
                message = (
                    f"{path} contains the state of {was} ranks, but there are {ranks} ranks, and the loader's order "
                    "depends on their states"
                )
                usual = "use job.sharded(dataset, batch_size), whose order does not depend on the number of ranks"
                hint = f"{usual}; or start {was} ranks"
                raise RecipeError(Problem("other_ranks", message, "checkpoints", hint))
            if self._ranks.number < was:
                position = DataPosition(**places[self._ranks.number])
            else:
                position = DataPosition(places[0]["epoch"], places[0]["batch"])
            self._trained.restore(state["trained"])  # type: ignore[arg-type]
            step = self._saved_step = state["step"]  # type: ignore[assignment]
            if not position.batch and position.random:
                torch_state.set_random_state(position.random)
                position.random = {}
        self._run.begin(step, self._trained.parameters, path)
        return position

    def _save(self, position: DataPosition) -> None:
        """Write a checkpoint. All ranks send their positions to rank 0, which writes the checkpoint."""
        if self._run.checkpoints is None or self._run.step == self._saved_step:
            return
        began_s = time.monotonic()
        step = self._run.step
        here = DataPosition(position.epoch, position.batch, position.began, torch_state.random_state())
        places = self._ranks.gather(vars(here))
        state = {"step": step, "trained": self._trained.state(), "places": places}
        if self._ranks.number == 0:
            ranks = self._ranks.count
            keep = self._keep
            path, size_bytes = torch_state.write_state(self._run.checkpoints, step, state, ranks, keep)
            self._run.record.saved(step, str(path), size_bytes, time.monotonic() - began_s)
        self._saved_step = step
