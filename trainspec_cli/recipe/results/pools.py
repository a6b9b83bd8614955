"""A plan over pools of unlike nodes beside the plans on some of them."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.keys.layout import Layout


@dataclass(frozen=True)
class PoolChoice:
    """The best plan on some of the pools."""

    pools: tuple[str, ...]
    devices: int
    division: str
    """`samples`: every pool has whole replicas, which share a step's samples by speed. `layers`: pipelines go through
    the pools, whose stages have layers by speed. `alone`: one pool."""
    layout: Layout | None
    """None where nothing fits."""
    step_time_s: float | None
    tokens_per_s: float | None
    """Samples, for a model of images."""
    wall_time_s: float | None
    """Of the whole run, failures included."""
    usd_per_token: float | None
    """None where a price is not known."""
    joules_per_token: float | None
    """None where the power of an accelerator is not known."""


@dataclass(frozen=True)
class PoolsPlan:
    """The plan on all pools beside those on fewer."""

    choices: tuple[PoolChoice, ...]
    """On all pools first."""
    verdict: str
    """Whether leaving pools out is faster, or cheaper for each token."""
