"""A tokenizer of one's own prepares text as others do, and what it gives is checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus.prepare import cached_folder, prepare_into
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.data.corpus.sources import check_tokenizers
from trainspec_cli.data.corpus.user_code import OwnTokenizer, tokenizer_sha256
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

CODE = """
class Bytes:
    end_of_document = 256

    def __init__(self, shift=0):
        self.shift, self.vocab_size = shift, 257
    def encode(self, text):
        return [(byte + self.shift) % 256 for byte in text.encode()]
    def decode(self, ids):
        return bytes((one - self.shift) % 256 for one in ids if one < 256).decode(errors="replace")
"""


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    """Two documents, and a tokenizer of bytes."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(2):
        (texts / f"{number}.txt").write_text(f"Text {number}, and more of it. " * 40)
    (tmp_path / "mine.py").write_text(CODE)
    tokenizer = TokenizerSpec(code=f"{tmp_path}/mine.py:Bytes", options={"shift": 3})
    return DataSpec(seq_len=8, source="text", path=str(texts), tokenizer=tokenizer)


def test_text_is_prepared_with_a_tokenizer_of_ones_own(data: DataSpec, tmp_path: Path) -> None:
    prepare_into(data, tmp_path / "made")
    folder = TokenFolder.open(tmp_path / "made")
    folder.verify()
    assert (folder.manifest.vocab_size, folder.manifest.end_of_document_id) == (257, 256)
    assert (folder.manifest.tokenizer_sha256, folder.manifest.own_tokenizer_sha256) == ("", tokenizer_sha256(data))
    ids = folder.tokens("train", 0, 30)
    assert OwnTokenizer(data).decode(ids.tolist()).startswith("Text ")
    tokens = [folder.num_tokens(split) for split in ("train", "heldout")]
    documents = folder.manifest.train.documents + folder.manifest.heldout.documents
    assert folder.manifest.train.bytes + folder.manifest.heldout.bytes == sum(tokens) - documents
    assert np.count_nonzero(folder.tokens("train", 0, tokens[0]) == 256) == folder.manifest.train.documents


def test_other_code_and_other_options_are_other_tokenizers(data: DataSpec, tmp_path: Path) -> None:
    other = replace(data, tokenizer=replace(data.tokenizer, options={}))
    prepare_into(data, tmp_path / "made")
    prepare_into(other, tmp_path / "other")
    check_tokenizers([tmp_path / "made", tmp_path / "made"])
    with pytest.raises(RecipeError, match="different tokenizers"):
        check_tokenizers([tmp_path / "made", tmp_path / "other"])
    before = cached_folder(data, [])
    assert cached_folder(other, []) != before
    (tmp_path / "mine.py").write_text(CODE + "\n")
    assert cached_folder(data, []) != before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Bytes.encode = lambda self, text: [300]", "the id 300, "),
        ("Bytes.encode = lambda self, text: text", "raised ValueError: "),
        ("Bytes.decode = lambda self, ids: ids", "decodes to list; "),
        ("Bytes.end_of_document = 257", "257 as `end_of_document`; "),
        ("del Bytes.end_of_document", "has no `end_of_document`"),
        ("Bytes.__init__ = lambda self, shift: None", "has no `vocab_size`"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_told_before_text_is_read(
    data: DataSpec, tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / f"mine{abs(hash(line))}.py"
    file.write_text(f"{CODE}\n{line}\n")
    wrong = replace(data, tokenizer=replace(data.tokenizer, code=f"{file}:Bytes"))
    with pytest.raises(RecipeError) as raised:
        OwnTokenizer(wrong)
    assert words in raised.value.problems[0].message
