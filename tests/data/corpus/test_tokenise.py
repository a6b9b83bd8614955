from __future__ import annotations

import lzma
import sys
from types import SimpleNamespace

import pytest

from trainspec_cli.data.corpus import tokenise
from trainspec_cli.data.corpus.samples import HeldoutRule
from trainspec_cli.data.corpus.source_files import find_files
from trainspec_cli.data.corpus.tokenise import XzMeter, _batches, _cut, _Piece, _read, _take_evenly


def test_it_measures_what_xz_measures_on_the_whole(stdlib_texts):
    meter = XzMeter()
    for text in stdlib_texts:
        meter.add(text.encode())
    whole = "".join(stdlib_texts).encode()
    assert meter.finish() == 8 * len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)) / len(whole)


def test_a_python_without_lzma_gives_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "lzma", None)
    meter = XzMeter()
    meter.add(b"text")
    assert meter.finish() is None


def test_a_sample_of_texts_is_spread_over_the_whole():
    texts = [str(number) * 10 for number in range(10)]
    assert list(_take_evenly(texts, 1.0)) == texts
    assert list(_take_evenly(texts, 0.5)) == texts[::2]


def test_pieces_are_encoded_in_batches_of_so_many_characters(monkeypatch):
    monkeypatch.setattr(tokenise, "BATCH_CHARS", 4)
    cut = [_Piece("train", text, False) for text in ("ab", "cd", "efghi", "j")]
    assert [[piece.text for piece in batch] for batch in _batches(cut)] == [["ab", "cd"], ["efghi"], ["j"]]


def test_the_last_piece_of_each_part_ends_a_document():
    lone = HeldoutRule(0, cut_fraction=0.5)
    long = "line\n" * 2**19 + "end"
    found = list(_cut([long], lone))
    assert "".join(piece.text for piece in found) == long
    assert [piece.ends_document for piece in found if piece.split == "train"] == [False, True]
    assert [piece.ends_document for piece in found if piece.split == "heldout"] == [False, True]


def test_progress_is_told_every_hundredth_and_at_the_end(text_data):
    told = []
    data = text_data(*("x" * 10 for _ in range(500)))
    read = _read(data, find_files(data), "encoding", 5000, lambda phase, done, _rows: told.append((phase, done)))
    assert len(list(read)) == 500
    assert {phase for phase, _ in told} == {"encoding"}
    assert 84 <= len(told) <= 102
    assert (told[0][1], told[-1][1]) == (pytest.approx(0.501), 1.0)
    assert [done for _, done in told] == sorted(done for _, done in told)


def test_a_tokenizer_learns_from_a_sample_of_much_text(text_data, monkeypatch):
    taken = []
    monkeypatch.setattr(tokenise.bpe, "train", lambda texts, *_: taken.append(sum(map(len, texts))))
    data = text_data(*("x" * 100 for _ in range(200)), heldout_fraction=0.01)
    files = find_files(data)
    rule = HeldoutRule(0)
    scan = tokenise._scan(data, files, lambda phase, done, _rows: None)
    for most in (10**9, 5_000):
        monkeypatch.setattr(tokenise, "TOKENIZER_SAMPLE_BYTES", most)
        tokenise._build_tokenizer(data, files, scan, rule, lambda phase, done, _rows: None)
    assert taken[0] == 20_000 and taken[1] == pytest.approx(5_000, abs=200)


def test_a_token_is_learnt_where_it_overlaps_a_reply():
    encoding = SimpleNamespace(offsets=[(0, 2), (2, 4), (4, 4), (4, 6), (6, 8)])
    assert tokenise._learnt([(2, 4)], encoding).tolist() == [False, True, False, False, False]
    assert tokenise._learnt([(3, 5)], encoding).tolist() == [False, True, False, True, False]
    assert tokenise._learnt([(0, 1), (7, 8)], encoding).tolist() == [True, False, False, False, True]
    assert tokenise._learnt([], encoding).tolist() == [False] * 5
