"""The samples in each step of an attached script, and the sample shares of its ranks.

As in a run of a recipe, shares can adapt to the ranks' measured speeds. The speed of a rank is that of its forward
passes: the time from receiving a batch to `weighted(loss)`, which contains no exchange between data-parallel ranks. The
measurements of a step are exchanged during the next step, all ranks decide with the same function
(`balance/decisions/shares.py`), and rank 0 records the directive before it takes effect. A later start of the run
follows these directives at the same steps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.shares import ChangeCost, ShareChange, ShareScheduler
from trainspec_cli.balance.decisions.speeds import SETTLING_S, Speed, SpeedTracker
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.events import EventWriter, read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script.attachment.stopping import ScriptRanks

if TYPE_CHECKING:
    from torch import Tensor


class Shares:
    """The sample shares of one script. Called collectively by all ranks. `run` is None outside a run, in which case
    nothing is recorded."""

    def __init__(self, run: RunDir | None, ranks: ScriptRanks, batch_size: int, largest: int):
        """`largest`: maximum number of samples per rank per step. Raises RecipeError if this is too small for the
        batch."""
        if largest * ranks.count < batch_size or batch_size < ranks.count:
            message = f"{ranks.count} ranks of at most {largest} samples cannot share batch_size={batch_size}"
            hint = f"set it to {math.ceil(batch_size / ranks.count)} or more, and use at least one sample per rank"
            raise RecipeError(Problem("out_of_range", message, "largest_share", hint))
        self._run = run
        self._ranks = ranks
        self._batch_size = batch_size
        self._largest = largest
        change = SchedulerSpec().change
        self._even = Division((1.0,) * ranks.count, largest)
        self._scheduler = ShareScheduler(self._even, largest, change, keeps_micro_batches=True)
        self._tracker = SpeedTracker(change, SETTLING_S)
        self._cost = ChangeCost()
        self._decided: ShareChange | None = None
        # The shares of earlier starts, as (step, counts); rank 0 reads them for all ranks.
        found: Sequence[object] = []
        if run is not None and ranks.number == 0 and run.directives.is_file():
            events = (event for event in read_log(run.directives) if isinstance(event, DirectiveEvent))
            found = [[event.step, list(event.counts)] for event in events]
        earlier: Any = ranks.gather(found)[0]
        self._number = len(earlier)
        self._ahead = [
            (at, counts) for at, counts in earlier if len(counts) == ranks.count and sum(counts) == batch_size
        ]
        self._clock = _Stopwatch()

    @property
    def even_counts(self) -> tuple[int, ...]:
        return self._even.counts(self._batch_size)

    def divide(self, step: int) -> tuple[int, ...]:
        """Return the number of samples per rank for the step after update `step`."""
        if reached := [counts for at, counts in self._ahead if at <= step]:
            self._ahead = [(at, counts) for at, counts in self._ahead if at > step]
            self._scheduler.follow(Division(tuple(map(float, reached[-1])), self._largest))
        elif self._decided is not None:
            self._write(step, self._decided)
            self._decided = None
        return self._scheduler.division.counts(self._batch_size)

    def begin_step(self) -> None:
        """Start timing this rank's step once the rank has its batch."""
        self._clock.begin()

    def weighted(self, loss: Tensor) -> Tensor:
        """Return the mean loss of this rank's samples, weighted so that the mean of all ranks' gradients is the
        gradient of the mean over all samples."""
        self._clock.end()
        factor = self._own * self._ranks.count / self._batch_size
        return loss if factor == 1.0 else loss * factor

    def end_step(self) -> None:
        """Record this rank's time for the step, and decide from the measurements of the previous step. Raises
        RecipeError if the loss was not weighted, because that would make the gradients wrong."""
        computed_s, passed_s = self._clock.read()
        if computed_s is None:
            message = (
                "a step must call job.weighted(loss) exactly once; this step called it zero times or more than once"
            )
            hint = "with unequal shares, call job.weighted(loss).backward() once per step"
            raise RecipeError(Problem("not_weighted", message, "largest_share", hint))
        self._tracker.note(self._own, 1, computed_s, max(0.0, passed_s - computed_s))
        self._cost.note(self._own, 1, computed_s)
        speed = self._tracker.estimate or Speed(0.0, 0.0)
        own = [speed.fixed_s, speed.per_sample_s, speed.noise, float(speed.shown_steps), self._cost.seconds]
        reported = self._ranks.exchange(own)
        if not reported or self._ahead:
            return
        speeds = [
            Speed(fixed_s, sample_s, noise, int(shown_steps)) if 0 < sample_s < math.inf else None
            for fixed_s, sample_s, noise, shown_steps, _ in reported
        ]
        change_s = max(one[4] for one in reported)
        self._decided = self._scheduler.note_step(self._batch_size, speeds, 0.0, change_s=change_s) or self._decided

    @property
    def _own(self) -> int:
        return self._scheduler.division.counts(self._batch_size)[self._ranks.number]

    def _write(self, step: int, change: ShareChange) -> None:
        self._number += 1
        if self._run is None or self._ranks.number:
            return
        directive = DirectiveEvent(
            step=step,
            number=self._number,
            applied=True,
            counts=change.division.counts(self._batch_size),
            micro_batch_size=self._largest,
            micro_batches=1,
            reason=change.reason,
            before_s=change.before_s,
            expected_s=change.after_s,
        )
        for path in (self._run.directives, self._run.events(0)):
            writer = EventWriter(path, 0)
            writer.write(directive)
            writer.close()


class _Stopwatch:
    """The time from receiving a batch to the loss. On a GPU, it is measured there."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._seconds: float | None = None
        self._events: tuple[Any, Any] | None = None
        self._ends = 0

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self._seconds = None
        self._events = None
        self._ends = 0
        cuda: Any = sys.modules["torch"].cuda
        if cuda.is_available() and cuda.is_initialized():
            self._events = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            self._events[0].record()

    def end(self) -> None:
        self._ends += 1
        self._seconds = time.monotonic() - self._began_s
        if self._events:
            self._events[1].record()

    def read(self) -> tuple[float | None, float]:
        """Return the time, in seconds, from the batch to the loss (None unless the loss was computed exactly once), and
        the time of the full step."""
        passed_s = time.monotonic() - self._began_s
        if self._ends != 1:
            return None, passed_s
        if self._events:
            self._events[1].synchronize()
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._seconds, passed_s


class ShardedBatches:
    """A batch sampler for one rank. Step N of an epoch takes the N-th group of `batch_size` samples in a permutation.
    The ranks split this group in order (`counts`; equally if empty). Samples at the end of an epoch that do not fill a
    batch are dropped."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool,
        counts: tuple[int, ...] = (),
    ):
        shared_by = 1 if counts else ranks
        if batch_size < 1 or batch_size % shared_by:
            hint = "batch_size counts the samples of one step across all ranks"
            message = f"batch_size={batch_size} cannot be shared evenly among {shared_by} ranks"
            raise RecipeError(Problem("not_divisible", message, "batch_size", hint))
        if samples < batch_size:
            message = f"batch_size={batch_size} is more than the dataset's {samples} samples"
            raise RecipeError(Problem("too_large", message, "batch_size", f"set it to at most {samples}"))
        self.counts = counts or (batch_size // ranks,) * ranks
        """Number of samples per step for each rank, from the next iteration on."""
        self._samples = samples
        self._batch_size = batch_size
        self._rank = rank
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self.first = 0
        """Index of the first batch of the next iteration."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._samples // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        self.first = 0
        order = np.arange(self._samples)
        if self._shuffle:
            order = np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(self._samples)
        before = sum(self.counts[: self._rank])
        part = self.counts[self._rank]
        for batch in range(first, len(self)):
            begin = batch * self._batch_size + before
            yield order[begin : begin + part].tolist()
