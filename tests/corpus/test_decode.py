from __future__ import annotations

from trainspec_cli.corpus.decode import decode, encode


def test_text_comes_back_from_its_tokens(stdlib_folder):
    ids = encode(stdlib_folder.path, "def f(x):\n    return x\n")
    assert 1 < len(ids) < 22
    assert decode(stdlib_folder.path, ids) == "def f(x):\n    return x\n"


def test_the_end_of_document_is_spelt_out_and_broken_bytes_are_marked(stdlib_folder):
    half_of_e_acute = encode(stdlib_folder.path, "é")[:1]
    ids = [stdlib_folder.manifest.end_of_document_id, *half_of_e_acute]
    assert decode(stdlib_folder.path, ids) == "<|endoftext|>\ufffd"
