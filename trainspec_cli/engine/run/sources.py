"""Sources of the samples that a run is trained and evaluated on. The trainer accesses data only through a source."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.core.errors import WorkerError
from trainspec_cli.core.printable import cut_middle
from trainspec_cli.data.corpus.bpe import decode, decode_parts, encode, encode_template, until_special
from trainspec_cli.data.corpus.chat import question
from trainspec_cli.data.corpus.labelled import LabelledSamples, open_samples
from trainspec_cli.data.corpus.rows import first_text
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.data.corpus.user_code import OwnTokenizer, tokenizer_sha256
from trainspec_cli.engine.data.loader import SampleLoader, Staging, read_tokens, total
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.run.evaluate import heldout_loss, heldout_metrics, write_text
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.run.folder.event_types.events import EvalEvent, FirstTextEvent, SetFigures, TextPart
from trainspec_cli.run.folder.record import RunResult

MOST_PARTS, MOST_CHARS = 8, 600
"""Maximum number of parts of a sample's text to keep, and of characters in each part."""


@dataclass(frozen=True)
class WrittenSample:
    prompt: str
    text: str


class DataSource(Protocol):
    """All methods except `summarise` are called collectively by all ranks."""

    staging: Staging
    """The loader, which holds the prefetched batches."""

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        """Read the samples of `own` as micro-batches, on the host."""

    def counted(self, positions: np.ndarray) -> int:
        """Return the number of targets in the samples at `positions`. The loss is the mean over them."""

    def evaluate(self, step: int) -> EvalEvent | None:
        """Evaluate the model on held-out samples after update `step`; None if no samples are held out."""

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        """Return `result` with the values of the last `evaluate`."""

    def write_sample(self) -> WrittenSample | None:
        """Continue the recipe's prompt; None if the recipe has no prompt."""

    def first_text(self, position: int) -> FirstTextEvent | None:
        """Return the text of the sample at `position` with the mask of its trained tokens; None if samples are not
        text. Called by one rank."""


def open_source(run: TrainingRun, folder: str | None) -> DataSource:
    """Open the run's data in `folder` (phantoms have no folder)."""
    spec = run.plan.spec
    if spec.model.unit == "samples":
        return SampleSource(run, open_samples(spec.data, spec.model, Path(folder) if folder else None))
    assert folder is not None, "token data is in a folder"
    return TokenSource(run, Collection.open(folder))


class TokenSource:
    """Text stored as token shards; evaluated in bits per byte, compared with xz."""

    def __init__(self, run: TrainingRun, collection: Collection):
        self.run = run
        self.spec = run.plan.spec
        self.collection = collection
        self.order = collection.order(self.spec.data, self.spec.train.seed)
        self.evaluation_texts = collection.evaluation_texts(self.spec.data)
        self.staging = Staging(run.state.device)

    def counted(self, positions: np.ndarray) -> int:
        return max(1, self.order.counted(positions))

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        return read_tokens(self.order, own, self.run.state.positions_S)

    def evaluate(self, step: int) -> EvalEvent | None:
        """Return the loss on all text held out from the training sets or, if there is none, on the validation sets.
        Also return the loss on each set."""
        size = self.run.plan.micro_batch_size
        losses = {
            name: heldout_loss(self.run.state, text.rows, num_bytes=text.bytes, batch_size=size)
            for name, text in self.evaluation_texts.items()
        }
        if not losses:
            return None
        held_out = [loss for name, loss in losses.items() if name not in self.collection.validation]
        whole = total(held_out or list(losses.values()))
        sets = {
            name: SetFigures(loss=one.nats_per_token, bits_per_byte=one.bits_per_byte) for name, one in losses.items()
        }
        return EvalEvent(
            step=step,
            heldout_loss=whole.nats_per_token,
            heldout_bits_per_byte=whole.bits_per_byte,
            xz_bits_per_byte=self._xz,
            sets={name or "heldout": figures for name, figures in sets.items()} if len(sets) > 1 else ABSENT,
        )

    @property
    def _xz(self) -> float | None:
        """Return the bits per byte of the held-out text compressed with xz, if there is only one text."""
        return self.collection.main.manifest.xz_bits_per_byte if len(self.collection.parts) == 1 else None

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        bits = evaluated.heldout_bits_per_byte if evaluated else None
        sets = evaluated.sets if evaluated else ABSENT
        return replace(result, heldout_bits_per_byte=bits, xz_bits_per_byte=self._xz, sets=sets)

    def write_sample(self) -> WrittenSample | None:
        sample = self.spec.sample
        if not sample.max_new_tokens:
            return None
        if self.spec.data.tokenizer.code:
            made_by = self.collection.main.manifest.own_tokenizer_sha256
            if made_by != tokenizer_sha256(self.spec.data):
                return WrittenSample(sample.prompt, "(data.tokenizer.code is not the tokenizer that produced the data)")
            own = OwnTokenizer(self.spec.data, WorkerError)
            return WrittenSample(sample.prompt, own.decode(self._continue(own.encode(sample.prompt))))
        folder = self.collection.tokenizer_folder
        if folder is None:
            return WrittenSample(sample.prompt, "(no tokenizer: set data.tokenizer.path)")
        asked = question(self.spec.data, sample.prompt)
        if asked is None:
            return WrittenSample(sample.prompt, decode(folder, self._continue(encode(folder, sample.prompt))))
        ids = self._continue(encode_template(folder, asked))
        return WrittenSample(f"{sample.prompt}\n", decode(folder, until_special(folder, ids)))

    def first_text(self, position: int) -> FirstTextEvent:
        (row,) = self.order.rows(np.array([position]))
        ids, learnt = first_text(row)
        cuts = [0, *(np.flatnonzero(np.diff(learnt)) + 1)[: MOST_PARTS - 1].tolist(), len(ids)]
        parts = [ids[start:end].tolist() for start, end in pairwise(cuts)]
        folder = self.collection.tokenizer_folder
        if folder is None or self.spec.data.tokenizer.code:  # user-defined tokenizers run only when text is generated
            texts = [" ".join(map(str, part)) for part in parts]
        else:
            texts = decode_parts(folder, parts)
        shown = zip(texts, learnt[cuts[:-1]].tolist(), strict=True)
        return FirstTextEvent(
            step=0,
            tokens=len(ids) - 1,
            trained=int(learnt[1:].sum()),
            parts=tuple(TextPart(text=cut_middle(text, MOST_CHARS), trained=trained) for text, trained in shown),
        )

    def _continue(self, prompt_ids: list[int]) -> list[int]:
        """Return the tokens that the model generates after a prompt."""
        return write_text(
            self.run.state,
            prompt_ids or [self.collection.main.manifest.end_of_document_id],
            count=self.spec.sample.max_new_tokens,
            temperature=self.spec.sample.temperature,
            max_context=self.spec.data.seq_len,
            seed=self.spec.train.seed,
        )


class SampleSource:
    """Images or volumes with labels, evaluated by accuracy or Dice."""

    def __init__(self, run: TrainingRun, samples: LabelledSamples):
        self.run = run
        self.staging = Staging(run.state.device)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.loader = SampleLoader(samples, run.plan.spec.train.seed, (os.cpu_count() or 1) // processes)

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        return self.loader.read(own)

    def counted(self, positions: np.ndarray) -> int:
        return len(positions)

    def evaluate(self, step: int) -> EvalEvent | None:
        means = heldout_metrics(self.run.state, self.loader, batch_size=self.run.plan.micro_batch_size)
        if means is None:
            return None
        accuracy = means.get("accuracy", ABSENT)
        dice = means.get("dice", ABSENT)
        return EvalEvent(step=step, heldout_loss=means["loss"], heldout_accuracy=accuracy, heldout_dice=dice)

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        if evaluated is None:
            return result
        loss = evaluated.heldout_loss
        accuracy = evaluated.heldout_accuracy
        dice = evaluated.heldout_dice
        return replace(result, heldout_loss=loss, heldout_accuracy=accuracy, heldout_dice=dice)

    def write_sample(self) -> WrittenSample | None:
        return None

    def first_text(self, position: int) -> None:
        return None
