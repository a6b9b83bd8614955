"""What `trainspec calibrate` has learned of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibrated:
    """A parameter's factor over its shipped value."""

    factor: float
    low: float
    """Its bounds, nine in ten."""
    high: float
    informed: bool
    """False where the measurements say nothing of it, so that the shipped value stands."""


@dataclass(frozen=True)
class ClusterProfile:
    cluster: str
    """The cluster's name, as `cluster.name` says."""
    device: str
    """The accelerator, or the processor, on which was measured."""
    kind: str
    """gpu: the factors are of the planner's efficiencies; cpu: of a step's parts."""
    date: str
    rows: int
    """Measured steps that it was fitted to."""
    torch: str
    trainspec: str
    error_before: float
    """Mean error of the rows' step times by the shipped values, and"""
    error_after: float
    """by the fitted ones."""
    known_within: float
    """Other steps like these are known within this factor, nine in ten."""
    parameters: dict[str, Calibrated]

    @property
    def factors(self) -> dict[str, float]:
        return {name: found.factor for name, found in self.parameters.items()}

    @property
    def kept(self) -> list[str]:
        """Parameters that the measurements did not inform."""
        return [name for name, found in self.parameters.items() if not found.informed]
