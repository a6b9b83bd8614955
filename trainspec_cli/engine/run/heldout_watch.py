"""What follows from the held-out losses of a run: a checkpoint that is kept, a warning, and an early end."""

from __future__ import annotations

import torch.distributed as dist

from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.heldout import HeldoutLosses
from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.recipe.canonical import to_plain
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.folder.event_types.training import WarningEvent
from trainspec_cli.run.folder.heldout import read_heldout_losses
from trainspec_cli.run.folder.paths import RunDir


class HeldoutWatch:
    """Follows the held-out losses; every rank makes the same calls at the same steps, and decides alike."""

    def __init__(self, spec: RunSpec, run_dir: RunDir, journal: Journal | GroupJournal, checkpoints: Checkpoints):
        self._keeps_best, self._patience = spec.checkpoint.keep_best, spec.train.early_stop_evals
        self._run_dir, self._journal, self._checkpoints = run_dir, journal, checkpoints
        self._losses = HeldoutLosses()
        self.ends_run = False
        """The held-out loss has not fallen for as many evaluations as the recipe allows."""

    @property
    def last_step(self) -> int | None:
        """The step of the last evaluation; None where there was none."""
        return self._losses.last_step

    def recall(self, step: int, *, is_last: bool) -> None:
        """Go on from the evaluations up to a checkpoint of `step`. Where they had ended the run, it ends again: it may
        have died before it was written down as done. `is_last`: the run is over at this step anyway."""
        self._losses = _read_losses(self._run_dir, step)
        if self._keeps_best and self._losses.best_step:
            self._checkpoints.keep(self._losses.best_step)
        self.ends_run = not is_last and self._losses.has_ended(self._patience)
        if self.ends_run:
            self._warn_of_end(step, "; train.early_stop_evals=null trains on")

    def note(self, step: int, samples: int, loss: float | None, *, is_last: bool) -> None:
        """Take in the evaluation after `step`, after which so many samples have been trained."""
        if step == self._losses.last_step:  # it is made again for the result of a run that had died
            return
        before, self._losses = self._losses, self._losses.after(step, loss)
        if self._losses.best_step == step and self._keeps_best:
            self._checkpoints.save_kept(step, samples)
        self.ends_run = not is_last and self._losses.has_ended(self._patience)
        if self.ends_run:
            self._warn_of_end(step)
        elif self._losses.is_rising and not before.is_rising:
            message = (
                f"the held-out loss rises: it was {self._losses.describe_best()}; checkpoint.keep_best=true keeps that "
                "checkpoint, train.early_stop_evals=3 ends such a run"
            )
            self._journal.write(WarningEvent(step=step, message=message))

    def _warn_of_end(self, step: int, hint: str = "") -> None:
        best, evaluations = self._losses.describe_best(), self._losses.since_best
        message = f"the run ends here: the held-out loss was {best}, {evaluations} evaluations ago{hint}"
        self._journal.write(WarningEvent(step=step, message=message))


def _read_losses(run_dir: RunDir, until_step: int) -> HeldoutLosses:
    """Return the held-out losses that the run had up to a step, as rank 0 reads them. Called by every rank together."""
    read = read_heldout_losses(run_dir) if dist.get_rank() == 0 else {}
    recalled = HeldoutLosses()
    for step, loss in read.items():
        recalled = recalled.after(step, loss) if step <= until_step else recalled
    return broadcast_json(to_plain(recalled), lambda plain: read_record(HeldoutLosses, plain))
