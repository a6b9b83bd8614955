"""Rules for the options of a Slurm job: forms of times, sizes and GPUs as sbatch(1) has them, and further options that
contradict what the script asks for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

PREFIX = "cluster.slurm"
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)|(?P<plain>\d+(:\d+){0,2})"
)
TIME_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
NO_LIMIT = ("unlimited", "infinite")
"""Words that Slurm takes for a time without an end."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:(?P<type>[\w.+-]*[A-Za-z_][\w.+-]*)(?::(?P<typed>[1-9]\d*))?|(?P<number>[1-9]\d*))", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

OF_SCRIPT = {
    "job-name": f"{PREFIX}.job_name",
    "nodes": "cluster.num_nodes",
    "ntasks": "cluster.num_nodes and cluster.devices_per_node: a node has one task, which starts its processes",
    "ntasks-per-node": "cluster.devices_per_node: a node has one task, which starts its processes",
    "output": "run.dir, whose logs/ holds the job's log",
    "open-mode": "nothing: a job that is requeued goes on with its log",
    "array": "--sweep, which makes the array",
    "signal": f"{PREFIX}.warn_s",
    "requeue": f"{PREFIX}.max_requeues",
    "no-requeue": f"{PREFIX}.max_requeues=0",
}
"""Options that every script has -> where they are set."""
KEYS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "constraint": "constraint",
    "exclude": "exclude",
    "dependency": "dependency",
    "mem": "mem",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "cpus-per-task": "cpus_per_task",
    "exclusive": "exclusive",
    "oversubscribe": "exclusive",
}
"""Options that contradict a key of `cluster.slurm` that is set -> the key."""
OF_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres")
SHORT = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "a": "array",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
    "c": "cpus-per-task",
    "C": "constraint",
    "x": "exclude",
    "d": "dependency",
    "G": "gpus",
    "s": "oversubscribe",
}
"""sbatch's letters for those options."""


def time_limit_s(text: str) -> float | None:
    """Return the seconds of one of Slurm's forms of time, infinity for no limit; None where it is none of them."""
    if text.lower() in NO_LIMIT:
        return float("inf")
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    if plain := found["plain"]:
        numbers = [int(part) for part in plain.split(":")]
        hours, minutes, seconds = [0, *numbers, 0] if len(numbers) == 1 else [0] * (3 - len(numbers)) + numbers
        days = 0
    else:
        days, hours, minutes, seconds = (int(found[part] or 0) for part in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or float("inf")


def gpus_of_node(text: str, devices: int) -> str | None:
    """Return the GPUs of a node as Slurm writes them, `h100:8` or `8`; a type alone gets the number of `devices`. None
    where the text is neither type, number nor both."""
    found = _GPUS.fullmatch(text)
    if found is None:
        return None
    return f"{text}:{devices}" if found["type"] and not found["typed"] else text


def times(spec: RunSpec) -> Iterator[Problem]:
    slurm, path = spec.cluster.slurm, f"{PREFIX}.time"
    if slurm.time is None:
        return
    limit_s = time_limit_s(str(slurm.time))
    if limit_s is None:
        message = f"`{path}` is `{slurm.time}`, which is no time of Slurm's; {TIME_FORMS} is needed"
        yield Problem("bad_time", message, path, f"such as two hours: {path}=2:00:00 (2:00 would be two minutes)")
    elif limit_s <= slurm.warn_s:
        read = f"{limit_s:g} s" + (" (a number alone is minutes)" if str(slurm.time).isdigit() else "")
        message = f"`{path}` is `{slurm.time}`, {read}: the job would be asked to end as soon as it starts"
        hint = (
            f"type a longer one, such as {path}=2:00:00 for two hours, or {PREFIX}.warn_s below {limit_s:g} "
            f"(it is {slurm.warn_s})"
        )
        yield Problem("out_of_range", message, path, hint)


def memory(spec: RunSpec) -> Iterator[Problem]:
    text, path = spec.cluster.slurm.mem, f"{PREFIX}.mem"
    if text is not None and not _MEMORY.fullmatch(str(text)):
        message = f"`{path}` is `{text}`; a whole number with K, M, G or T is needed"
        yield Problem("bad_size", message, path, f"such as {path}=64G; all memory of a node is 0G")


def gpus(spec: RunSpec) -> Iterator[Problem]:
    slurm, devices, path = spec.cluster.slurm, spec.cluster.devices_per_node, f"{PREFIX}.gpus_per_node"
    text = slurm.gpus_per_node
    if text is None:
        return
    found = _GPUS.fullmatch(str(text))
    if found is None:
        message = f"`{path}` is `{text}`; a type and number such as h100:8, a number or a type is needed"
        hint = f"the option itself is {PREFIX}.gpu_request, such as gres"
        yield Problem("bad_gpus", message, path, hint)
    elif slurm.gpu_request == "none":
        message = f"`{path}` is `{text}`, and `{PREFIX}.gpu_request` is none, which asks for no GPUs"
        yield Problem("unsupported", message, path, f"leave out one of them, or type {PREFIX}.gpu_request=gres")
    elif spec.cluster.device == "cuda" and isinstance(devices, int):
        asked = int(found["typed"] or found["number"] or devices)
        if asked < devices:
            message = f"`{path}` asks for {asked} GPUs of a node, and `cluster.devices_per_node` uses {devices}"
            yield Problem("out_of_range", message, path, f"type cluster.devices_per_node={asked}, or ask for {devices}")


def container(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.cluster.slurm
    keys = ("container_runtime", "container_mounts", "container_python", "container_gpus", "container_env")
    defaults = {name: slurm.__dataclass_fields__[name].default for name in keys}
    for name in keys if slurm.container_image is None else ():
        if getattr(slurm, name) != defaults[name]:
            path = f"{PREFIX}.{name}"
            message = f"`{path}` is set, and `{PREFIX}.container_image` is null: there is no container"
            yield Problem("unsupported", message, path, f"type {PREFIX}.container_image=/images/torch.sif")
    for mount in slurm.container_mounts.split(",") if slurm.container_mounts is not None else ():
        parts = mount.split(":")
        if not all(parts) or len(parts) > 3:
            path = f"{PREFIX}.container_mounts"
            message = f"`{path}` has `{mount}`; a folder outside, and inside, and options are needed"
            yield Problem("bad_mount", message, path, "such as /data:/data:ro, and commas between several")
    for name in slurm.container_env:
        if not _VARIABLE.fullmatch(name):
            path = f"{PREFIX}.container_env"
            message = f"`{path}` has `{name}`, which is no variable's name; its value is that outside"
            yield Problem("bad_name", message, path, f"such as {path}=[NCCL_IB_HCA]")
    if slurm.container_image is not None and slurm.container_runtime == "pyxis" and slurm.container_gpus != "auto":
        path = f"{PREFIX}.container_gpus"
        message = f"`{path}` is {slurm.container_gpus}, and pyxis has no such option: the site's hooks give GPUs"
        yield Problem("unsupported", message, path, f"leave it out, or type {PREFIX}.container_runtime=apptainer")


def further_options(spec: RunSpec) -> Iterator[Problem]:
    """sbatch takes the last of two options of one name without a word."""
    slurm, path = spec.cluster.slurm, f"{PREFIX}.sbatch_lines"
    set_keys = {option: f"{PREFIX}.{key}" for option, key in KEYS.items() if getattr(slurm, key) not in (None, False)}
    owners = {**OF_SCRIPT, **set_keys}
    if slurm.gpu_request != "none" and (spec.cluster.device == "cuda" or slurm.gpus_per_node is not None):
        owners |= dict.fromkeys(OF_GPUS, f"{PREFIX}.gpus_per_node, and {PREFIX}.gpu_request=none asks for none")
    for line in slurm.sbatch_lines:
        if not line.lstrip().startswith("-"):
            message = f"`{path}` has `{line}`, which is no option of sbatch: it stands after #SBATCH in the script"
            yield Problem("bad_option", message, path, "write the option alone, such as --mail-type=END")
            continue
        for name, value in _options(line):
            if name not in owners or (name == "gres" and slurm.gpu_request != "gres" and "gpu" not in value):
                continue
            message = f"`{path}` has `{line}`, and the script has such an option already: sbatch would take one of them"
            yield Problem("contradiction", message, path, f"leave it out; it is set by {owners[name]}")


def _options(line: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a line by their long names, each with its value."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an unmatched quotation mark, which sbatch itself refuses
        return
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield name, value if equals else following
        elif word.startswith("-") and word[1:2] in SHORT:
            yield SHORT[word[1]], word[2:] or following


SLURM_RULES = (times, memory, gpus, container, further_options)
