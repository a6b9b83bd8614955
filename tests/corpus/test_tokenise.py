from __future__ import annotations

import lzma
import sys

from trainspec_cli.corpus.tokenise import XzMeter


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
