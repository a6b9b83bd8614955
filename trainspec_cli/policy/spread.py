"""Divide a step's samples among the replica groups that take part: a pure function of position and membership.

A step's samples follow those of the step before it. They are cut into units, one micro-batch for every rank of a
replica group, and spread evenly over the groups, spare units to the first ones. So every sample is used exactly once,
whatever failed before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.spec.recipe.batching import BatchingSpec, ShrinkRule


@dataclass(frozen=True)
class Portion:
    """The samples of one replica group in a step."""

    start: int
    """The position of its first sample in the run."""
    samples: int
    step_samples: int
    """Samples of all replica groups together."""


def take_portion(
    batching: BatchingSpec, unit_samples: int, replica_groups: int, position: int, rank: int, participants: int
) -> Portion:
    """Return the portion, of the step that begins at `position`, of group number `rank` of `participants`."""
    units = batching.global_batch_size // unit_samples
    if batching.on_loss == "shrink":
        units = units * participants // replica_groups
    each, spare = divmod(units, participants)
    before = rank * each + min(rank, spare)
    mine = each + (rank < spare)
    return Portion(position + before * unit_samples, mine * unit_samples, units * unit_samples)


def lr_factor(rule: ShrinkRule, step_samples: int, global_batch_size: int) -> float:
    """Return the factor on the learning rate for a step of fewer samples."""
    share = step_samples / global_batch_size
    return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[rule]
