"""`trainspec fabric`: discover the links between this machine's devices and nodes, for an option of the group
`fabric`."""

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
from trainspec_cli.reporter.console import PrintableConsole, Text
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor.discover import (
    NodeLinks,
    SourceText,
    discover,
    links_here,
    parse_matrix,
    render_group,
    topology_here,
)

DEFAULT_RECIPE = "recipe=quickstart"
GROUP = Path("conf/fabric")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Cluster keys, if the cluster's nodes differ from this one: cluster.devices_per_node=8 or cluster=h100.",
        show_default=False,
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(
        "--write", metavar="FILE", help="Write the fabric as an option of the group `fabric`: conf/fabric/NAME.yaml."
    ),
]
Gpus = Annotated[
    Path | None,
    typer.Option(
        "--gpus",
        metavar="FILE",
        help="The links of another node: a file with the output of `nvidia-smi topo -m` on that node.",
    ),
]
Topology = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        metavar="FILE",
        help="A file with the output of `scontrol show topology`, or Slurm's topology.conf.",
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="FILE",
        help="A file with the output of `trainspec doctor --json` from a job with several nodes.",
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
    """Discover the fabric: the links of this node's GPUs, its NICs and NUMA nodes, and Slurm's switches.

    GPUs are neither needed nor used. Prints the tiers for trainspec plan fabric=NAME with their sources, and the values
    that were not found."""
    if write:
        hint = f"such as --write {GROUP / 'mine.yaml'}"
        if write.suffix != SUFFIX or not _NAME.fullmatch(write.stem):
            message = f"--write {write} is not NAME{SUFFIX} with letters, digits, _ . and -"
            raise RecipeError(Problem("output_exists", message, "--write", hint))
        if write.exists():
            message = f"{write} already exists and may contain your changes"
            raise RecipeError(Problem("output_exists", message, "--write", f"remove it, or choose another: {hint}"))
        if (shipped_data() / GROUP / write.name).is_file():
            message = f"trainspec already provides a fabric {write.stem}, which this one would replace"
            raise RecipeError(Problem("output_exists", message, "--write", hint))
    devices: int | None = None
    scaleup_devices: int | None = None
    if arguments:
        named = any(argument.startswith("recipe=") for argument in arguments)
        cluster = load_for_planning([*([] if named else [DEFAULT_RECIPE]), *arguments]).spec.cluster
        devices = None if cluster.devices_per_node == AUTO else int(cluster.devices_per_node)
        scaleup_devices = cluster.scaleup_devices
    if gpus:
        # A saved matrix does not contain NIC rates.
        source = str(gpus)
        matrix = tuple(parse_matrix(read_text(gpus), source))
        node = NodeLinks(f"the node described by {source}", matrix, source, nics_source=source)
    else:
        node = links_here()
    if topology:
        switches = SourceText(read_text(topology), str(topology))
        if not re.search(r"^\s*(SwitchName|BlockName)=", switches.text, re.MULTILINE | re.IGNORECASE):
            hint = "scontrol show topology > topology.txt, or pass Slurm's topology.conf"
            raise unreadable(topology, "has no SwitchName=... and no BlockName=...", hint)
    else:
        switches = topology_here()
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
    facts = _table(found.host, "found", "source")
    for fact in found.facts:
        facts.add_row(Text(fact.about), Text(fact.found), Text(fact.source))
    tiers = _table("tier", "devices", "Gbit/s", "latency us", "kind", "source")
    not_found: dict[tuple[str, str], list[str]] = {}
    for index, tier in enumerate(found.tiers):
        spec = tier.spec
        size = "all" if index == len(found.tiers) - 1 else "a node's" if index == 0 else "?"
        rate = "?" if spec.gbit_per_s is None else f"{spec.gbit_per_s:g}"
        latency = "?" if spec.latency_us is None else f"{spec.latency_us:g}"
        row = (spec.name, str(spec.devices or size), rate, latency, spec.kind or "", tier.source)
        tiers.add_row(*map(Text, row))
        for key, advice in tier.left_out.items():
            not_found.setdefault((key, advice), []).append(spec.name)
    notes = [f"not found for {', '.join(names)}: {key}; {advice}" for (key, advice), names in not_found.items()]
    notes += [f"note: {remark}" for remark in found.remarks]
    parts: list[RenderableType] = [facts, Text(), tiers]
    PrintableConsole(highlight=False, soft_wrap=True).show(Group(*parts, *map(Text, notes)))
    if write is None:
        print(f"to plan with it: trainspec fabric --write {GROUP / 'mine.yaml'}, and trainspec plan ... fabric=mine")
    elif write.resolve().parent in [folder / "fabric" for folder in find_folders(Path.cwd()).conf]:
        print(f"wrote {write}: trainspec plan ... fabric={write.stem}")
    else:
        print(f"wrote {write}: to use fabric={write.stem}, move it to ./{GROUP} where you run trainspec plan")


def _pairs(file: Path) -> tuple[PairRate, ...]:
    """Return the links between nodes from a doctor report. Raises MachineError if the report has none."""
    content = read_object(file)
    hint = "run in a job of two or more nodes: trainspec doctor --json > doctor.json"
    if not isinstance(content.get("links"), dict):
        raise unreadable(file, "contains no measured links", hint)
    try:
        pairs = from_plain(LinksResult, content["links"]).pairs
    except RecipeError as error:
        raise unreadable(file, f"contains no measured links: {error.problems[0].message}", hint) from error
    if any(not pair.sizes or pair.bytes_per_s <= 0 for pair in pairs):
        raise unreadable(file, "contains a link without a rate", hint)
    if not pairs:
        raise unreadable(file, "contains no links between nodes: only one node was examined", hint)
    return pairs


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    return table
