from __future__ import annotations

import random

import pytest

from trainspec_cli.data.corpus.samples import HeldoutRule, SplitScan, content_hash, hold_out, pieces


def rule_for(texts: list[str], fraction: float) -> HeldoutRule:
    scan = SplitScan()
    for text in texts:
        scan.add(text)
    return HeldoutRule.from_scan(scan, fraction)


def heldout_of(texts: list[str], fraction: float) -> set[str]:
    rule = rule_for(texts, fraction)
    return {text for text in texts if rule.parts(text)[1]}


def test_a_document_falls_on_the_same_side_whatever_comes_beside_it():
    texts = [f"document {number}" for number in range(2000)]
    few, many = heldout_of(texts[:1000], 0.1), heldout_of(texts[::-1], 0.1)
    assert few == many & set(texts[:1000])
    assert 150 < len(many) < 250


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_each_side_gets_at_least_one_document(fraction, count):
    texts = [f"document {number}" for number in range(count)]
    assert 1 <= len(heldout_of(texts, fraction)) <= count - 1


def test_a_lone_line_is_cut_where_it_must_be():
    assert rule_for(["0123456789"], 0.2).parts("0123456789") == ("01234567", "89")


def test_copies_of_one_document_are_all_cut():
    texts = ["0123456789"] * 3
    assert [rule_for(texts, 0.2).parts(text) for text in texts] == [("01234567", "89")] * 3


def test_the_hash_depends_on_the_text_alone():
    assert content_hash("def f(): pass") == 13566369086002471617
    assert content_hash("a") != content_hash("b")


def test_pieces_join_to_the_text_and_stay_small():
    text = "".join(f"line {number}\n" for number in range(5000))
    cut = list(pieces(text, max_chars=1000))
    assert "".join(cut) == text
    assert all(1000 <= len(piece) < 1010 for piece in cut[:-1]) and len(cut[-1]) <= 1000


def test_pieces_encode_to_the_tokens_of_the_whole(tokenizer, stdlib_texts):
    longest = max(stdlib_texts, key=len)
    for text in (longest, longest.replace("\n", "\r\n"), random_text(20_000)):
        whole = tokenizer.encode(text).ids
        cut = list(pieces(text, max_chars=50))
        assert len(cut) > 10
        assert [token for piece in cut for token in tokenizer.encode(piece).ids] == whole


def random_text(num_chars: int) -> str:
    return "".join(random.Random(0).choices("aéZ19 .(;\t\n\n\r_ ", k=num_chars))


def test_a_text_without_line_ends_stays_whole():
    assert list(pieces("x" * 1000, max_chars=10)) == ["x" * 1000]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ab\ncd\nef", ["ab\n", "cd\n", "ef"]),
        ("ab\n\n cd\nef", ["ab\n\n cd\n", "ef"]),
        ("ab\r\n\r\ncd", ["ab\r\n\r\n", "cd"]),
        ("ab\n", ["ab\n"]),
        ("ab", ["ab"]),
        ("", [""]),
    ],
)
def test_pieces_are_cut_after_line_ends_between_visible_characters(text: str, parts: list[str]) -> None:
    assert list(pieces(text, max_chars=2)) == parts


def test_a_scan_counts_documents_bytes_and_hashes() -> None:
    scan = SplitScan()
    for text in ("é", "ab", "c"):
        scan.add(text)
    hashes = [content_hash(text) for text in ("é", "ab", "c")]
    assert (scan.documents, scan.bytes) == (3, 5)
    assert (scan.lowest_hash, scan.highest_hash) == (min(hashes), max(hashes))


@pytest.mark.parametrize(
    ("text", "fraction", "parts"),
    [
        ("ab", 0.001, ("a", "b")),
        ("ab", 0.999, ("a", "b")),
        ("aaaa\nbbbbb", 0.5, ("aaaa\n", "bbbbb")),
        ("aa\nbbbbbbb", 0.3, ("aa\nbbbb", "bbb")),
    ],
)
def test_a_lone_text_is_cut_at_a_line_no_farther_than_what_is_held_out(text, fraction, parts) -> None:
    assert rule_for([text], fraction).parts(text) == parts


def test_names_are_held_out_by_their_hash_alone() -> None:
    names = [f"case{number}" for number in range(200)]
    held = hold_out(names, 0.25)
    assert held == {name for name in names if content_hash(name) < 2**64 // 4}
    assert hold_out(list(reversed(names)), 0.25) == held
    assert len(hold_out(["a", "b"], 1e-9)) == len(hold_out(["a", "b"], 1 - 1e-9)) == 1
