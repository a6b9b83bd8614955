"""Read the matrix that `nvidia-smi topo -m` prints: how each GPU reaches the others and the NICs of its node.

Its columns changed over the years: NICs stand there by name (drivers up to 4xx) or as NIC0 with a legend below, and the
affinity to cores may be followed by those to NUMA nodes, or be blank where a job was given other cores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.spec.results.fabric import FoundGpu

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+): (\S+)\s*")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
SELF = "X"
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
RENAMED = {"SOC": "SYS"}
"""The names of drivers before 384 -> those of today."""
COMMAND = "nvidia-smi topo -m"


def parse_matrix(text: str, source: str) -> list[FoundGpu]:
    """Return the GPUs of a node with their links. Raises MachineError that names `source` and the line.

    Lines that do not belong to the matrix are passed over, so that a report may be given which holds it.
    """
    lines = _COLOUR.sub("", text).splitlines()
    place = next((place for place, line in enumerate(lines) if _is_header(line.split())), None)
    if place is None:
        hint = f"give what `{COMMAND}` prints, whole: {COMMAND} > topology.txt"
        raise MachineError(Problem("no_matrix", f"{source} holds no matrix of GPUs", hint=hint, environment=True))
    columns, affinities = _columns(lines[place])
    names = {match[1]: match[2] for line in lines[place:] if (match := _LEGEND.fullmatch(line))}
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[place + 1 :], place + 2):
        words = line.split()
        if words and words[0] in columns and words[0] not in rows:
            rows[words[0]] = _row(words[1:], columns, f"{source}:{number}", words[0])
        elif words and rows:
            break
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        message = f"the matrix in {source} has a column and no row of {', '.join(missing)}"
        raise MachineError(Problem("no_matrix", message, hint=f"give what `{COMMAND}` prints, whole", environment=True))
    return [_gpu(gpu, rows[gpu], columns, affinities, names) for gpu in gpus]


def _is_header(words: Sequence[str]) -> bool:
    """Return whether a line names the columns: they begin with GPU0, as the first row does, which goes on with a
    link."""
    return bool(words) and words[0] == "GPU0" and not (len(words) > 1 and _LINK.fullmatch(words[1]))


def _columns(header: str) -> tuple[list[str], list[str]]:
    """Return the devices, and the affinities behind them."""
    affinities = [name for name in _AFFINITIES if name in header]
    devices = header.partition(_AFFINITIES[0])[0]
    return devices.split(), affinities


def _row(cells: list[str], columns: Sequence[str], where: str, name: str) -> list[str]:
    links = cells[: len(columns)]
    wrong = next((cell for cell in links if not _LINK.fullmatch(cell)), None)
    if wrong is None and len(links) == len(columns):
        return cells
    found = f"`{wrong}`, which is no link" if wrong is not None else f"{len(links)} links"
    message = f"{where}: the row of {name} has {found}; {len(columns)} are needed, such as NV18, PIX, PXB, NODE or SYS"
    raise MachineError(
        Problem("bad_matrix", message, hint=f"give what `{COMMAND}` prints, unchanged", environment=True)
    )


def _gpu(
    name: str, row: Sequence[str], columns: Sequence[str], affinities: Sequence[str], nics: dict[str, str]
) -> FoundGpu:
    links = {other: RENAMED.get(link, link) for other, link in zip(columns, row, strict=False) if other != name}
    behind = row[len(columns) :]
    # the cores may be blank, the others are not: they are told from the end
    told = dict(zip(reversed(affinities), reversed(behind), strict=False))
    cores, numa = told.get("CPU Affinity", ""), told.get("NUMA Affinity", "")
    return FoundGpu(
        name,
        links={other: link for other, link in links.items() if _GPU.fullmatch(other)},
        nics={nics.get(other, other): link for other, link in links.items() if not _GPU.fullmatch(other)},
        cores=cores if _CORES.fullmatch(cores) else "",
        numa_node=int(numa) if numa.isdigit() else None,
    )
