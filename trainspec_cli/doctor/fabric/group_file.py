"""Write a discovered fabric as an option of the group `fabric`, with the source of each tier and what is to fill in."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from trainspec_cli.printable import printable
from trainspec_cli.spec.recipe.fabric import TierSpec
from trainspec_cli.spec.results.fabric import FoundFabric, FoundTier

WIDTH = 118
SCHEMA = "# yaml-language-server: $schema=../schema/fabric.json"
WIRING = "rails, where NIC i of every node is on a switch of its own; one_switch, where a node's NICs are on one"


def render_group(found: FoundFabric, name: str, *, has_schema: bool) -> str:
    """Return the YAML of conf/fabric/NAME.yaml; `has_schema` says that the schemas lie beside the group."""
    lines = ["# @package cluster.fabric", *([SCHEMA] if has_schema else [])]
    lines += _comment(f"The fabric of {found.host}, found by `trainspec fabric`. Keys with ... were not found.")
    lines += [line for remark in found.remarks for line in _comment(f"Note: {remark}.")]
    lines += [f"name: {json.dumps(name, allow_nan=False)}", "tiers:"]
    for tier in found.tiers:
        lines += _tier(tier)
    lines += [*_comment(f"nic_wiring: {WIRING}; a node does not show it."), "nic_wiring: null", "planes: null"]
    lines += ["nccl_tuner: false", "sources:"]
    lines += [f"  {key}: {json.dumps(source, allow_nan=False)}" for key, source in found.spec(name).sources.items()]
    return "\n".join(lines) + "\n"


def _tier(tier: FoundTier) -> Iterator[str]:
    yield f"  - name: {json.dumps(tier.spec.name, allow_nan=False)}"
    yield from (f"    {key}: {value}" for key, value in known_keys(tier.spec))
    for key, advice in tier.left_out.items():
        yield from _comment(f"{key}: ...  {advice}", "    # ")


def known_keys(tier: TierSpec) -> Iterator[tuple[str, str]]:
    """Yield a tier's keys that have a value, but for the name."""
    if tier.devices is not None:
        yield "devices", str(tier.devices)
    if tier.gbit_per_s is not None:
        yield "gbit_per_s", f"{tier.gbit_per_s:g}"
    if tier.latency_us is not None:
        yield "latency_us", f"{tier.latency_us:g}"
    if tier.kind is not None:
        yield "kind", tier.kind


def _comment(text: str, margin: str = "# ") -> list[str]:
    words = printable(" ".join(text.split()))
    return textwrap.wrap(words, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
