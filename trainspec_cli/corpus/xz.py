"""The yardstick: how well a general compressor predicts the held-out text."""

from __future__ import annotations


class XzMeter:
    """Compresses text as it comes with `xz -9e`, keeping only the sizes."""

    def __init__(self) -> None:
        try:
            import lzma
        except ImportError:  # a Python built without liblzma; the manifest says so by a null
            self._compressor = None
        else:
            self._compressor = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
        self._text_bytes = self._xz_bytes = 0

    def add(self, text: bytes) -> None:
        if self._compressor is not None:
            self._text_bytes += len(text)
            self._xz_bytes += len(self._compressor.compress(text))

    def finish(self) -> float | None:
        """Bits per byte of all that was added; None where Python lacks lzma or nothing was added."""
        if self._compressor is None or not self._text_bytes:
            return None
        self._xz_bytes += len(self._compressor.flush())
        return 8 * self._xz_bytes / self._text_bytes
