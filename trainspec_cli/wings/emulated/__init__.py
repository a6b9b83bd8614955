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
    sizes: int = 0
    """1: tensors have shapes and allocated memory, but no values; one rank may stand for a world of any size."""


def read_settings(text: str) -> Settings:
    """Read `name=value,name=value`. Raises RecipeError for other text."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            if name not in Settings.__annotations__:
                raise ValueError
            found[name] = float(value) if name == "memory_gib" else int(value)
        except ValueError:
            message = f"{EMULATED}: `{part}` is not a setting of the emulated device"
            raise RecipeError(Problem("usage", message, EMULATED, "such as order=7,memory_gib=2")) from None
    settings = Settings(**found)  # type: ignore[arg-type]
    if settings.sizes not in (0, 1) or (settings.sizes and settings.order is not None):
        message = f"{EMULATED}: `{text}`: sizes is 0 or 1, and without values there is nothing to order"
        raise RecipeError(Problem("usage", message, EMULATED, "give sizes=1 without order="))
    return settings
