"""A software accelerator on which the engine's accelerator path runs without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.core.environment_names import EMULATED
from trainspec_cli.core.errors import Problem, RecipeError

KIND = "emulated"
"""torch's name for the device: `torch.device("emulated", 0)`."""


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
    slowness: float = 1.0
    """Operations last this many times as long as on the chip; exchanges and copies do not."""
    slow_rank: int | None = None
    """The only rank to which `slowness` applies; None: it applies to all ranks."""
    slow_from_s: float = 0.0
    """Virtual host time from which `slowness` applies."""
    slow_until_s: float = math.inf
    """Virtual host time until which it applies."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of an operation's duration. The noise is seeded by rank and stream."""
    launch_us: float | None = None
    """Host time to queue one operation; None: the planner's figure for a chip without graphs or compilation."""
    timeout_s: float = 600.0
    """Real time after which an exchange that lacks a rank fails."""


WHOLE = ("order", "sizes", "slow_rank")
"""Settings that are whole numbers."""
NEED_TIME = {"slowness", "slow_rank", "slow_from_s", "slow_until_s", "jitter", "launch_us"}


def read_settings(text: str) -> Settings:
    """Read `name=value,name=value`. Raises RecipeError for other text."""
    found: dict[str, float | str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            if name not in Settings.__annotations__ or not value:
                raise ValueError
            if name == "time":
                found[name] = value
                continue
            number = int(value) if name in WHOLE else float(value)
            if not 0 <= number < math.inf:
                raise ValueError
            found[name] = number
        except ValueError:
            message = f"{EMULATED}: `{part}` is not a setting of the emulated device"
            raise RecipeError(Problem("usage", message, EMULATED, "such as order=7,memory_gib=2")) from None
    settings = Settings(**found)  # type: ignore[arg-type]
    if settings.order is not None and settings.time is not None:
        message = f"{EMULATED}: `order` and `time` exclude each other: in random order, no operation has a time"
        raise RecipeError(Problem("usage", message, EMULATED, f"remove order={settings.order} or time={settings.time}"))
    if settings.time is None and (unused := sorted(found.keys() & NEED_TIME)):
        message = f"{EMULATED}: `{unused[0]}` needs `time`"
        raise RecipeError(Problem("usage", message, EMULATED, "name a chip of conf/accelerator: time=h100_sxm"))
    if settings.sizes not in (0, 1) or (settings.sizes and settings.order is not None):
        message = f"{EMULATED}: `{text}`: sizes is 0 or 1, and without values there is nothing to order"
        raise RecipeError(Problem("usage", message, EMULATED, "give sizes=1 without order="))
    return settings
