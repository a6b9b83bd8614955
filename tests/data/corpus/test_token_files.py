"""Token files of others: the ids that their own readers would see."""

import struct

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

pytestmark = pytest.mark.usefixtures("cache")


def open_data(source, path, **options) -> TokenFolder:
    return TokenFolder.open(prepare(DataSpec(8, source, str(path), **options)))


def everything(folder: TokenFolder, split) -> list[int]:
    return folder.tokens(split, 0, folder.num_tokens(split)).tolist()


def write_megatron(name, documents, code=4, dtype="<i4"):
    lengths = np.array([len(document) for document in documents], dtype="<i4")
    pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    bounds = np.arange(len(documents) + 1, dtype="<i8")
    name.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    name.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())


def test_nanogpts_folder(tmp_path):
    np.arange(1000, 1200, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    folder = open_data("nanogpt", tmp_path)
    assert everything(folder, "train") == list(range(1000, 1200))
    assert everything(folder, "heldout") == list(range(50))


def test_of_a_file_alone_the_end_is_held_out(tmp_path):
    ids = np.arange(200, dtype="<u2")
    ids.tofile(tmp_path / "all.bin")
    folder = open_data("nanogpt", tmp_path / "all.bin", heldout_fraction=0.1)
    assert (everything(folder, "train"), everything(folder, "heldout")) == (list(range(180)), list(range(180, 200)))


def test_the_header_of_llmc_is_passed_over(tmp_path):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 30
    (tmp_path / "train.bin").write_bytes(header.tobytes() + np.arange(30, dtype="<u2").tobytes())
    (tmp_path / "val.bin").write_bytes(header.tobytes() + np.arange(20, dtype="<u2").tobytes())
    assert everything(open_data("nanogpt", tmp_path), "train") == list(range(30))


@pytest.mark.parametrize(("code", "dtype"), [(4, "<i4"), (8, "<u2")])
def test_megatrons_files_are_cut_between_documents(tmp_path, code, dtype):
    documents = [np.arange(start, start + 10) for start in range(0, 100, 10)]
    write_megatron(tmp_path / "text", documents, code, dtype)
    folder = open_data("megatron", tmp_path, heldout_fraction=0.25)
    assert everything(folder, "train") == list(range(80))
    assert everything(folder, "heldout") == list(range(80, 100))


def test_of_megatrons_documents_one_at_least_is_held_out(tmp_path):
    write_megatron(tmp_path / "text", [np.arange(start, start + 10) for start in range(0, 30, 10)])
    folder = open_data("megatron", tmp_path, heldout_fraction=0.001)
    assert (everything(folder, "train"), everything(folder, "heldout")) == (list(range(20)), list(range(20, 30)))


def test_files_that_are_not_whole_are_named(tmp_path):
    write_megatron(tmp_path / "text", [np.arange(10), np.arange(10)])
    (tmp_path / "text.bin").write_bytes(b"1234")
    with refused(MachineError, "bad_token_file", "", "text.bin", " 4 bytes", "20 uint32 ids"):
        open_data("megatron", tmp_path)
    (tmp_path / "text.idx").write_bytes(b"something else, and longer than a header is")
    with refused(MachineError, "bad_token_file", "", "text.idx"):
        open_data("megatron", tmp_path)
    (tmp_path / "text.idx").unlink()
    with refused(RecipeError, "missing_file", "data.path", "text.idx"):
        open_data("megatron", tmp_path)
    (tmp_path / "text.bin").write_bytes(b"123")
    with refused(MachineError, "bad_token_file", "", " 3 bytes", "uint16"):
        open_data("nanogpt", tmp_path)


def test_the_tokenizer_that_is_named_goes_with_the_ids(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    np.arange(200, dtype="<u2").tofile(tmp_path / "train.bin")
    spec = TokenizerSpec(path=str(tmp_path / "tokenizer.json"))
    named = open_data("nanogpt", tmp_path / "train.bin", tokenizer=spec)
    manifest = named.manifest
    assert (manifest.vocab_size, manifest.vocab_size_asked, manifest.tokenizer_sha256) == (
        bpe.count_vocab(tokenizer), bpe.count_vocab(tokenizer), bpe.digest(tokenizer),
    )  # fmt: skip
    assert manifest.end_of_document_id == tokenizer.token_to_id("<|endoftext|>")
    assert bpe.decode(named.path, bpe.encode(named.path, "def f")) == "def f"
    plain = open_data("nanogpt", tmp_path / "train.bin").manifest
    assert (plain.vocab_size, plain.end_of_document_id, plain.tokenizer_sha256) == (0, -1, "")


def test_all_files_but_the_held_out_one_are_trained_on(tmp_path):
    for number in range(3):
        np.arange(100 * number, 100 * number + 40, dtype="<u2").tofile(tmp_path / f"part{number}.bin")
    folder = open_data("nanogpt", tmp_path, heldout_fraction=0.25)
    assert everything(folder, "train") == [*range(40), *range(100, 140), *range(200, 230)]
    assert everything(folder, "heldout") == list(range(230, 240))
    for number in range(3):
        (tmp_path / f"part{number}.bin").rename(tmp_path / f"val{number}.bin")
    with refused(RecipeError, "missing_file", "data.path", "to train on"):
        open_data("nanogpt", tmp_path)


def test_the_end_of_megatrons_last_file_is_held_out(tmp_path):
    for number in range(2):
        documents = [np.arange(start, start + 10) for start in range(100 * number, 100 * number + 40, 10)]
        write_megatron(tmp_path / f"text{number}", documents)
    folder = open_data("megatron", tmp_path, heldout_fraction=0.5)
    assert everything(folder, "train") == [*range(40), *range(100, 120)]
    assert everything(folder, "heldout") == list(range(120, 140))
    write_megatron(tmp_path / "text2", [np.arange(10), np.arange(10)], 8, "<u2")
    with refused(RecipeError, "unsupported", "data.path", "(uint16, uint32)"):
        open_data("megatron", tmp_path)


@pytest.mark.parametrize(
    ("lengths", "bounds", "why"),
    [
        ([10, -1], [0, 1, 2], "a length below 0"),
        ([10, 10], [0, 2, 1], "not contiguous"),
        ([10, 10], [0, -2, 2], "not contiguous"),
        ([20], [0, 1], "not contiguous"),
        ([10, 10], [0, 1, 3], ""),
    ],
)
def test_an_index_whose_documents_cannot_be_is_refused(tmp_path, lengths, bounds, why):
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(bounds))
    pointers = np.zeros(len(lengths), dtype="<i8")
    parts = (np.array(lengths, dtype="<i4"), pointers, np.array(bounds, dtype="<i8"))
    (tmp_path / "text.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    np.arange(20, dtype="<i4").tofile(tmp_path / "text.bin")
    with refused(MachineError, "bad_token_file", "", "text.idx", why):
        open_data("megatron", tmp_path)


@pytest.mark.parametrize(("version", "code"), [(2, 4), (1, 9)])
def test_an_index_of_another_version_or_type_is_refused(tmp_path, version, code):
    write_megatron(tmp_path / "text", [np.arange(10), np.arange(10)])
    content = (tmp_path / "text.idx").read_bytes()
    (tmp_path / "text.idx").write_bytes(content[:9] + struct.pack("<QB", version, code) + content[18:])
    with refused(MachineError, "bad_token_file", "", "text.idx", f"version {version}, type {code}"):
        open_data("megatron", tmp_path)
