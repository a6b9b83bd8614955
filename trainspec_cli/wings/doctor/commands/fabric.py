"""`trainspec fabric`: discover how the devices of this machine and its nodes are joined, as the group `fabric`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import read_object, read_text, unreadable
from trainspec_cli.recipe.compose.folders import SUFFIX, find_folders, shipped_data
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import from_plain
from trainspec_cli.recipe.results.tools import LinksResult, PairRate
from trainspec_cli.reporter.rich_text import Text
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor.discover import (
    NodeLinks,
    Told,
    discover,
    links_here,
    parse_matrix,
    render_group,
    topology_here,
)
from trainspec_cli.wings.doctor.found_fabric import FoundFabric

DEFAULT_RECIPE = "recipe=quickstart"
GROUP = Path("conf/fabric")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="A cluster's keys where its nodes are others than this one: cluster.devices_per_node=8, or cluster=h100.",
        show_default=False,
    ),
]
Write = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE", help="Write it as an option of the group: conf/fabric/NAME.yaml."),
]
Gpus = Annotated[
    Path | None,
    typer.Option("--gpus", metavar="FILE", help="The links of another node: what `nvidia-smi topo -m` printed there."),
]
Topology = Annotated[
    Path | None,
    typer.Option("--topology", metavar="FILE", help="What `scontrol show topology` printed, or Slurm's topology.conf."),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured", metavar="FILE", help="What `trainspec doctor --json` printed in a job of several nodes."
    ),
]


def fabric(
    arguments: Arguments = None,
    write: Write = None,
    gpus: Gpus = None,
    topology: Topology = None,
    measured: Measured = None,
    as_json: AsJson = False,
) -> None:
    """Discover the fabric: the links of this node's GPUs, its NICs and NUMA nodes, and the switches that Slurm knows.

    No GPU is needed, and none is used. What is found becomes tiers that trainspec plan fabric=NAME takes; each says
    where it is from, and what cannot be found is named.
    """
    if write:
        _check_target(write)
    devices, scaleup_devices = _sizes(arguments or [])
    if gpus:
        # Of a node whose matrix was saved; its NICs' rates do not stand in it.
        source = str(gpus)
        matrix = tuple(parse_matrix(read_text(gpus), source))
        node = NodeLinks(f"the node of {source}", matrix, source, nics_source=source)
    else:
        node = links_here()
    switches = _switches(topology) if topology else topology_here()
    pairs = (_pairs(measured), str(measured)) if measured else None
    found = discover(node, switches, pairs, devices, scaleup_devices)
    if write:
        has_schema = (write.parent.parent / "schema" / "fabric.json").is_file()
        try:
            write_text(write, render_group(found, write.stem, has_schema=has_schema))
        except OSError as error:
            message = f"--write {write} cannot be written: {error.strerror}"
            hint = "choose a folder that you may write to"
            raise RecipeError(Problem("output_exists", message, "--write", hint)) from error
    if as_json:
        print(json_text(found.as_json()))
        return
    PrintableConsole(highlight=False, soft_wrap=True).show(render_fabric(found))
    print(_next(write))


def _switches(file: Path) -> Told:
    text = read_text(file)
    if not re.search(r"^\s*(SwitchName|BlockName)=", text, re.MULTILINE | re.IGNORECASE):
        hint = "scontrol show topology > topology.txt, or give Slurm's topology.conf"
        raise unreadable(file, "names no SwitchName=... and no BlockName=...", hint)
    return Told(text, str(file))


def _sizes(arguments: list[str]) -> tuple[int | None, int | None]:
    """Return the devices of a node and of a scale-up domain by the command line; None where it does not say."""
    if not arguments:
        return None, None
    named = any(argument.startswith("recipe=") for argument in arguments)
    cluster = load_for_planning([*([] if named else [DEFAULT_RECIPE]), *arguments]).spec.cluster
    return None if cluster.devices_per_node == AUTO else int(cluster.devices_per_node), cluster.scaleup_devices


def _pairs(file: Path) -> tuple[PairRate, ...]:
    """Return the links between nodes of a doctor's report. Raises MachineError where it has none."""
    content = read_object(file)
    hint = "inside a job of two nodes or more: trainspec doctor --json > doctor.json"
    if not isinstance(content.get("links"), dict):
        raise unreadable(file, "holds no measured links", hint)
    try:
        pairs = from_plain(LinksResult, content["links"]).pairs
    except RecipeError as error:
        raise unreadable(file, f"holds no measured links: {error.problems[0].message}", hint) from error
    if any(not pair.sizes or pair.bytes_per_s <= 0 for pair in pairs):
        raise unreadable(file, "holds a link without a rate", hint)
    if not pairs:
        raise unreadable(file, "holds no links between nodes: one node was examined", hint)
    return pairs


def _check_target(file: Path) -> None:
    """Raise RecipeError for a file that is there, or that no recipe could name."""
    hint = f"such as --write {GROUP / 'mine.yaml'}"
    if file.suffix != SUFFIX or not _NAME.fullmatch(file.stem):
        raise RecipeError(Problem("output_exists", f"--write {file} is no NAME{SUFFIX} of letters, digits, _ . and -",
                                  "--write", hint))  # fmt: skip
    if file.exists():
        message = f"{file} exists, and may hold what you have filled in"
        raise RecipeError(Problem("output_exists", message, "--write", f"remove it, or choose another: {hint}"))
    if (shipped_data() / GROUP / file.name).is_file():
        message = f"{file.stem} is a fabric that ships with trainspec, and yours would take its place"
        raise RecipeError(Problem("output_exists", message, "--write", hint))


def _next(file: Path | None) -> str:
    if file is None:
        return f"to plan with it: trainspec fabric --write {GROUP / 'mine.yaml'}, and trainspec plan ... fabric=mine"
    if file.resolve().parent in [folder / "fabric" for folder in find_folders(Path.cwd()).conf]:
        return f"wrote {file}: trainspec plan ... fabric={file.stem}"
    return f"wrote {file}: fabric={file.stem} is found below ./{GROUP} of the folder that you plan in"


def render_fabric(found: FoundFabric) -> RenderableType:
    facts = _table(found.host, "found", "source")
    for fact in found.facts:
        facts.add_row(Text(fact.about), Text(fact.found), Text(fact.source))
    tiers = _table("tier", "devices", "Gbit/s", "latency us", "kind", "source")
    not_found: dict[tuple[str, str], list[str]] = {}
    for place, tier in enumerate(found.tiers):
        spec = tier.spec
        size = "all" if place == len(found.tiers) - 1 else "a node's" if place == 0 else "?"
        rate = "?" if spec.gbit_per_s is None else f"{spec.gbit_per_s:g}"
        latency = "?" if spec.latency_us is None else f"{spec.latency_us:g}"
        row = (spec.name, str(spec.devices or size), rate, latency, spec.kind or "", tier.source)
        tiers.add_row(*map(Text, row))
        for key, advice in tier.left_out.items():
            not_found.setdefault((key, advice), []).append(spec.name)
    notes = [f"not found: {key} of {', '.join(names)}; {advice}" for (key, advice), names in not_found.items()]
    notes += [f"note: {remark}" for remark in found.remarks]
    parts: list[RenderableType] = [facts, Text(), tiers]
    return Group(*parts, *map(Text, notes))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    return table
