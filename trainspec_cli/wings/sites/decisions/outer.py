"""The outer optimizer: what sites have learned, merged into the weights that all of them share.

DiLoCo (arXiv:2311.08105): the outer gradient is the shared weights minus a site's own, and the shared weights are
updated by SGD with Nesterov momentum. What is here is arithmetic: it takes numbers as well as tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KEPT_BYTES = 4 + 4
"""Bytes that a site keeps beside each parameter that it trains: the shared weights and the outer momentum in fp32."""


def outer_gradient(shared: Any, own: Any) -> Any:
    """Return what a site asks of the shared weights: they are to move against it, towards the site's own."""
    return shared - own


def outer_step(shared: Any, momentum: Any, gradient: Any, rate: float, factor: float) -> tuple[Any, Any]:
    """Return (shared weights, momentum) after an outer update by Nesterov's rule as torch's SGD has it:
    m' = factor m + g, and the weights less rate (g + factor m')."""
    momentum = momentum * factor + gradient
    return shared - (gradient + momentum * factor) * rate, momentum


def carry_over(own: Any, sent: Any, before: Any, shared: Any) -> Any:
    """Return a site's weights after the shared ones went from `before` to `shared` with its outer gradient `sent` in
    them, 0 where it was not.

    They move as the shared weights do, less what of that was the site's own. So all that was not sent stays between the
    two, and is the beginning of the next outer gradient: the steps since then, and what the encoding has lost.
    """
    return own + sent + (shared - before)


def mix(own: Any, shared: Any, keeps: float) -> Any:
    """Return a site's weights after the shared ones have come, of which its own are the part `keeps` (Streaming DiLoCo,
    arXiv:2501.18512, equation 3)."""
    return own * keeps + shared * (1 - keeps)


def site_weights(tokens: Sequence[int], steps: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each site's outer gradient; they sum to 1.

    tokens^2 / steps (Decoupled DiLoCo, arXiv:2604.21428): at equal steps a site counts by the square of its batch. A
    site that has seen nothing since it last took part counts nothing; where none has, all count alike.
    """
    worth = [seen * seen / made if made else 0.0 for seen, made in zip(tokens, steps, strict=True)]
    total = sum(worth)
    return tuple(one / total for one in worth) if total else (1 / len(worth),) * len(worth)
