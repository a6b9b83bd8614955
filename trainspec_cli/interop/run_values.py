"""A resolved run as flat values: the dotted keys of its recipe without `auto`, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from trainspec_cli.errors import Problem
from trainspec_cli.json_value import JsonValue, flatten
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec

DERIVED = "derived."
"""The prefix of values that are no keys of a recipe."""


@dataclass(frozen=True)
class Container:
    """What no recipe says of a container."""

    image: str = ""
    """An image that has trainspec."""
    volume: str = ""
    """A volume that all nodes mount: recipes, data and the run's folder."""


NO_CONTAINER = Container()


@dataclass(frozen=True)
class RunValues:
    recipe: str
    """The recipe's name, fit for a comment."""
    values: Mapping[str, JsonValue]
    """Dotted key of the recipe, or `derived.NAME` -> value."""
    arguments: tuple[str, ...] = ()
    """The command line that names the recipe, where trainspec itself is started."""
    container: Container = NO_CONTAINER

    def __getitem__(self, key: str) -> JsonValue:
        return self.values.get(key)

    def whole(self, key: str) -> int:
        value = self.values[key]
        assert isinstance(value, int), f"{key} is a whole number"
        return value

    def number(self, key: str) -> float:
        value = self.values[key]
        assert isinstance(value, (int, float)), f"{key} is a number"
        return float(value)

    @property
    def keys(self) -> Iterable[str]:
        """The keys of the recipe."""
        return [key for key in self.values if not key.startswith(DERIVED)]


def run_values(
    recipe: str, spec: RunSpec, arguments: tuple[str, ...] = (), container: Container = NO_CONTAINER
) -> RunValues:
    """Return the values of a spec without `auto`."""
    values = flatten(to_plain(spec))
    return RunValues(re.sub(r"[^\w./ -]", "_", recipe), {**values, **_derived(spec)}, arguments, container)


def _derived(spec: RunSpec) -> dict[str, JsonValue]:
    layout, micro = layout_of(spec), spec.batching.micro_batch_size
    assert isinstance(micro, int), "a resolved run has a micro-batch size"
    accumulated = max(1, spec.batching.global_batch_size // (micro * layout.data_parallel_size))
    return {
        f"{DERIVED}grad_accum_steps": accumulated,
        f"{DERIVED}world_size": layout.world_size,
        f"{DERIVED}data_parallel_size": layout.data_parallel_size,
        f"{DERIVED}shards": layout.shards,
        f"{DERIVED}is_ddp": layout.world_size == layout.dp_replicate,
        f"{DERIVED}rank_batch_size": micro * accumulated,
        f"{DERIVED}samples": spec.batching.global_batch_size * spec.train.max_steps,
        f"{DERIVED}arch": _arch(spec),
        f"{DERIVED}device_batch_size": micro * layout.data_parallel_size / layout.world_size,
        **_within_and_across(layout, spec),
    }


def _within_and_across(layout: Layout, spec: RunSpec) -> dict[str, JsonValue]:
    """Return how much of each axis lies within a node, and across nodes: the innermost axes fill a node first."""
    parts: dict[str, JsonValue] = {}
    free = spec.cluster.devices_per_node
    assert isinstance(free, int), "a resolved run has its devices counted"
    for axis in ("tp", "cp", "dp_shard", "dp_replicate"):
        size = getattr(layout, axis)
        within = gcd(size, free)
        free //= within
        parts |= {f"{DERIVED}within_node.{axis}": within, f"{DERIVED}across_nodes.{axis}": size // within}
    return parts


def layout_of(spec: RunSpec) -> Layout:
    asked = spec.layout
    assert AUTO not in vars(asked).values(), "a resolved run has no open axis"
    return Layout(**vars(asked))


def batch_problem(run: RunValues) -> Problem | None:
    """Return what is wrong where ranks have unequal batches, which trainspec alone can do."""
    samples, micro, ranks = (
        run.whole(key)
        for key in ("batching.global_batch_size", "batching.micro_batch_size", f"{DERIVED}data_parallel_size")
    )
    each_round = micro * ranks
    if samples % each_round == 0:
        return None
    allowed = [max(1, samples // each_round) * each_round, (samples // each_round + 1) * each_round]
    message = (
        f"`batching.global_batch_size` is {samples}, and other engines give every rank as many samples: whole "
        f"multiples of {each_round} (micro-batches of {micro} on {ranks} data-parallel ranks)"
    )
    hint = " or ".join(f"batching.global_batch_size={size}" for size in dict.fromkeys(allowed))
    return Problem("not_said", message, "batching.global_batch_size", f"type {hint}")


def _arch(spec: RunSpec) -> str:
    """The architecture of the GPUs, where the environment depends on it: `hopper` and before, or `blackwell`."""
    accelerator = spec.cluster.accelerator
    name = accelerator.name.lower() if accelerator else ""
    return "blackwell" if any(chip in name for chip in ("b200", "b300")) else "hopper"
