"""Tables, mixtures and validation sets, as the trainer sees them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.rows import IGNORED
from trainspec_cli.data.corpus.samples import content_hash
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.data.corpus.sources import Collection
from trainspec_cli.recipe.keys.run import DataSpec, PartSpec, TokenizerSpec

pyarrow = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cache")

TEXTS = [f"document {number} says {number * number}" for number in range(60)]


@pytest.fixture
def tokenizer(tmp_path) -> TokenizerSpec:
    file = tmp_path / "tokenizer.json"
    bpe.train(TEXTS, 300).save(str(file))
    return TokenizerSpec(path=str(file))


@pytest.fixture
def files(tmp_path):
    """The same documents in every form."""
    import pyarrow.parquet

    table = pyarrow.table({"number": range(60), "text": TEXTS})
    (tmp_path / "parquet").mkdir()
    pyarrow.parquet.write_table(table.slice(0, 40), tmp_path / "parquet" / "0.parquet", row_group_size=7)
    pyarrow.parquet.write_table(table.slice(40), tmp_path / "parquet" / "1.parquet")
    (tmp_path / "arrow").mkdir()
    with pyarrow.ipc.new_stream(str(tmp_path / "arrow" / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=9)
    (tmp_path / "arrow" / "state.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return tmp_path


def tokens_of(data) -> list[int]:
    folder = TokenFolder.open(prepare(data))
    return folder.tokens("train", 0, folder.num_tokens("train")).tolist()


def test_tables_hold_what_lines_hold(files, tokenizer):
    sources = {"jsonl": files / "text.jsonl", "parquet": files / "parquet", "arrow": files / "arrow"}
    found = [tokens_of(DataSpec(8, source, str(path), tokenizer=tokenizer)) for source, path in sources.items()]
    assert found[0] == found[1] == found[2]


def test_a_column_that_is_not_there_is_told(files, tokenizer):
    with pytest.raises(RecipeError, match=r"no column `body`.*: number, text"):
        prepare(DataSpec(8, "parquet", str(files / "parquet"), text_field="body", tokenizer=tokenizer))


def test_a_run_trains_on_one_split_and_is_evaluated_on_the_other(files, tokenizer):
    data = DataSpec(8, "jsonl", str(files / "text.jsonl"), heldout_fraction=0.2, tokenizer=tokenizer)
    collection = Collection.open(prepare(data))
    (text,) = collection.evaluation_texts(data).values()
    rows = [text.rows.read(index) for index in range(len(text.rows))]
    evaluated = [target for row in rows for target in row.targets if target != IGNORED]
    windows = collection.order(data, seed=1).rows(np.arange(collection.main.num_tokens("train") // 8))
    trained = {tuple(row.tokens) for row in windows}
    assert evaluated == collection.main.tokens("heldout", 1, len(evaluated)).tolist()
    assert trained == {tuple(collection.main.tokens("train", 8 * index, 8)) for index in range(len(windows))}
    heldout, train = (documents_of(collection.main, split) for split in ("heldout", "train"))
    assert sorted(heldout + train) == sorted(TEXTS) and 1 <= len(heldout) < len(train)
    assert max(map(content_hash, heldout)) < min(map(content_hash, train))
    assert text.bytes == sum(map(len, heldout))


def documents_of(folder: TokenFolder, split) -> list[str]:
    text = bpe.decode(folder.path, folder.tokens(split, 0, folder.num_tokens(split)).tolist())
    return text.split(bpe.END_OF_DOCUMENT)[:-1]


def mixture(files, tokenizer, **options) -> DataSpec:
    parts = {
        "tables": PartSpec("parquet", str(files / "parquet"), weight=3.0),
        "lines": PartSpec("jsonl", str(files / "text.jsonl")),
    }
    return DataSpec(8, "mixture", mixture=parts, tokenizer=tokenizer, **options)


def test_a_mixture_with_validation_sets(files, tokenizer):
    data = mixture(files, tokenizer, validation={"other": PartSpec("jsonl", str(files / "text.jsonl"))})
    collection = Collection.open(prepare(data))
    assert {name: part.weight for name, part in collection.parts.items()} == {"tables": 3.0, "lines": 1.0}
    judged = collection.evaluation_texts(data)
    assert list(judged) == ["tables", "lines", "other"]
    assert judged["other"].bytes == sum(map(len, TEXTS)), "a validation set is judged whole"
    counted = sum(judged["other"].rows.counted(index) for index in range(len(judged["other"].rows)))
    whole = TokenFolder.open(next(iter(collection.validation.values())).path)
    assert counted == whole.num_tokens("train") + whole.num_tokens("heldout") - 2
    order = collection.order(data, seed=1)
    rows = order.rows(np.arange(12))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(rows[8:], order.rows(np.arange(8, 12)), strict=True))


@pytest.mark.parametrize("main", ["jsonl", "tokens"])
def test_validation_by_conversations_takes_the_template_next_to_the_tokenizer(files, tokenizer, main):
    (files / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    talk = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]}
    (files / "chat.jsonl").write_text("\n".join([json.dumps(talk)] * 3))
    data = DataSpec(32, "jsonl", str(files / "text.jsonl"), tokenizer=tokenizer)
    if main == "tokens":
        data = replace(data, source="tokens", path=str(prepare(data)))
    data = replace(data, validation={"talks": PartSpec("chat", str(files / "chat.jsonl"))})
    collection = Collection.open(prepare(data))
    folder = collection.validation["talks"]
    text = bpe.decode(folder.path, folder.tokens("train", 0, folder.num_tokens("train")).tolist())
    assert "user=1;assistant=one;" in text
    assert list(collection.evaluation_texts(data)) == ["", "talks"]


def test_parts_of_different_tokenizers_are_refused(files, tokenizer):
    own = prepare(DataSpec(8, "jsonl", str(files / "text.jsonl"), tokenizer=TokenizerSpec(280)))
    parts = {"own": PartSpec("tokens", str(own)), "lines": PartSpec("jsonl", str(files / "text.jsonl"))}
    with pytest.raises(RecipeError, match="different tokenizers"):
        prepare(DataSpec(8, "mixture", mixture=parts, tokenizer=tokenizer))


def test_ids_that_the_model_has_no_row_for_are_refused_before_it_starts(files, tokenizer):
    data = DataSpec(8, "jsonl", str(files / "text.jsonl"), tokenizer=tokenizer)
    collection = Collection.open(prepare(data))
    ids = collection.main.manifest.vocab_size
    assert collection.check(data, ids) == []
    with pytest.raises(RecipeError, match=rf" {ids} ids, .* {ids - 1} rows"):
        collection.check(data, ids - 1)


@pytest.mark.parametrize(
    "fields",
    [{"parts": {}, "validation": {}}, {"parts": []}, {"parts": {"a": {"folder": 3, "weight": 1.0}}, "validation": {}},
     {"parts": {"a": {"folder": "x", "weight": "y"}}, "validation": {}},
     {"parts": {"a": {"folder": "x", "weight": 1.0}}, "validation": {"b": 3}}],
)  # fmt: skip
def test_a_collection_that_is_damaged_is_named(tmp_path, fields):
    (tmp_path / "collection.json").write_text(json.dumps(fields))
    with refused(MachineError, "bad_token_folder", "", "collection.json", f"rm -r {tmp_path}"):
        Collection.open(tmp_path)
