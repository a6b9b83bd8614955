from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus.bpe import MIN_VOCAB_SIZE, decode
from trainspec_cli.data.corpus.prepare import check_options, prepare
from trainspec_cli.data.corpus.shards import TokenFolder
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

END = "<|endoftext|>"
POEMS = [
    f"Poem {number}\n\tRoses are red,\r\n  violets are blué {number * 7919 % 1000};\n\n\nend 🙂" for number in range(60)
]


def text_of(folder: TokenFolder, split: str) -> str:
    return decode(folder.path, folder.tokens(split, 0, folder.num_tokens(split)).tolist())


def test_the_shards_decode_to_every_document_once(cache, text_data):
    folder = TokenFolder.open(prepare(text_data(*POEMS, heldout_fraction=0.2)))
    folder.verify()
    by_split = {split: text_of(folder, split).split(END)[:-1] for split in ("train", "heldout")}
    assert sorted(by_split["train"] + by_split["heldout"]) == sorted(POEMS)
    for split, texts in by_split.items():
        summary = folder.manifest.split(split)
        assert len(texts) == summary.documents >= 5
        assert sum(len(text.encode()) for text in texts) == summary.bytes == folder.num_bytes(split)


def test_the_manifest_tells_what_there_is(stdlib_folder):
    manifest = stdlib_folder.manifest
    assert (manifest.vocab_size, manifest.vocab_size_asked, manifest.dtype) == (600, 600, "uint16")
    assert manifest.train.bytes + manifest.heldout.bytes == 300_000
    assert manifest.source["python"] == ".".join(map(str, sys.version_info[:3]))
    assert 2 < manifest.bytes_per_token < 4
    assert 1 < manifest.xz_bits_per_byte < 4
    assert stdlib_folder.tokens("train", 0, stdlib_folder.num_tokens("train")).max() < 600


def test_a_small_text_gets_a_smaller_vocabulary_and_the_manifest_says_so(cache, text_data):
    manifest = TokenFolder.open(prepare(text_data(*POEMS, tokenizer=TokenizerSpec(vocab_size=5000)))).manifest
    assert 257 < manifest.vocab_size < manifest.vocab_size_asked == 5000


def test_a_lone_document_gives_both_splits(cache, text_data):
    text = "".join(f"line {number}\n" for number in range(500))
    folder = TokenFolder.open(prepare(text_data(text, heldout_fraction=0.1)))
    assert text_of(folder, "train").removesuffix(END) + text_of(folder, "heldout").removesuffix(END) == text


def test_it_is_made_once_and_made_anew_when_the_text_changes(cache, text_data):
    phases = []
    data = text_data(*POEMS)
    first = prepare(data, lambda phase, done, rows: phases.append(phase))
    assert phases
    phases.clear()
    assert prepare(data, lambda phase, done, rows: phases.append(phase)) == first and not phases
    Path(data.path, "000.txt").write_text("another poem")
    assert prepare(data) != first


def test_progress_rises_from_0_to_1_through_named_phases(cache, text_data):
    seen = []
    prepare(text_data(*POEMS), lambda phase, done, rows: seen.append((phase, done)))
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert (seen[0][1], seen[-1][1]) == (pytest.approx(0.0, abs=0.01), 1.0)
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["reading", "learning the tokenizer", "encoding"]


def test_the_users_tokenizer_is_used(cache, text_data, stdlib_folder):
    own = str(stdlib_folder.path / "tokenizer.json")
    data = text_data(*POEMS, tokenizer=TokenizerSpec(vocab_size=9999, path=own))
    folder = TokenFolder.open(prepare(data))
    assert folder.manifest.vocab_size == folder.manifest.vocab_size_asked == 600
    assert folder.manifest.tokenizer_sha256 == stdlib_folder.manifest.tokenizer_sha256
    assert "violets" in text_of(folder, "train")


def test_jsonl_and_text_of_the_same_documents_give_the_same_tokens(cache, text_data, tmp_path):
    lines = [json.dumps({"body": poem}) for poem in POEMS]
    (tmp_path / "poems.jsonl").write_text("\n".join(lines))
    as_text = text_data(*POEMS)
    as_jsonl = replace(as_text, source="jsonl", path=str(tmp_path / "poems.jsonl"), text_field="body")
    first, second = (TokenFolder.open(prepare(data)).manifest for data in (as_text, as_jsonl))
    assert (first.train, first.heldout) == (second.train, second.heldout)


def test_a_token_folder_is_checked_and_given_back(stdlib_folder):
    data = DataSpec(seq_len=64, source="tokens", path=str(stdlib_folder.path))
    assert prepare(data) == stdlib_folder.path
    (stdlib_folder.path / "train_00000.bin").unlink()
    with pytest.raises(MachineError, match="is missing"):
        prepare(data)


@pytest.mark.parametrize("path", [None, "/nowhere/at/all"])
def test_a_missing_token_folder_is_the_recipes_fault(path):
    with pytest.raises(RecipeError) as error:
        prepare(DataSpec(seq_len=64, source="tokens", path=path))
    assert error.value.problems[0].code == "missing_file"


def test_text_shorter_than_a_sample_is_refused(cache, text_data):
    with refused(RecipeError, "too_little_data", "data.seq_len", "training tokens", "512"):
        prepare(text_data("a few words", "and more", seq_len=512))


def test_empty_text_is_refused(cache, text_data):
    with refused(RecipeError, "empty_data", "data.path", "(2 files"):
        prepare(text_data("", ""))
    assert not list(cache.iterdir())


def test_a_missing_tokenizer_file_is_told_before_any_reading(cache, text_data):
    with refused(RecipeError, "missing_file", "data.tokenizer.path", "gone.json"):
        prepare(text_data("text", tokenizer=TokenizerSpec(path="gone.json")))


PROGRAM = """
import os, resource, signal, sys
from trainspec_cli.data.corpus.prepare import prepare
from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

def on_progress(phase, done, rows):
    if sys.argv[1] == "die" and phase == "encoding":
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
data = DataSpec(64, "python_stdlib", max_bytes=300_000, tokenizer=TokenizerSpec(600), heldout_fraction=0.1)
try:
    print(prepare(data, on_progress))
except TrainspecError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def start(mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_end_with_one_folder(cache):
    both = [start("live"), start("live")]
    answers = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert answers == {str(entry) for entry in cache.iterdir()} and len(answers) == 1
    TokenFolder.open(answers.pop()).verify()


def test_a_process_killed_midway_leaves_no_folder_that_passes_for_whole(cache):
    assert start("die").wait() == -9
    (left,) = cache.iterdir()
    assert left.name.startswith(".trainspec-")
    survivor = start("live")
    answer = survivor.communicate()[0].strip()
    assert list(cache.iterdir()) == [Path(answer)]
    TokenFolder.open(answer).verify()


def test_a_write_that_fails_ends_with_exit_code_4_and_nothing_left(cache):
    limited = start("limit")
    assert "cannot write" in limited.communicate()[0]
    assert limited.returncode == 4
    assert not list(cache.iterdir())


def test_reading_and_writing_tokens_needs_no_torch(cache):
    program = PROGRAM + "\nassert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program, "live"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("size", "is_enough"), [(MIN_VOCAB_SIZE - 1, False), (MIN_VOCAB_SIZE, True)])
def test_bytes_and_the_end_of_document_need_their_entries(text_data, size, is_enough):
    data = text_data("text", tokenizer=TokenizerSpec(vocab_size=size))
    if is_enough:
        check_options(data)
        return
    with refused(RecipeError, "out_of_range", "data.tokenizer.vocab_size", " 256", " 257"):
        check_options(data)


def test_every_wrong_option_is_told_at_once(text_data, tmp_path):
    wrong = text_data("text", heldout_fraction=1.0, max_bytes=0, tokenizer=TokenizerSpec(9, str(tmp_path / "no.json")))
    with pytest.raises(RecipeError) as raised:
        check_options(wrong)
    paths = ["data.heldout_fraction", "data.max_bytes", "data.tokenizer.path"]
    assert [problem.path for problem in raised.value.problems] == paths
    check_options(replace(wrong, heldout_fraction=0.999, max_bytes=1, tokenizer=TokenizerSpec()))
