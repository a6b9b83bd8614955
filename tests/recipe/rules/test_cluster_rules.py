"""Rules for a cluster's failures, site, power and price; shipped files and code agree."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import yaml
from recipe.conftest import SPEC

from trainspec_cli.recipe.keys.cluster import (
    AcceleratorSpec,
    ClusterSpec,
    CostSpec,
    PowerSpec,
    ReliabilitySpec,
    SiteSpec,
)
from trainspec_cli.recipe.rules.check import check

CONF = Path(__file__).parents[3] / "conf"


def problems_of(cluster: ClusterSpec) -> dict[str, str]:
    return {problem.path: problem.message for problem in check(replace(SPEC, cluster=cluster))}


def test_the_defaults_are_in_order() -> None:
    assert problems_of(ClusterSpec()) == {}


@pytest.mark.parametrize(("bf16", "fp16", "wrong"), [(0.0, 125.0, False), (125.0, 0.0, False), (0.0, 0.0, True)])
def test_a_chip_multiplies_in_bf16_or_in_fp16(bf16: float, fp16: float, wrong: bool) -> None:
    chip = AcceleratorSpec("V", "nvidia", bf16, memory_gb=16, memory_tb_per_s=1, fp16_tflops=fp16)
    assert ("cluster.accelerator.bf16_tflops" in problems_of(ClusterSpec(accelerator=chip))) is wrong


@pytest.mark.parametrize(("pue", "wrong"), [(0.9, True), (1.0, False)])
def test_a_building_takes_at_least_what_its_machines_take(pue: float, wrong: bool) -> None:
    assert ("cluster.site.pue" in problems_of(ClusterSpec(site=SiteSpec(pue=pue)))) is wrong


DEFAULTS = {
    "reliability/llama3_h100": ReliabilitySpec(),
    "site/world": SiteSpec(),
    "power/default": PowerSpec(),
    "cost/rented": CostSpec(),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_shipped_default_and_the_code_name_the_same_numbers(name: str) -> None:
    shipped = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    numbers = {key: value for key, value in shipped.items() if key not in ("known_within", "sources", "unverified")}
    coded = asdict(DEFAULTS[name])
    assert numbers == {key: coded[key] for key in numbers}


GROUPS = {"reliability": ReliabilitySpec, "site": SiteSpec, "power": PowerSpec, "cost": CostSpec}
SHIPPED = [path for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_number_has_a_source(path: Path) -> None:
    """Its own or, where the file builds on another, that one's."""
    shipped = yaml.safe_load(path.read_text())
    base = next((entry for entry in shipped.get("defaults", []) if entry != "_self_"), None)
    sources = set(shipped.get("sources", {}))
    if base:
        sources |= set(yaml.safe_load((path.parent / f"{base}.yaml").read_text())["sources"])
    names = {field.name for field in fields(GROUPS[path.parent.name])}
    numbers = {key for key, value in shipped.items() if key in names and type(value) in (int, float)}
    assert numbers <= sources
    assert set(shipped.get("unverified", [])) <= names
