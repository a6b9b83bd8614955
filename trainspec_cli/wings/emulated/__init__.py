"""A software accelerator on which the engine's accelerator path runs without a GPU."""

from __future__ import annotations

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


def read_settings(text: str) -> Settings:
    """Read `name=value,name=value`. Raises RecipeError for other text."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            if name not in Settings.__annotations__:
                raise ValueError
            found[name] = int(value) if name == "order" else float(value)
        except ValueError:
            message = f"{EMULATED}: `{part}` is not a setting of the emulated device"
            raise RecipeError(Problem("usage", message, EMULATED, "such as order=7,memory_gib=2")) from None
    return Settings(**found)  # type: ignore[arg-type]
