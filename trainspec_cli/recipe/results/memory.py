"""Memory that ran out: with which setting, and which one was taken for it."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.recipe.keys.run import Offload, Recompute


@dataclass(frozen=True)
class MemorySetting:
    """The settings that decide a step's peak memory and leave its result the same."""

    micro_batch_size: int
    """Samples of a rank that are processed together, at most."""
    recompute: Recompute
    offload: Offload

    def describe(self, before: MemorySetting | None = None) -> str:
        """`micro-batches of 4 samples`, `recompute=full`: what differs from `before`, or all of it."""
        words = {
            "micro_batch_size": f"micro-batches of {self.micro_batch_size} sample{'s' * (self.micro_batch_size > 1)}",
            "recompute": f"recompute={self.recompute}",
            "offload": f"offload={self.offload}",
        }
        differing = [name for name in words if before is None or getattr(self, name) != getattr(before, name)]
        return ", ".join(words[name] for name in differing)


@dataclass(frozen=True)
class Shortage:
    """The memory of a rank ran out."""

    failed: MemorySetting
    """The setting in force, with the samples of the micro-batch that failed."""
    layout: str
    """The axes of the layout in force, which a run may change between two steps."""
    used_bytes: int | None = None
    """Memory that the process held; None where nobody could ask."""
    limit_bytes: int | None = None
    """Memory that the process may hold."""
    was_killed: bool = False
    """The kernel killed a process; else an allocation failed."""


@dataclass(frozen=True)
class Relief:
    """A setting whose memory ran out, and the one that was taken for it."""

    failed: MemorySetting
    taken: MemorySetting
