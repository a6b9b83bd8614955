"""Choose what is held out, and cut long texts. Both depend on content (or names) alone, never on the order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_CHARS = 2**20
_HASHES = 2**64
_LINE_END = re.compile(r"(?<=\S)[\r\n]+(?=\S)")


def content_hash(text: str) -> int:
    """Return 64 bits that depend on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"heldout").digest(), "big")


@dataclass
class SplitScan:
    """Counts and hash range of all documents, from a first pass over them."""

    documents: int = 0
    bytes: int = 0
    """Bytes of UTF-8."""
    lowest_hash: int = _HASHES
    highest_hash: int = -1

    def add(self, text: str) -> None:
        self.documents += 1
        self.bytes += len(text.encode())
        value = content_hash(text)
        self.lowest_hash = min(self.lowest_hash, value)
        self.highest_hash = max(self.highest_hash, value)


@dataclass(frozen=True)
class HeldoutRule:
    """Hold out the documents whose hash is below `threshold`; or, if all are alike, the end of each."""

    threshold: int
    cut_fraction: float | None = None

    @classmethod
    def from_scan(cls, scan: SplitScan, fraction: float) -> HeldoutRule:
        """Hold out `fraction` of the documents, at least one and not all."""
        if scan.lowest_hash == scan.highest_hash:
            return cls(threshold=0, cut_fraction=fraction)
        threshold = round(fraction * _HASHES)
        return cls(threshold=min(max(threshold, scan.lowest_hash + 1), scan.highest_hash))

    def parts(self, text: str) -> tuple[str, str]:
        """Return the training part and the held-out part; one of them is empty unless `cut_fraction` is set."""
        if self.cut_fraction is not None:
            return _cut(text, self.cut_fraction)
        return ("", text) if content_hash(text) < self.threshold else (text, "")


def _cut(text: str, fraction: float) -> tuple[str, str]:
    """Cut off about the last `fraction`, at a line's start if there is one nearby."""
    at = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    line_start = text.rfind("\n", 0, at) + 1
    if line_start > 0 and at - line_start < len(text) * fraction:
        at = line_start
    return text[:at], text[at:]


def pieces(text: str, max_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Yield `text` in parts of about `max_chars`, cut at line ends with a visible character on both sides.

    No token of a tokenizer trained by bpe.py spans such a cut, so the parts encode to the same tokens as the whole.
    """
    start = 0
    while len(text) - start > max_chars and (found := _LINE_END.search(text, start + max_chars - 1)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def hold_out(names: Sequence[str], fraction: float) -> set[str]:
    """Choose about `fraction` of `names` by their hashes; at least one, but never all."""
    scan = SplitScan()
    for name in names:
        scan.add(name)
    threshold = HeldoutRule.from_scan(scan, fraction).threshold
    return {name for name in names if content_hash(name) < threshold}
