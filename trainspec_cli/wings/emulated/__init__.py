"""A software accelerator on which the engine's accelerator path runs without a GPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.errors import Problem, RecipeError

KIND = "emulated"
"""torch's name for the emulated device: `torch.device("emulated", 0)`."""


@dataclass(frozen=True)
class DeviceDisturbance:
    """A disturbance in virtual time: what is slow, where, and when. All ranks are affected unless a rank or node is
    specified."""

    slowness: float = 1.0
    """Factor by which operations take longer. Exchanges and copies are not affected."""
    attention_slowness: float = 1.0
    """Factor by which attention takes longer. With a mask, the duration is proportional to the number of token pairs
    that the mask allows, as in a kernel that skips blocks. Documents of unequal lengths then take unequal times."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of an operation's duration. The noise has a seed per rank and stream."""
    host_slowness: float = 1.0
    """Factor by which the host takes longer to queue an operation, read a batch or write a checkpoint."""
    read_ms: float = 0.0
    """Additional host time to read a batch, in the loader's thread."""
    write_ms: float = 0.0
    """Additional host time to write a checkpoint, in the thread that writes it."""
    retry_ms: float = 0.0
    """Host time of an allocator retry when memory is fragmented. In a retry, the allocator waits for its stream,
    releases its unused memory, and allocates again."""
    retry_every_ms: float = 0.0
    """Host time between two such retries; 0: every allocation needs a retry."""
    link_slowness: float = 1.0
    """Factor by which transfers take longer in exchanges that use the link of the slow rank or node. Without a slow
    rank or node, it applies to exchanges between nodes or, in a run on one node, to all exchanges."""
    link_jitter: float = 0.0
    """Standard deviation of the logarithm of the duration of an exchange over the slow link."""
    link_delay_us: float = 0.0
    """Additional time for each message of an exchange over the slow link. A ring over N ranks sends N - 1 messages in a
    row."""
    slow_rank: int | None = None
    """The slow rank. All exchanges of this rank use the slow link."""
    slow_node: int | None = None
    """The slow node. All of its ranks are slow, and their exchanges with other nodes use the slow link."""
    slow_from_s: float = 0.0
    """Virtual host time when the disturbance starts."""
    slow_until_s: float = math.inf
    """Virtual host time when the disturbance ends."""
    slow_every_s: float = 0.0
    """Period with which the disturbance recurs; 0 if it does not recur."""

    def lasts_at(self, at_s: float) -> bool:
        since_s = at_s - self.slow_from_s
        if since_s >= 0 and self.slow_every_s:
            since_s %= self.slow_every_s
        return 0 <= since_s < self.slow_until_s - self.slow_from_s

    def changes_after_s(self, at_s: float) -> float:
        """Return the next time after `at_s` when the disturbance starts or ends."""
        since_s = at_s - self.slow_from_s
        if since_s < 0:
            return self.slow_from_s
        span_s = self.slow_until_s - self.slow_from_s
        if not self.slow_every_s:
            return self.slow_until_s if since_s < span_s else math.inf
        inside_s = since_s % self.slow_every_s
        return at_s - inside_s + (span_s if inside_s < span_s else self.slow_every_s)

    def concerns(self, rank: int, node_ranks: int) -> bool:
        return self.slow_rank in (None, rank) and self.slow_node in (None, rank // node_ranks)

    def is_crossed_by(self, ranks: Collection[int], node_ranks: int, world_size: int) -> bool:
        """Return whether an exchange among these ranks uses the link of the slow rank or node."""
        if self.slow_rank is not None:
            return self.slow_rank in ranks
        nodes = {rank // node_ranks for rank in ranks}
        if self.slow_node is not None:
            return len(nodes) > 1 and self.slow_node in nodes
        return len(nodes) > 1 or world_size <= node_ranks


@dataclass(frozen=True)
class Settings:
    order: int | None = None
    """Seed for running the streams' work late and in random order; None to run it as soon as possible."""
    memory_gib: float = 80.0
    """The device's memory, in GiB."""
    sizes: int = 0
    """If 1, tensors have shapes and allocated memory but no values, and one rank can represent a world of any size."""
    time: str | None = None
    """The chip (a file in conf/accelerator) whose rates determine the virtual time of operations. None means no virtual
    time."""
    launch_us: float | None = None
    """Host time to queue one operation. None means the planner's value for a chip without graphs or compilation."""
    timeout_s: float = 600.0
    """Real time after which an exchange fails if a rank has not joined it."""
    disturbances: tuple[DeviceDisturbance, ...] = ()


WHOLE = ("order", "sizes", "slow_rank", "slow_node")
"""Settings with integer values."""


def read_settings(text: str) -> Settings:
    """Read `name=value,name=value`. Semicolons separate further disturbances. Raises RecipeError for any other text."""
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
        message = f"{EMULATED}: `order` and `time` cannot be combined, because operations in random order have no times"
        raise RecipeError(Problem("usage", message, EMULATED, f"remove order={settings.order} or time={settings.time}"))
    if settings.time is None and (disturbances or settings.launch_us is not None):
        message = f"{EMULATED}: `{text}` sets durations, which require `time`"
        raise RecipeError(
            Problem("usage", message, EMULATED, "specify a chip in conf/accelerator, such as time=h100_sxm")
        )
    if settings.sizes not in (0, 1) or (settings.sizes and settings.order is not None):
        message = f"{EMULATED}: `{text}`: sizes must be 0 or 1, and sizes=1 cannot be combined with order"
        raise RecipeError(Problem("usage", message, EMULATED, "set sizes=1 without order="))
    for one in disturbances:
        span_s = one.slow_until_s - one.slow_from_s
        if span_s <= 0 or (one.slow_every_s and span_s > one.slow_every_s):
            message = f"{EMULATED}: a disturbance from {one.slow_from_s:g} s until {one.slow_until_s:g} s"
            if one.slow_every_s:
                message += f" does not fit into {one.slow_every_s:g} s"
            raise RecipeError(Problem("usage", message, EMULATED, "slow_from_s=10,slow_until_s=20,slow_every_s=60"))
    return settings
