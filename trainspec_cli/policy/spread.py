"""Which samples of a step each replica group takes, whoever is there: a pure function of the position and the members.

A step's samples follow those of the step before it. They are cut into units, one micro-batch for every rank of a group,
and the groups that take part get units in turn, the first ones the odd ones out. So every sample is taken exactly once,
whatever died before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.spec.recipe.batching import BatchingSpec, ShrinkRule


@dataclass(frozen=True)
class Portion:
    """What one group takes of a step."""

    start: int
    """Position of its first sample in the run."""
    samples: int
    step_samples: int
    """Of all groups together."""


def take_portion(
    batching: BatchingSpec, unit_samples: int, replica_groups: int, position: int, rank: int, participants: int
) -> Portion:
    """Of the step that begins at `position`, for the group that is `rank` among `participants` of `replica_groups`."""
    units = batching.global_batch_size // unit_samples
    if batching.on_loss == "shrink":
        units = units * participants // replica_groups
    each, spare = divmod(units, participants)
    before = rank * each + min(rank, spare)
    mine = each + (rank < spare)
    return Portion(position + before * unit_samples, mine * unit_samples, units * unit_samples)


def lr_factor(rule: ShrinkRule, step_samples: int, global_batch_size: int) -> float:
    """What the learning rate is multiplied by, for a step of fewer samples."""
    share = step_samples / global_batch_size
    return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[rule]
