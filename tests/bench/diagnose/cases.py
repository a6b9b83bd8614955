"""The cases of the bench: what is done to a run, to which rank or node, from which step on, and how strongly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Place = Literal["rank", "node", "link", "stage", "run"]


@dataclass(frozen=True)
class Mechanism:
    """A way to disturb a run."""

    cause: str
    """The verdict that names it."""
    place: Place
    """Where it happens: `run` is everywhere, `stage` the ranks of one stage of the pipeline."""
    low: float
    high: float
    """The bounds of its strength: by how many steps' time it lengthens a step, or what `injectors` says."""
    from_start: bool = False
    """It belongs to the recipe or the data, and is there from the first step on."""


MECHANISMS = {
    "quota": Mechanism("slow_device", "rank", 0.6, 2),
    "competitors": Mechanism("stolen_cores", "rank", 0.6, 2),
    "rate": Mechanism("narrow_link", "link", 0.6, 2),
    "loss": Mechanism("lossy_link", "link", 4, 12),
    "delay": Mechanism("delayed_link", "link", 5, 20),
    "slow_reads": Mechanism("slow_loader", "rank", 0.6, 2),
    "garbage": Mechanism("garbage_collection", "rank", 0.2e6, 0.8e6),
    "leak": Mechanism("memory_leak", "rank", 20e6, 100e6),
    "stop": Mechanism("hang", "rank", 1, 1),
    "lengths": Mechanism("uneven_lengths", "run", 0.3, 0.8, from_start=True),
    "node_quota": Mechanism("slow_node", "node", 0.6, 2),
    "stage": Mechanism("unbalanced_stage", "stage", 1, 1, from_start=True),
    "slow_disk": Mechanism("checkpoint_writing", "run", 0.05, 0.2),
    "spin": Mechanism("host_bound", "rank", 0.6, 2),
    "burst": Mechanism("noise", "run", 0.5, 2),
    "short_memory": Mechanism("memory_pressure", "rank", 48e6, 128e6),
    "shapes": Mechanism("recompilation", "rank", 1, 3),
    "flaps": Mechanism("network_timeouts", "link", 0.6, 1.6),
}
"""In the order of the published matrix; the first ten are those that it is judged by."""
TEN = tuple(MECHANISMS)[:10]
HEALTHY = "healthy"
HANG = "stop"
PAIRS = (
    ("quota", "rate"),
    ("quota", "leak"),
    ("quota", "slow_reads"),
    ("delay", "slow_reads"),
    ("garbage", "leak"),
    ("garbage", "loss"),
    ("slow_disk", "quota"),
    ("leak", "rate"),
)
"""What is injected one after the other, at two ranks where both are of ranks. What is read ahead while steps are slow
costs nothing, so that `slow_reads` comes second."""

SHAPES = ((1, 2), (1, 2), (1, 3), (1, 4), (1, 4), (1, 6), (1, 8), (2, 2), (2, 2), (2, 3), (2, 4), (3, 2))
"""(nodes, ranks of each), each as likely as the others. On several nodes each has two ranks at least, so that a slow
rank is not a slow node."""
LINK_SHAPES = ((2, 1), (2, 1), (2, 2), (3, 1), (3, 2))
FEW_RANKS = ((1, 2), (1, 3), (1, 4), (2, 2))
"""Where the others share the cores that one rank does not have."""
FIRST_STEPS = (18, 32)
"""Bounds of the step at which an injection begins."""
STEP_S = (0.06, 0.12)
"""Bounds of what the passes of a step sleep, on every rank."""
SAMPLES = 2
"""Of a rank in a step."""
HELD_OUT_THIRD = 2


@dataclass(frozen=True)
class Injection:
    mechanism: str
    step: int
    """The first step that it disturbs is the next one that begins."""
    strength: float
    rank: int | None = None
    node: int | None = None
    stage: int | None = None

    @property
    def cause(self) -> str:
        return MECHANISMS[self.mechanism].cause


@dataclass(frozen=True)
class Case:
    name: str
    """Of its row in the matrix: a mechanism, `healthy`, or two mechanisms joined by `+`."""
    index: int
    seed: int
    nodes: int
    ranks_per_node: int
    stages: int
    step_s: float
    injections: tuple[Injection, ...]

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def key(self) -> str:
        return f"{self.name}/{self.seed}/{self.index}"

    @property
    def held_out(self) -> bool:
        return is_held_out(self.index)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def ranks_of_stage(self, stage: int) -> range:
        """Return the ranks that hold `stage`: stages are the outermost axis of the mesh."""
        each = self.ranks // self.stages
        return range(stage * each, (stage + 1) * each)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def is_held_out(index: int) -> bool:
    """Return whether a case is in the third that nobody looks at before the end."""
    return index % 3 == HELD_OUT_THIRD


def case_names(causes: str) -> tuple[str, ...]:
    """Return the names of `ten`, `all`, `pairs`, or of a list with commas. Raises ValueError where one is unknown."""
    pairs = tuple("+".join(pair) for pair in PAIRS)
    known = (*MECHANISMS, HEALTHY, *pairs)
    groups: dict[str, tuple[str, ...]] = {"ten": TEN, "all": (*MECHANISMS, HEALTHY), "pairs": pairs}
    names = groups.get(causes) or tuple(causes.split(","))
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"there is no {', '.join(unknown)}; there are {', '.join([*groups, *known])}")
    return names


def draw_case(name: str, index: int, seed: int) -> Case:
    """Return case `index` of `name`: the same for the same seed, whatever else is drawn."""
    draw = random.Random(f"{seed}/{name}/{index}")
    mechanisms = [] if name == HEALTHY else name.split("+")
    nodes, each = draw.choice(_shapes(mechanisms))
    stages = 2 if "stage" in mechanisms or (nodes * each % 2 == 0 and draw.random() < 0.2) else 1
    if "lengths" in mechanisms and nodes * each == stages:
        stages = 1  # samples are uneven between ranks that have others beside them
    first = draw.randint(*FIRST_STEPS)
    places = draw.sample(range(nodes * each), len(mechanisms) if nodes * each > 1 else 1)
    injections = tuple(
        _draw_injection(draw, mechanism, first, places[number], each, nodes, stages)
        for number, mechanism in enumerate(mechanisms)
    )
    return Case(name, index, seed, nodes, each, stages, round(draw.uniform(*STEP_S), 3), injections)


def _shapes(mechanisms: Sequence[str]) -> Sequence[tuple[int, int]]:
    places = {MECHANISMS[mechanism].place for mechanism in mechanisms}
    if "competitors" in mechanisms:
        return FEW_RANKS
    if places == {"link"}:
        return LINK_SHAPES
    if places & {"link", "node"}:
        return [shape for shape in SHAPES if shape[0] > 1]
    if "stage" in places:
        return [shape for shape in SHAPES if shape[0] * shape[1] % 2 == 0]
    return SHAPES


def _draw_injection(
    draw: random.Random, mechanism: str, first: int, rank: int, ranks_per_node: int, nodes: int, stages: int
) -> Injection:
    about = MECHANISMS[mechanism]
    strength = draw.uniform(about.low, about.high)
    step = 0 if about.from_start else first
    node = draw.randrange(nodes)
    match about.place:
        case "rank":
            return Injection(mechanism, step, strength, rank=rank)
        case "node" | "link":
            return Injection(mechanism, step, strength, node=node)
        case "stage":
            return Injection(mechanism, step, strength, stage=draw.randrange(stages))
        case "run":
            return Injection(mechanism, step, strength)
