from __future__ import annotations

import os
import subprocess
import sys

import pytest
from lab.problems import refused
from tokenizers import Tokenizer, models

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.recipe.keys.run import TokenizerSpec


def test_it_fills_the_vocabulary_and_gives_every_text_back(tokenizer, stdlib_texts):
    assert bpe.count_vocab(tokenizer) == 600
    for text in ("é ü 漢字 🙂 \x00 \t\r\n", stdlib_texts[2]):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one():
    tokenizer = bpe.train(["to be or not to be"], vocab_size=5000)
    assert bpe.MIN_VOCAB_SIZE < bpe.count_vocab(tokenizer) < 300
    assert tokenizer.decode(tokenizer.encode("anything at all").ids) == "anything at all"


def test_text_that_spells_the_end_of_document_does_not_end_it(tokenizer):
    end = bpe.find_end_of_document(tokenizer, TokenizerSpec())
    ids = tokenizer.encode("a<|endoftext|>b").ids
    assert end not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"


def test_the_same_text_gives_the_same_tokenizer_on_any_number_of_threads():
    program = (
        "import inspect, argparse, hashlib; from trainspec_cli.data.corpus.bpe import train;"
        "lines = inspect.getsource(argparse).splitlines(keepends=True);"
        "print(hashlib.sha256(train(lines, 1000).to_str().encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True, text=True, check=True,
        ).stdout
        for threads in ("1", "2", "4")
    }  # fmt: skip
    assert len(digests) == 1


def test_a_users_file_is_read_without_its_truncation(tokenizer, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_str())
    limited = bpe.load(file)
    limited.enable_truncation(4)
    limited.enable_padding(length=4)
    limited.save(str(file))
    text = "a longer text than that"
    assert bpe.load(file).encode(text).ids == tokenizer.encode(text).ids


def test_the_end_of_document_can_be_named():
    tokenizer = bpe.train(["some text"], vocab_size=300)
    tokenizer.add_special_tokens(["<fin>"])
    spec = TokenizerSpec(path="x.json", end_of_document="<fin>")
    assert bpe.find_end_of_document(tokenizer, spec) == bpe.count_vocab(tokenizer) - 1


def test_a_tokenizer_without_a_known_end_says_which_special_tokens_it_has(tokenizer):
    spec = TokenizerSpec(path="x.json", end_of_document="<fin>")
    parts = ("x.json", "<fin>", ": <|endoftext|>", "data.tokenizer.end_of_document=")
    with refused(RecipeError, "no_end_of_document", "data.tokenizer.path", *parts):
        bpe.find_end_of_document(tokenizer, spec)


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("{}", "is not a tokenizer.json")])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RecipeError, match=message) as error:
        bpe.load(file)
    assert error.value.problems[0].path == "data.tokenizer.path"


def test_text_comes_back_from_its_tokens(stdlib_folder):
    ids = bpe.encode(stdlib_folder.path, "def f(x):\n    return x\n")
    assert 1 < len(ids) < 22
    assert bpe.decode(stdlib_folder.path, ids) == "def f(x):\n    return x\n"


def test_the_end_of_document_is_spelt_out_and_broken_bytes_are_marked(stdlib_folder):
    half_of_e_acute = bpe.encode(stdlib_folder.path, "é")[:1]
    ids = [stdlib_folder.manifest.end_of_document_id, *half_of_e_acute]
    assert bpe.decode(stdlib_folder.path, ids) == "<|endoftext|>\ufffd"


def test_long_words_are_cut_and_nothing_is_lost():
    text = "a" * 600 + " " + "b" * 255 + "  " + " " * 254 + "end"
    parts = list(bpe.cut_long_words(text))
    assert "".join(parts) == text
    assert [len(part) for part in parts] == [256, 256, 88 + 1 + 255 + 256, 3]


@pytest.mark.parametrize("ids", [[], [5], [5, 6, 0, 7, 0]])
def test_a_reply_ends_before_the_first_special_token(stdlib_folder, ids):
    assert stdlib_folder.manifest.end_of_document_id == 0
    assert bpe.until_special(stdlib_folder.path, ids) == ids[:2]


def test_a_template_may_spell_special_tokens_and_text_may_not(stdlib_folder):
    text = "a<|endoftext|>b"
    end = stdlib_folder.manifest.end_of_document_id
    assert bpe.encode_template(stdlib_folder.path, text).count(end) == 1
    assert end not in bpe.encode(stdlib_folder.path, text)
    for encode in (bpe.encode, bpe.encode_template):
        assert bpe.decode(stdlib_folder.path, encode(stdlib_folder.path, text)) == text


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    with refused(RecipeError, "bad_tokenizer", "data.tokenizer.path", "without tokens"):
        bpe.load(tmp_path / "tokenizer.json")
