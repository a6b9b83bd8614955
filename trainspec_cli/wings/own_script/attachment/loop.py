"""A training loop in PyTorch that goes on from its newest checkpoint, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.wings.own_script.attachment import torch_state
from trainspec_cli.wings.own_script.attachment.record import take_counter
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
class DataPlace:
    """The place in the data: `batch` batches of the epoch were taken. `began` is the state of this rank's random
    numbers at the epoch's begin, and `random` that after the newest step."""

    epoch: int = 0
    batch: int = 0
    began: dict[str, object] = field(default_factory=dict)
    random: dict[str, object] = field(default_factory=dict)


class StepLoop:
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
                raise RecipeError(Problem("out_of_range", f"{name}={value}; it is to be 1 or more", name))
        self._run = run
        self._ranks = ranks
        self._every = every
        self._keep = keep
        self._trained = Trained(model, optimizer, {"scheduler": scheduler} if scheduler else {})
        self._saved_step = -1
        if run.shares and self._trained.is_sharded:
            message = (
                "the speeds of ranks that shard the model cannot be told: their forward passes wait for one another"
            )
            raise RecipeError(Problem("unsupported", message, "largest_share", "leave largest_share out"))

    def run(self, loader: Iterable[Batch], epochs: int) -> Iterator[Batch]:
        place = self._restore(loader)
        while place.epoch < epochs and not self._run.is_stopping:
            for batch in self._batches(loader, place):
                if self._run.shares:
                    self._run.shares.begin_step()
                yield batch
                place.batch += 1
                if self._run.shares:
                    self._run.shares.end_step()
                self._run.log(lr=self._trained.optimizer.param_groups[0]["lr"])
                if self._run.step_done():
                    break
                if self._run.step % self._every == 0:
                    self._save(place)
            else:
                place = DataPlace(place.epoch + 1)
        # The exchange that the last step has begun is still open.
        self._ranks.settle()
        self._save(place)

    def _batches(self, loader: Iterable[Batch], place: DataPlace) -> Iterator[Batch]:
        """Yield the rest of an epoch. The order of a loader that is not of `sharded` comes from torch's random numbers,
        so that its epoch is begun as it was, and the batches that were taken are passed over."""
        if place.began:
            torch_state.set_random_state(place.began)
        else:
            place.began = torch_state.random_state()
        passed = place.batch
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, ShardedBatches):
            sampler.epoch = place.epoch
            sampler.first = place.batch
            passed = 0
            self._share(sampler)
        elif set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None):
            set_epoch(place.epoch)
        batches = iter(loader)
        for _ in range(passed):
            next(batches)
        if place.random:
            torch_state.set_random_state(place.random)
            place.random = {}
        end = object()
        while True:
            began_s = time.monotonic()
            if isinstance(sampler, ShardedBatches) and self._share(sampler):
                # The rest of the epoch, with other shares: what was read ahead is left. It draws no random number.
                sampler.first = place.batch
                kept = torch_state.random_state()
                batches = iter(loader)
                torch_state.set_random_state(kept)
            batch = next(batches, end)
            self._run.record.waited(time.monotonic() - began_s)
            if batch is end:
                return
            yield batch  # type: ignore[misc]  # it is not the end

    def _share(self, sampler: ShardedBatches) -> bool:
        """Give the sampler the shares of the next step; return whether they are others than before."""
        counts = self._run.shares.divide(self._run.step) if self._run.shares else sampler.counts
        changed = counts != sampler.counts
        sampler.counts = counts
        return changed

    def _restore(self, loader: Iterable[Batch]) -> DataPlace:
        """Go back to the newest sound checkpoint, which rank 0 chooses for all."""
        take_counter(self._ranks.number, self._ranks.count)
        folder = self._run.checkpoints
        mine = None
        if folder and self._ranks.number == 0:
            mine = torch_state.newest_sound(folder)
        chosen = self._ranks.gather(None if mine is None else str(mine))[0]
        path = None if chosen is None else Path(str(chosen))
        place = DataPlace()
        step = 0
        if path is not None:
            state = torch_state.read_state(path)
            place = self._place_in(path, loader, state["places"])
            self._trained.restore(state["trained"])  # type: ignore[arg-type]
            step = self._saved_step = state["step"]  # type: ignore[assignment]
            if not place.batch and place.random:
                torch_state.set_random_state(place.random)
                place.random = {}
        self._run.begin(step, self._trained.parameters, path)
        return place

    def _place_in(self, path: Path, loader: Iterable[Batch], places: Any) -> DataPlace:
        """Return this rank's place. Ranks that were not there before keep the random numbers that they have. Raises
        RecipeError where the order of the data depends on their number."""
        ranks = self._ranks.count
        was = len(places)
        if ranks != was and not isinstance(getattr(loader, "batch_sampler", None), ShardedBatches):
            message = f"{path} holds the state of {was} ranks, and {ranks} are training on a loader of their own"
            hint = (
                f"take job.sharded(dataset, batch_size), whose order is the same for any number; or start {was} ranks"
            )
            raise RecipeError(Problem("other_ranks", message, "checkpoints", hint))
        if self._ranks.number < was:
            return DataPlace(**places[self._ranks.number])
        return DataPlace(places[0]["epoch"], places[0]["batch"])

    def _save(self, place: DataPlace) -> None:
        """All ranks gather their places; rank 0 writes."""
        if self._run.checkpoints is None or self._run.step == self._saved_step:
            return
        began_s = time.monotonic()
        step = self._run.step
        here = DataPlace(place.epoch, place.batch, place.began, torch_state.random_state())
        places = self._ranks.gather(vars(here))
        state = {"step": step, "trained": self._trained.state(), "places": places}
        if self._ranks.number == 0:
            ranks = self._ranks.count
            keep = self._keep
            path, size_bytes = torch_state.write_state(self._run.checkpoints, step, state, ranks, keep)
            self._run.record.saved(step, str(path), size_bytes, time.monotonic() - began_s)
        self._saved_step = step
