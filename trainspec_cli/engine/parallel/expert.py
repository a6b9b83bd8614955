"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back (arXiv:2006.16668)."""

from __future__ import annotations

from typing import Any

from trainspec_cli.engine.parallel.exchange import Peers
from trainspec_cli.engine.shares import Cut


def apply_expert_parallel(model: Any, peers: Peers) -> dict[str, Cut]:
    raise NotImplementedError
