"""`trainspec fabric`: discover the links between this machine's devices and nodes, for the group `fabric`."""

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
from trainspec_cli.wings.doctor.found_fabric import FoundFabric

DEFAULT_RECIPE = "recipe=quickstart"
GROUP = Path("conf/fabric")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Keys of a cluster whose nodes differ from this one: cluster.devices_per_node=8, or cluster=h100.",
        show_default=False,
    ),
]
Write = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE", help="Write the fabric as an option of the group: conf/fabric/NAME.yaml."),
]
Gpus = Annotated[
    Path | None,
    typer.Option("--gpus", metavar="FILE", help="The links of another node: the output of `nvidia-smi topo -m` there."),
]
Topology = Annotated[
    Path | None,
    typer.Option(
        "--topology", metavar="FILE", help="The output of `scontrol show topology`, or Slurm's topology.conf."
    ),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured", metavar="FILE", help="The output of `trainspec doctor --json` in a job of several nodes."
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

    GPUs are neither needed nor used. The result consists of tiers for trainspec plan fabric=NAME, each with its source,
    and a list of what was not found.
    """
    if write:
        _check_target(write)
    devices, scaleup_devices = _sizes(arguments or [])
    if gpus:
        # A saved matrix does not contain NIC rates.
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
    print(_next_command(write))


def _switches(file: Path) -> SourceText:
    text = read_text(file)
    if not re.search(r"^\s*(SwitchName|BlockName)=", text, re.MULTILINE | re.IGNORECASE):
        hint = "scontrol show topology > topology.txt, or pass Slurm's topology.conf"
        raise unreadable(file, "has no SwitchName=... and no BlockName=...", hint)
    return SourceText(text, str(file))


def _sizes(arguments: list[str]) -> tuple[int | None, int | None]:
    """Return the devices per node and per scale-up domain as specified on the command line; None if not specified."""
    if not arguments:
        return None, None
    named = any(argument.startswith("recipe=") for argument in arguments)
    cluster = load_for_planning([*([] if named else [DEFAULT_RECIPE]), *arguments]).spec.cluster
    return None if cluster.devices_per_node == AUTO else int(cluster.devices_per_node), cluster.scaleup_devices


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


def _check_target(file: Path) -> None:
    """Raise RecipeError if the file exists, or if recipes cannot use its name."""
    hint = f"such as --write {GROUP / 'mine.yaml'}"
    if file.suffix != SUFFIX or not _NAME.fullmatch(file.stem):
        message = f"--write {file} is not NAME{SUFFIX} with letters, digits, _ . and -"
        raise RecipeError(Problem("output_exists", message, "--write", hint))
    if file.exists():
        message = f"{file} already exists and may contain your changes"
        raise RecipeError(Problem("output_exists", message, "--write", f"remove it, or choose another: {hint}"))
    if (shipped_data() / GROUP / file.name).is_file():
        message = f"trainspec already has a fabric {file.stem}, which yours would replace"
        raise RecipeError(Problem("output_exists", message, "--write", hint))


def _next_command(file: Path | None) -> str:
    if file is None:
        return f"to plan with it: trainspec fabric --write {GROUP / 'mine.yaml'}, and trainspec plan ... fabric=mine"
    if file.resolve().parent in [folder / "fabric" for folder in find_folders(Path.cwd()).conf]:
        return f"wrote {file}: trainspec plan ... fabric={file.stem}"
    return f"wrote {file}: to use fabric={file.stem}, put it into ./{GROUP} of the folder where you plan"


def render_fabric(found: FoundFabric) -> RenderableType:
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
    notes = [f"not found: {key} of {', '.join(names)}; {advice}" for (key, advice), names in not_found.items()]
    notes += [f"note: {remark}" for remark in found.remarks]
    parts: list[RenderableType] = [facts, Text(), tiers]
    return Group(*parts, *map(Text, notes))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    return table
