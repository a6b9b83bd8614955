"""Links between ranks as a run has measured them: what the workers report, and what decisions are made of."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.records import Count, Rate


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Ranks that exchange along an axis; of a pipeline (`pp`), two neighbours."""

    axis: str
    ranks: tuple[Count, ...]
    bytes_per_s: Rate
    """Rate at which each of them sends, waiting left out."""
    noise: Rate
    """The samples' standard deviation, as a fraction."""
    sent_bytes: Rate
    """Bytes that a rank sends in one exchange."""
