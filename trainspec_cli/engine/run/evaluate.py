"""Evaluate the model: held-out loss and metrics, and generated text. Blocks run eagerly, because their shapes vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.data.corpus.rows import Rows
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.engine.data.loader import HeldoutLoss, SampleLoader, heldout_batches
from trainspec_cli.engine.digest import REMEDY, held_part, is_finite
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import read_record, to_plain
from trainspec_cli.run.folder.accounting import read_heldout_losses
from trainspec_cli.run.folder.event_types.events import WarningEvent
from trainspec_cli.run.folder.paths import RunDir

NO_TOKEN = -1

SHORTEST_CONTEXT = 16
"""Contexts shorter than this are padded to this length."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_loss(state: TrainState, rows: Rows, *, num_bytes: int, batch_size: int) -> HeldoutLoss:
    """Return the loss on held-out text of `num_bytes` bytes, the same on every rank."""
    total = torch.zeros((), device=state.device)
    ranks = state.mesh.layout.data_parallel_size
    for part in heldout_batches(rows, batch_size, state.mesh.data_rank, ranks):
        on_device = tuple(tensor.to(state.device) for tensor in part)
        loss = forward_only(state.stages, *held_part(on_device, state.positions_S))
        if loss is not None:
            total += loss / state.mesh.layout.tp
    dist.all_reduce(total)
    return HeldoutLoss(total.item(), sum(rows.counted(index) for index in range(len(rows))), num_bytes)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def heldout_metrics(state: TrainState, loader: SampleLoader, *, batch_size: int) -> dict[str, float] | None:
    """Return the means of metrics over the held-out samples (`loss`, and `accuracy` or `dice`), on every rank.

    None if no samples are held out.
    """
    if loader.num_heldout == 0:
        return None
    (part,), ranks = state.parts, state.mesh.layout.data_parallel_size
    part.eval()
    totals: dict[str, Tensor] = {}
    for images, labels, num_real in loader.heldout_batches(batch_size, state.mesh.data_rank, ranks):
        predictions = forward_only(state.stages, images.to(state.device))
        assert predictions is not None, "convolutional networks have one stage"
        for name, per_sample in part.judge(predictions, labels.to(state.device)).items():
            totals[name] = totals.get(name, 0.0) + per_sample[:num_real].sum()
    part.train()
    summed = torch.stack(list(totals.values()))
    dist.all_reduce(summed)
    means = (summed / loader.num_heldout).tolist()
    return dict(zip(totals, means, strict=True))


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def write_text(
    state: TrainState, prompt_ids: Sequence[int], *, count: int, temperature: float, max_context: int, seed: int
) -> list[int]:
    """Generate `count` tokens after the prompt. All ranks take part in each forward pass and generate the same text.
    Raises WorkerError on all ranks if the logits are not finite."""
    generator = torch.Generator(state.device).manual_seed(seed)
    ids = list(prompt_ids)
    for _ in range(count):
        logits_V = _next_logits(state, ids[-max_context:], max_context)
        token = NO_TOKEN
        if logits_V is not None and is_finite(logits_V):
            token = _choose(logits_V, temperature, generator)
        agreed = torch.tensor(token, device=state.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if int(agreed) == NO_TOKEN:
            raise WorkerError(
                "the model cannot generate text: its logits are not finite", code="not_finite", hint=REMEDY
            )
        ids.append(int(agreed))
    return ids[len(prompt_ids) :]


def _next_logits(state: TrainState, context: Sequence[int], seq_len: int) -> Tensor | None:
    """Return the logits (V,) of the token after `context`; None on ranks without the last stage or the last token."""
    last = len(context) - 1
    layout = state.mesh.layout
    # Attention is causal, so padding after the context changes nothing. With 120 different text lengths, every matmul
    # would have 120 shapes, and the CPU's math library keeps a kernel for each shape: 173 MiB for a Llama with 6M
    # parameters, more than its training needs. So lengths are powers of two. cp needs the full length, and tp needs
    # parts of equal length.
    length = min(seq_len, max(SHORTEST_CONTEXT, 1 << last.bit_length()))
    length = seq_len if layout.cp > 1 else length + -length % layout.tp
    tokens = torch.zeros((1, length), dtype=torch.int64, device=state.device)
    tokens[0, : len(context)] = torch.tensor(context, device=state.device)
    if state.positions_S is not None:
        tokens = tokens[:, state.positions_S]
    logits_BSV = forward_only(state.stages, tokens)
    if logits_BSV is None:
        return None
    index = last if state.positions_S is None else int((state.positions_S == last).int().argmax())
    mine = state.positions_S is None or last in state.positions_S
    logits_V = logits_BSV[0, index]
    if layout.tp > 1:  # each tp rank has the logits of its part of the vocabulary
        parts = [torch.empty_like(logits_V) for _ in range(layout.tp)]
        dist.all_gather(parts, logits_V.contiguous(), group=state.mesh.group("tp"))
        logits_V = torch.cat(parts)
    return logits_V if mine else None


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))


# Act on a run's held-out losses: keep a checkpoint, warn, or end the run early.


class HeldoutWatch:
    """Tracks the held-out losses. Every rank makes the same calls at the same steps and comes to the same decisions."""

    def __init__(self, spec: RunSpec, run_dir: RunDir, journal: Journal, checkpoints: Checkpoints):
        self._keeps_best = spec.checkpoint.keep_best
        self._patience = spec.train.early_stop_evals
        self._run_dir = run_dir
        self._journal = journal
        self._checkpoints = checkpoints
        self._losses = HeldoutLosses()
        self.ends_run = False
        """True if the held-out loss has stopped improving for the number of evaluations set in the recipe."""

    @property
    def last_step(self) -> int | None:
        """The step of the last evaluation; None before the first."""
        return self._losses.last_step

    def recall(self, step: int, *, is_last: bool) -> None:
        """Continue from the evaluations up to the checkpoint of `step`. If they ended the run early, end it again,
        because it may have been killed before its end was recorded. `is_last`: the run ends at this step anyway."""
        read = (
            read_heldout_losses(self._run_dir) if dist.get_rank() == 0 else {}
        )  # rank 0 reads the events for all ranks
        recalled = HeldoutLosses()
        for evaluated, loss in read.items():
            recalled = recalled.after(evaluated, loss) if evaluated <= step else recalled
        self._losses = broadcast_json(to_plain(recalled), lambda plain: read_record(HeldoutLosses, plain))
        if self._keeps_best and self._losses.best_step:
            self._checkpoints.keep(self._losses.best_step)
        self.ends_run = not is_last and self._losses.has_ended(self._patience)
        if self.ends_run:
            self._warn_of_end(step, "; train.early_stop_evals=null continues training")

    def note(self, step: int, samples: int, loss: float | None, *, is_last: bool) -> None:
        """Record the evaluation after `step`, when `samples` samples have been trained on."""
        if step == self._losses.last_step:  # repeated only to complete the result of a run that was killed
            return
        before = self._losses
        self._losses = self._losses.after(step, loss)
        if self._losses.best_step == step and self._keeps_best:
            self._checkpoints.save_kept(step, samples)
        self.ends_run = not is_last and self._losses.has_ended(self._patience)
        if self.ends_run:
            self._warn_of_end(step)
        elif self._losses.is_rising and not before.is_rising:
            message = (
                f"the held-out loss is rising: it was {self._losses.describe_best()}; checkpoint.keep_best=true keeps "
                "that checkpoint, and train.early_stop_evals=3 ends such a run"
            )
            self._journal.write(WarningEvent(step=step, message=message))

    def _warn_of_end(self, step: int, hint: str = "") -> None:
        best = self._losses.describe_best()
        evaluations = self._losses.since_best
        message = (
            f"the run ends here: the held-out loss was {best}, and has not improved in {evaluations} evaluations{hint}"
        )
        self._journal.write(WarningEvent(step=step, message=message))


# Summarise the held-out losses of a run's evaluations: which was the best, whether they are rising, and when to end the
# run.


RISES = 2
"""The loss is treated as rising after this number of consecutive evaluations, each worse than the previous one,"""
MARGIN = 1.01
"""if the last loss also exceeds the best one by this factor."""


@dataclass(frozen=True)
class HeldoutLosses:
    """A summary of the evaluations so far, which is the same on every rank."""

    best_step: int | None = None
    best_loss: float | None = None
    last_loss: float | None = None
    last_step: int | None = None
    """The step of the last evaluation."""
    since_best: int = 0
    """Number of evaluations since the best one."""
    rises: int = 0
    """Number of most recent evaluations that were each worse than the previous one."""

    def after(self, step: int, loss: float | None) -> HeldoutLosses:
        """Return the summary including the evaluation after `step`. A non-finite loss is worse than any other."""
        rises = self.rises + 1 if self.last_loss is not None and _order(loss) > self.last_loss else 0
        last = replace(self, last_loss=loss, last_step=step, rises=rises, since_best=self.since_best + 1)
        if _order(loss) < _order(self.best_loss):
            return replace(last, best_step=step, best_loss=loss, since_best=0)
        return last

    def has_ended(self, patience: int | None) -> bool:
        """Return whether to stop because none of the last `patience` evaluations improved on the best."""
        return patience is not None and self.since_best >= patience

    @property
    def is_rising(self) -> bool:
        return self.best_loss is not None and self.rises >= RISES and _order(self.last_loss) > MARGIN * self.best_loss

    def describe_best(self) -> str:
        """Return `lowest, 1.234, at step 40`, or `never finite` if no loss was finite."""
        if self.best_loss is None:
            return "never finite"
        return f"lowest, {self.best_loss:.4g}, at step {self.best_step}"


def _order(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss
