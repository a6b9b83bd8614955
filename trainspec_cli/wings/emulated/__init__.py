"""A software accelerator on which the engine's accelerator path runs without a GPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.errors import Problem, RecipeError

KIND = "emulated"
"""torch's name for the device: `torch.device("emulated", 0)`."""


@dataclass(frozen=True)
class DeviceDisturbance:
    """What is slow in virtual time, where, and when. Without a place it concerns all ranks."""

    slowness: float = 1.0
    """Operations last this many times as long as on the chip; exchanges and copies do not."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of an operation's duration. The noise is seeded by rank and stream."""
    host_slowness: float = 1.0
    """The host takes this many times as long to queue an operation, to read a batch and to write a checkpoint."""
    read_ms: float = 0.0
    """Host time to read a batch, in the loader's thread."""
    write_ms: float = 0.0
    """Host time to write a checkpoint, in the thread that writes it."""
    link_slowness: float = 1.0
    """Bytes of an exchange take this many times as long, if it uses the link of the place; without a place, if it
    leaves a node, or any exchange in a run on one node."""
    link_jitter: float = 0.0
    """Standard deviation of the logarithm of such an exchange's duration."""
    link_delay_us: float = 0.0
    """Every message of such an exchange takes this much longer; a ring over N ranks sends N - 1 of them in a row."""
    slow_rank: int | None = None
    """The place: this rank. Its link is used by all of its exchanges."""
    slow_node: int | None = None
    """The place: the ranks of this node. Its link is used by exchanges with other nodes."""
    slow_from_s: float = 0.0
    """Virtual time of the host from which it lasts."""
    slow_until_s: float = math.inf
    """Virtual time of the host until which it lasts."""
    slow_every_s: float = 0.0
    """It returns after this time; 0: it does not."""

    def lasts_at(self, at_s: float) -> bool:
        since_s = at_s - self.slow_from_s
        if since_s >= 0 and self.slow_every_s:
            since_s %= self.slow_every_s
        return 0 <= since_s < self.slow_until_s - self.slow_from_s

    def concerns(self, rank: int, node_ranks: int) -> bool:
        return self.slow_rank in (None, rank) and self.slow_node in (None, rank // node_ranks)

    def is_crossed_by(self, ranks: Collection[int], node_ranks: int, world_size: int) -> bool:
        """Return whether an exchange among these ranks uses the link of the place."""
        if self.slow_rank is not None:
            return self.slow_rank in ranks
        nodes = {rank // node_ranks for rank in ranks}
        if self.slow_node is not None:
            return len(nodes) > 1 and self.slow_node in nodes
        return len(nodes) > 1 or world_size <= node_ranks


@dataclass(frozen=True)
class Settings:
    order: int | None = None
    """Run the streams' work late and in random order with this seed; None: as soon as possible."""
    memory_gib: float = 80.0
    """The device's memory."""
    sizes: int = 0
    """1: tensors have shapes and allocated memory, but no values; one rank may stand for a world of any size."""
    time: str | None = None
    """The chip (a file in conf/accelerator) whose rates set the virtual time of operations; None: no virtual time."""
    launch_us: float | None = None
    """Host time to queue one operation; None: the planner's figure for a chip without graphs or compilation."""
    timeout_s: float = 600.0
    """Real time after which an exchange that lacks a rank fails."""
    disturbances: tuple[DeviceDisturbance, ...] = ()


WHOLE = ("order", "sizes", "slow_rank", "slow_node")
"""Settings that are whole numbers."""


def read_settings(text: str) -> Settings:
    """Read `name=value,name=value`; more disturbances may follow, each after a semicolon. Raises RecipeError for other
    text."""
    found: dict[str, float | str] = {}
    disturbances = []
    for number, group in enumerate(text.split(";")):
        disturbance: dict[str, float] = {}
        for part in filter(None, group.split(",")):
            name, _, value = part.partition("=")
            try:
                is_of_device = name in Settings.__annotations__ and name != "disturbances"
                if not value or not (name in DeviceDisturbance.__annotations__ or (is_of_device and number == 0)):
                    raise ValueError
                if name == "time":
                    found[name] = value
                    continue
                figure = int(value) if name in WHOLE else float(value)
                if not 0 <= figure < math.inf:
                    raise ValueError
                if is_of_device:
                    found[name] = figure
                else:
                    disturbance[name] = figure
            except ValueError:
                message = f"{EMULATED}: `{part}` is not a setting of the emulated device"
                raise RecipeError(Problem("usage", message, EMULATED, "such as order=7,memory_gib=2")) from None
        if disturbance:
            disturbances.append(DeviceDisturbance(**disturbance))  # type: ignore[arg-type]
    settings = Settings(**found, disturbances=tuple(disturbances))  # type: ignore[arg-type]
    if settings.order is not None and settings.time is not None:
        message = f"{EMULATED}: `order` and `time` exclude each other: in random order, no operation has a time"
        raise RecipeError(Problem("usage", message, EMULATED, f"remove order={settings.order} or time={settings.time}"))
    if settings.time is None and (disturbances or settings.launch_us is not None):
        message = f"{EMULATED}: `{text}`: durations need `time`"
        raise RecipeError(Problem("usage", message, EMULATED, "name a chip of conf/accelerator: time=h100_sxm"))
    if settings.sizes not in (0, 1) or (settings.sizes and settings.order is not None):
        message = f"{EMULATED}: `{text}`: sizes is 0 or 1, and without values there is nothing to order"
        raise RecipeError(Problem("usage", message, EMULATED, "give sizes=1 without order="))
    for one in disturbances:
        span_s = one.slow_until_s - one.slow_from_s
        if span_s <= 0 or (one.slow_every_s and span_s > one.slow_every_s):
            message = f"{EMULATED}: a disturbance from {one.slow_from_s:g} s until {one.slow_until_s:g} s"
            if one.slow_every_s:
                message += f" does not fit into {one.slow_every_s:g} s"
            raise RecipeError(Problem("usage", message, EMULATED, "slow_from_s=10,slow_until_s=20,slow_every_s=60"))
    return settings
