"""How work is spread: the sizes of the mesh axes. Their product is the world size (ep divides dp_shard x cp)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, AutoInt

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbouring ranks share the innermost axis, which needs the fastest links."""


@dataclass(frozen=True)
class LayoutSpec:
    """What the recipe asks for; `auto` is resolved by the planner."""

    dp_replicate: AutoInt = AUTO
    dp_shard: AutoInt = AUTO
    cp: AutoInt = 1
    tp: AutoInt = 1
    pp: AutoInt = 1
    ep: AutoInt = 1
    zero_stage: Literal[2, 3] = 3
    """3 frees the gathered parameters after each forward; 2 keeps them until the backward is done."""


@dataclass(frozen=True)
class Layout:
    """A resolved layout: no `auto` left."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: Literal[2, 3] = 3

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """`dp_replicate=2 tp=4`: the axes that are not 1."""
        axes = [f"{axis}={getattr(self, axis)}" for axis in (*MESH_AXES, "ep") if getattr(self, axis) > 1]
        return " ".join(axes) or "one process"
