"""The runs that another engine is asked for, and the clauses that each of them shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from trainspec_cli.certify.cases import name_layout
from trainspec_cli.certify.engine.protocol import Asked, EngineOptimizer
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import Recompute

OPTIMIZERS = {"sgd": EngineOptimizer("sgd", 0.1), "adamw": EngineOptimizer("adamw", 1e-3)}
LAYOUTS = (
    Layout(),
    Layout(dp_replicate=2),
    Layout(dp_shard=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(pp=2),
)
"""Every axis alone, and one process."""
KEPT = (Layout(), Layout(dp_replicate=2), Layout(dp_shard=2))
"""Repeated, and stopped and resumed."""
MOVES = ((Layout(dp_replicate=2), Layout()), (Layout(dp_shard=2), Layout(dp_replicate=2)))
"""Saved in the first layout, continued in the second."""


@dataclass(frozen=True)
class ProtocolRun:
    """A run that an engine is asked for."""

    layout: Layout = field(default_factory=Layout)
    compute: Literal["fp32", "bf16"] = "fp32"
    recompute: Recompute = "none"
    compile: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    asks: tuple[Asked, ...] = ("gradients",)
    saves: bool = False
    resumes: ProtocolRun | None = None
    """The run whose checkpoint it begins with."""
    take: int = 0
    """The number of a repetition."""

    @property
    def name(self) -> str:
        words = [self.compute, name_layout(self.layout), self.optimizer]
        words += [self.recompute] if self.recompute != "none" else []
        words += ["compiled"] if self.compile else []
        words += ["one-step"] if self.is_one_step else []
        words += [f"from-{name_layout(self.resumes.layout)}"] if self.resumes else []
        words += [f"again{self.take}"] if self.take else []
        return "-".join(words)

    @property
    def is_one_step(self) -> bool:
        return self.asks == ("gradients",)


@dataclass(frozen=True)
class EngineCheck:
    """A clause on a run; `beside` is the engine's own run that it is held against, and none where it is held against
    the reference."""

    clause: str
    run: ProtocolRun
    beside: ProtocolRun | None = None

    @property
    def runs(self) -> tuple[ProtocolRun, ...]:
        """The runs that it takes, in the order in which they are made."""
        return tuple(run for run in (self.beside, self.run) if run is not None)


def engine_checks(max_processes: int) -> list[EngineCheck]:
    return [check for check in _all_checks() if all(run.layout.world_size <= max_processes for run in check.runs)]


def _all_checks() -> Iterator[EngineCheck]:
    for layout in LAYOUTS:
        trained = ProtocolRun(layout, asks=("gradients", "losses"))
        yield EngineCheck("NUM-1", trained)
        yield EngineCheck("NUM-2", trained)
    for layout in (Layout(), Layout(dp_replicate=2)):
        yield EngineCheck("NUM-3", ProtocolRun(layout, "bf16"))
    yield EngineCheck("NUM-4", ProtocolRun(recompute="full"))
    yield EngineCheck("NUM-5", ProtocolRun(compile=True))
    for layout in KEPT:
        whole = _whole(layout)
        yield EngineCheck("NUM-6", replace(whole, take=1), whole)
        yield EngineCheck("CKPT-1", replace(whole, saves=False, resumes=whole), whole)
    for before, after in MOVES:
        yield EngineCheck(
            "CKPT-2", replace(_whole(before), layout=after, saves=False, resumes=_whole(before)), _whole(before)
        )


def _whole(layout: Layout) -> ProtocolRun:
    return ProtocolRun(layout, optimizer="adamw", asks=("losses", "weights"), saves=True)
