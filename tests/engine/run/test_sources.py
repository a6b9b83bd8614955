"""A run is evaluated on the entire held-out split, and on nothing that it trains on."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab.engine_runs import CPU, MACHINE, fill, run_of, with_spec

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.data.corpus.bpe import decode, encode
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.rows import Row
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import HeldoutLoss, heldout_batches
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.run import sources
from trainspec_cli.engine.run.sources import SampleSource, TokenSource, WrittenSample, open_source
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, SampleSection, TokenizerSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.run.folder.event_types.events import EvalEvent, TextPart
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult

TOKENS, BATCH = 8, 3

RESULT = RunResult(status="done")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSpec:
    """Files of words that are in no other file."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    generator, folder = random.Random(0), tmp_path / "texts"
    folder.mkdir()
    for number in range(10):
        words = ("".join(generator.choices("abcdefghij", k=5)) for _ in range(12))
        (folder / f"{number:03d}.txt").write_text(" ".join(words), encoding="utf-8")
    tokenizer = TokenizerSpec(vocab_size=300)
    return DataSpec(TOKENS, "text", str(folder), tokenizer=tokenizer, heldout_fraction=0.3)


@pytest.fixture
def source(one_process: None, text: DataSpec) -> TokenSource:
    spec = RunSpec(
        model=DecoderModel(2, 32, 2, 1, 16, 48, 300),
        data=text,
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=BATCH, micro_batch_size=BATCH),
        train=TrainSection(max_steps=1),
        cluster=ClusterSpec(devices_per_node=1, device="cpu"),
    )
    made = plan(spec, MACHINE)
    torch.manual_seed(0)
    state = build_train_state(made, CPU)
    fill(state, std=0.2)
    opened = open_source(run_of(made, state, RunDir("unused")), str(prepare(text)))
    assert isinstance(opened, TokenSource)
    return opened


@torch.no_grad()
def nats_of(state: TrainState, tokens: np.ndarray) -> float:
    """The summed loss of `tokens` in windows of `TOKENS`; the last one may be shorter."""
    total = 0.0
    for start in range(0, len(tokens) - 1, TOKENS):
        window = torch.from_numpy(tokens[start : start + TOKENS + 1])
        logits_SV = state.parts[0](window[None, :-1])[0]
        total += float(torch.nn.functional.cross_entropy(logits_SV.double(), window[1:], reduction="sum"))
    return total


def test_the_held_out_loss_is_that_of_the_held_out_text(source: TokenSource) -> None:
    folder = source.collection.main
    tokens = folder.tokens("heldout", 0, folder.num_tokens("heldout"))
    nats = nats_of(source.run.state, tokens)
    figures = source.evaluate(7)
    assert figures is not None
    assert figures.heldout_loss == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert figures.heldout_bits_per_byte == pytest.approx(nats / math.log(2) / folder.num_bytes("heldout"), rel=1e-5)
    trained = folder.tokens("train", 0, len(tokens))
    assert nats_of(source.run.state, trained) != pytest.approx(nats, rel=1e-5), "the splits differ"
    assert source.summarise(RESULT, figures) == replace(
        RESULT, heldout_bits_per_byte=figures.heldout_bits_per_byte, xz_bits_per_byte=figures.xz_bits_per_byte
    )


def test_batches_are_of_the_text_to_train_on(source: TokenSource) -> None:
    folder = source.collection.main
    trained = folder.tokens("train", 0, folder.num_tokens("train"))
    windows = {tuple(trained[start : start + TOKENS]) for start in range(0, len(trained) - TOKENS, TOKENS)}
    ((tokens, targets),) = source.read(OwnSamples((0,), (BATCH,)))
    assert {tuple(row) for row in tokens.tolist()} <= windows
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    parts = source.read(OwnSamples((0, 2), (2, BATCH - 2)))
    assert torch.equal(torch.cat([part for part, _ in parts]), tokens)
    assert source.counted(np.arange(BATCH)) == BATCH * TOKENS


@pytest.mark.parametrize(("num_ranks", "batch_size"), [(1, 1), (2, 3), (3, 4)])
def test_every_held_out_row_is_read_once_over_the_ranks(text: DataSpec, num_ranks: int, batch_size: int) -> None:
    (heldout,) = Collection.open(prepare(text)).evaluation_texts(text).values()
    ranks = [list(heldout_batches(heldout.rows, batch_size, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in ranks}) == 1, "every rank takes part in equally many forwards"
    read = [tuple(row) for batches in ranks for tokens, targets in batches for row in targets.tolist()]
    counted = [row for row in read if any(target >= 0 for target in row)]
    wanted = [tuple(heldout.rows.read(index).targets.tolist()) for index in range(len(heldout.rows))]
    assert sorted(counted) == sorted(wanted)


# Images


class Pictures:
    """Each picture is one number: its index, negative where it is held out."""

    def count(self, split: str) -> int:
        return {"train": 9, "heldout": 5}[split]

    def train(self, index: int, _generator: np.random.Generator) -> Any:
        return np.full((1, 2, 2), index, dtype=np.float32), np.array(index)

    def heldout(self, index: int) -> Any:
        return np.full((1, 2, 2), -1 - index, dtype=np.float32), np.array(0)


def test_pictures_are_evaluated_on_those_that_were_held_out(one_process: None) -> None:
    seen: list[float] = []

    def judge(images: torch.Tensor, _labels: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not model.training, "by the running statistics"
        seen.extend(images[:, 0, 0, 0].tolist())
        return {"loss": images[:, 0, 0, 0].abs()}

    class Model(torch.nn.Identity):
        def judge(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return judge(images, labels)

    layout = Layout()
    spec = SimpleNamespace(data=DataSpec(1, "text"), batching=BatchingSpec(2), train=TrainSection(max_steps=1))
    made = SimpleNamespace(spec=spec, micro_batch_size=2, layout=layout)
    model = Model()
    lines = SimpleNamespace(up=torch.distributed.group.WORLD, down=torch.distributed.group.WORLD, device=CPU)
    stages = SimpleNamespace(layout=layout, parts={0: model}, lines=lines, hidden=SimpleNamespace(like=lambda _: None))
    stages.clock = StepClock(CPU)
    state = SimpleNamespace(
        device=CPU, mesh=SimpleNamespace(data_rank=0, layout=Layout()), positions_S=None, parts=[model], stages=stages
    )
    figures = SampleSource(run_of(made, state, RunDir("unused")), Pictures()).evaluate(7)  # type: ignore[arg-type]
    assert set(seen) == {-1.0, -2.0, -3.0, -4.0, -5.0}
    assert figures == EvalEvent(step=7, heldout_loss=pytest.approx(3.0))
    assert model.training


def test_pictures_are_read_by_this_ranks_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 of 12 cores with 4 ranks on the node; without torchrun all of them."""
    asked: list[Any] = []
    loader = SimpleNamespace(read=lambda own: [own], num_heldout=0)
    monkeypatch.setattr(sources, "SampleLoader", lambda *given: asked.append(given) or loader)
    monkeypatch.setattr(sources.os, "cpu_count", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    made: Any = SimpleNamespace(spec=SimpleNamespace(train=SimpleNamespace(seed=7)), micro_batch_size=2)
    run = run_of(made, SimpleNamespace(device=CPU), RunDir("unused"))
    pictures = SampleSource(run, Pictures())  # type: ignore[arg-type]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    SampleSource(run, Pictures())  # type: ignore[arg-type]
    assert [(seed, readers) for _, seed, readers in asked] == [(7, 3), (7, 12)]
    own = OwnSamples((0,), (2,))
    assert pictures.read(own) == [own]
    assert pictures.counted(np.arange(5)) == 5, "each has one label, or all its voxels count as one"
    assert pictures.summarise(RESULT, None) == RESULT
    evaluated = EvalEvent(step=7, heldout_loss=1.0, heldout_dice=0.5)
    assert pictures.summarise(RESULT, evaluated) == replace(RESULT, heldout_loss=1.0, heldout_dice=0.5)
    assert pictures.evaluate(7) is None and pictures.write_sample() is None


def test_the_kind_of_the_model_says_how_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(sources, "open_samples", lambda data, model, folder: opened.append((data, model, folder)))
    monkeypatch.setattr(sources, "SampleSource", lambda run, samples: ("pictures", run))
    monkeypatch.setattr(sources, "TokenSource", lambda run, collection: ("text", collection))
    monkeypatch.setattr(sources.Collection, "open", lambda folder: f"texts in {folder}")
    runs: Any = {
        unit: SimpleNamespace(plan=SimpleNamespace(spec=SimpleNamespace(model=SimpleNamespace(unit=unit), data="data")))
        for unit in ("samples", "tokens")
    }
    of_pictures: Any = ("pictures", runs["samples"])
    assert open_source(runs["samples"], None) == open_source(runs["samples"], "there") == of_pictures
    assert [(data, folder) for data, _, folder in opened] == [("data", None), ("data", Path("there"))]
    assert open_source(runs["tokens"], "there") == ("text", "texts in there")  # type: ignore[comparison-overlap]


def test_where_nothing_is_held_out_there_is_nothing_to_evaluate(source: TokenSource) -> None:
    bare = TokenSource(source.run, replace(source.collection, validation={}))
    bare.evaluation_texts = {}
    assert bare.evaluate(7) is None
    assert bare.summarise(RESULT, None).heldout_bits_per_byte is None


# Text that the model writes


def with_sample(source: TokenSource, **sample: Any) -> TokenSource:
    return TokenSource(with_spec(source.run, sample=SampleSection(**sample)), source.collection)


def test_a_sample_goes_on_from_the_prompt_in_the_texts_own_tokens(
    source: TokenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_sample(source, prompt="ab").write_sample() is None
    asked: list[Any] = []

    def write_text(state: TrainState, ids: list[int], **options: Any) -> list[int]:
        asked.append((ids, options))
        return encode(folder, "jihg")

    monkeypatch.setattr(sources, "write_text", write_text)
    folder = source.collection.tokenizer_folder
    assert folder is not None
    written = with_sample(source, prompt="abc", max_new_tokens=5, temperature=0.5).write_sample()
    assert written == WrittenSample("abc", "jihg")
    options = {"count": 5, "temperature": 0.5, "max_context": TOKENS, "seed": source.spec.train.seed}
    assert asked == [(encode(folder, "abc"), options)]
    with_sample(source, max_new_tokens=5).write_sample()
    assert asked[1][0] == [source.collection.main.manifest.end_of_document_id]


def test_the_first_text_is_the_sample_at_its_position(source: TokenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is trained on every token; without a tokenizer, its tokens are shown."""
    folder = source.collection.tokenizer_folder
    assert folder is not None
    (row,) = source.order.rows(np.array([2]))
    ids = [*row.tokens.tolist(), int(row.targets[-1])]
    shown = source.first_text(2)
    assert (shown.tokens, shown.trained) == (TOKENS, TOKENS)
    assert shown.parts == (TextPart(text=decode(folder, ids), trained=True),)
    monkeypatch.setattr(Collection, "tokenizer_folder", None)
    assert source.first_text(2).parts == (TextPart(text=" ".join(map(str, ids)), trained=True),)


def test_the_parts_of_a_masked_text_are_what_was_typed(source: TokenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source.collection.tokenizer_folder
    assert folder is not None
    asked, answer = encode(folder, "abc def"), encode(folder, " ghi")
    ids = np.array([*asked, *answer])
    targets = np.array([*[-1] * (len(asked) - 1), *answer])
    row = Row(ids[:-1], targets, np.zeros(len(targets), dtype=np.int64))
    monkeypatch.setattr(source, "order", SimpleNamespace(rows=lambda _: [row]))
    shown = source.first_text(0)
    assert shown.parts == (TextPart(text="abc def", trained=False), TextPart(text=" ghi", trained=True))
    assert (shown.tokens, shown.trained) == (len(ids) - 1, len(answer))


def test_without_a_tokenizer_there_is_no_text(source: TokenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collection, "tokenizer_folder", None)
    written = with_sample(source, prompt="abc", max_new_tokens=5).write_sample()
    assert written.prompt == "abc" and "data.tokenizer.path" in written.text


def test_a_chat_ends_at_the_end_of_its_turn(source: TokenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "question", lambda data, prompt: f"<user>{prompt}<assistant>")
    monkeypatch.setattr(sources, "encode_template", lambda folder, text: [len(text)])
    monkeypatch.setattr(sources, "until_special", lambda folder, ids: ids[:2])
    folder = source.collection.tokenizer_folder
    assert folder is not None
    ids = encode(folder, "jihgfedcba")
    monkeypatch.setattr(sources, "write_text", lambda state, prompt, **options: ids if prompt == [20] else [])
    written = with_sample(source, prompt="abc", max_new_tokens=5).write_sample()
    assert written == WrittenSample("abc\n", decode(folder, ids[:2]))


# Several evaluation texts


def test_the_run_is_judged_by_what_it_held_out_and_tells_of_every_set(
    source: TokenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two held-out texts of 10 and 30 tokens; the validation set `web` counts on its own."""
    losses = {"": HeldoutLoss(20.0, 10, 40), "code": HeldoutLoss(30.0, 30, 60), "web": HeldoutLoss(99.0, 11, 33)}
    texts = {name: SimpleNamespace(rows=name, bytes=loss.bytes) for name, loss in losses.items()}
    collection = SimpleNamespace(
        validation={"web": None}, parts=[1, 2], order=lambda *_: None, evaluation_texts=lambda _: texts
    )
    several = TokenSource(source.run, collection)  # type: ignore[arg-type]

    def heldout_loss(state: TrainState, rows: str, *, num_bytes: int, batch_size: int) -> HeldoutLoss:
        assert (num_bytes, batch_size) == (losses[rows].bytes, BATCH)
        return losses[rows]

    monkeypatch.setattr(sources, "heldout_loss", heldout_loss)
    figures = several.evaluate(7)
    assert figures is not None
    assert figures.heldout_loss == pytest.approx(50.0 / 40)
    assert figures.heldout_bits_per_byte == pytest.approx(50.0 / math.log(2) / 100)
    assert figures.xz_bits_per_byte is None
    assert {name: one.loss for name, one in figures.sets.items()} == {"heldout": 2.0, "code": 1.0, "web": 9.0}
    assert several.summarise(RESULT, figures).sets == figures.sets
    collection.validation = {"": None, "code": None, "web": None}
    only_validation = several.evaluate(8)
    assert only_validation is not None
    assert only_validation.heldout_loss == pytest.approx(149.0 / 51)


@pytest.mark.parametrize(("counted", "mean_over"), [(0, 1), (7, 7)])
def test_a_step_without_targets_divides_by_no_zero(source: TokenSource, counted: int, mean_over: int) -> None:
    source.order = SimpleNamespace(counted=lambda positions: counted)  # type: ignore[assignment]
    assert source.counted(np.arange(3)) == mean_over


def test_after_a_change_of_layout_a_rank_reads_its_new_part_of_a_sequence(source: TokenSource) -> None:
    own, positions = OwnSamples((7, 9), (2, 1)), torch.tensor([0, 5])
    before = source.read(own)
    state: Any = SimpleNamespace(device=CPU, positions_S=positions)
    source.run.state = state
    for part, whole in zip(source.read(own), before, strict=True):
        assert [torch.equal(held, full[:, positions]) for held, full in zip(part, whole, strict=True)] == [True, True]


def test_it_evaluates_the_model_and_the_plan_in_force(source: TokenSource, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def heldout_loss(state: Any, rows: Any, *, num_bytes: int, batch_size: int) -> HeldoutLoss:
        seen.append((state, batch_size))
        return HeldoutLoss(1.0, 1, num_bytes)

    monkeypatch.setattr(sources, "heldout_loss", heldout_loss)
    changed: Any = SimpleNamespace()
    source.run.state, source.run.plan = changed, replace(source.run.plan, micro_batch_size=1)
    source.evaluate(7)
    assert seen == [(changed, 1)]
