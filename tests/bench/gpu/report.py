"""What a folder of results holds, as text."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .record import read_json

GIB = 2**30


def show(folder: Path) -> None:
    checks = read_json(folder / "results.json").get("checks", {})
    peak_flops = _peak(checks)
    for name, record in checks.items():
        print(f"\n{name}: {record.get('about', '')}: {record['state']}, {record.get('seconds', 0):.0f} s")
        if record.get("error"):
            print(f"  {record['error'].splitlines()[-1]}")
        for line in lines_of(name, record["found"], peak_flops):
            print(f"  {line}")


def _peak(checks: dict[str, Any]) -> float | None:
    """Return the bf16 peak by the catalogue, else by measurement; None where neither is known."""
    chip = checks.get("machine", {}).get("found", {}).get("chip", {})
    return chip.get("catalogue_bf16_flops") or chip.get("measured_bf16_flops")


def lines_of(name: str, found: dict[str, Any], peak_flops: float | None) -> list[str]:
    errors = [f"{key}: FAILED: {reason(value['error'])}" for key, value in found.items() if _failed(value)]
    good = {key: value for key, value in found.items() if not _failed(value)}
    kind = name.split()[0]
    render = {"speed": _speed, "memory": _memory, "profile": _profile, "clauses": _clauses, "tests": _tests}.get(
        kind, _runs
    )
    return [*render(good, peak_flops), *errors]


def reason(error: str) -> str:
    """Return the line that says what happened: a command prints a hint below its error."""
    lines = error.splitlines()
    return next((line for line in reversed(lines) if "rror:" in line), lines[-1]).strip()[:200]


def _failed(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def _runs(found: dict[str, Any], _peak_flops: float | None) -> list[str]:
    """Figures of launched runs, and plain values of anything else."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict) and "parts_s" in value:
            lines += _run(key, value)
            continue
        simple = (
            {k: v for k, v in value.items() if isinstance(v, str | int | float)} if isinstance(value, dict) else value
        )
        lines.append(f"{key}: {simple}"[:400])
    return lines


def _run(name: str, run: dict[str, Any]) -> list[str]:
    waits = f"{run['parts_s']['data_wait'] * 1e3:.3g} ms of them waiting for data"
    copies = f"{run['h2d_copies']:g} copies of {run['h2d_bytes']:g} B a step, {run['allocations']} allocations"
    lines = [f"{name}: {run['steps']} steps of {run['step_s']:.4g} s, {waits}, {copies}"]
    result, told = run["result"], run["prediction"]
    lines.append(f"  peak memory {result['peak_memory_bytes'] / GIB:.3g} GiB, loss {run['last_loss']:.4g}")
    if told:
        memory = _against("memory planned", sum(told["memory"].values()), result["peak_memory_bytes"])
        lines.append(f"  {memory}, {_against('step planned', sum(told['time_s'].values()), run['step_s'], 1.0, 's')}")
    for save in run["saves"]:
        held_up = f"held up {save['seconds']:.3g} s, whole after {save['written_s']:.3g} s"
        lines.append(f"  checkpoint of {save['bytes'] / GIB:.3g} GiB: {held_up}")
    return [*lines, *(f"  {one['reason']}" for one in run["memory"])]


def _speed(found: dict[str, Any], peak_flops: float | None) -> list[str]:
    """The median of the rounds, MFU, and the ratio to the best peer."""
    rates: dict[str, list[float]] = {}
    flops: dict[str, float] = {}
    for key, value in found.items():
        contender = key.rpartition(" ")[0]
        rates.setdefault(contender, []).append(value["units_per_s"])
        flops[contender] = value["flops_per_s"] / value["units_per_s"]
    medians = {contender: statistics.median(values) for contender, values in rates.items()}
    peers = [rate for contender, rate in medians.items() if not contender.startswith("trainspec")]
    lines = []
    for contender, rate in medians.items():
        mfu = f", MFU {rate * flops[contender] / peak_flops:.1%}" if peak_flops else ""
        ratio = f", {rate / max(peers):.2f} of the best peer" if peers else ""
        spread = f"{min(rates[contender]):,.4g}-{max(rates[contender]):,.4g}"
        lines.append(f"{contender:16} {rate:,.4g} per second ({spread}){mfu}{ratio}")
    return lines


def _memory(found: dict[str, Any], _peak_flops: float | None) -> list[str]:
    lines = []
    for mode in (key for key in found if not key.endswith((" predicted", " traced"))):
        measured = found[mode]["peak_memory_bytes"]
        reserved = found[mode]["statistics"].get("reserved_bytes.all.peak")
        plan, trace = found.get(f"{mode} predicted", {}), found.get(f"{mode} traced", {})
        parts = [f"{mode:16} {measured / GIB:.2f} GiB"]
        parts += [f"reserved {reserved / GIB:.2f}"] if reserved else []
        parts += [_against("plan", plan.get("peak_memory_bytes"), measured)]
        parts += [_against("trace", trace.get("peak_memory_bytes"), measured)]
        parts += [_against("step planned", plan.get("step_time_s"), found[mode]["step_s"], 1.0, "s")]
        lines.append(", ".join(part for part in parts if part))
    return lines


def _against(name: str, told: float | None, measured: float, unit: float = GIB, word: str = "GiB") -> str:
    return f"{name} {told / unit:.3g} {word} ({told / measured - 1:+.1%})" if told and measured else ""


def _profile(found: dict[str, Any], peak_flops: float | None) -> list[str]:
    lines = []
    if timed := found.get("timed"):
        mfu = f", MFU {timed['flops_per_s'] / peak_flops:.1%}" if peak_flops else ""
        planned = _against("planned", found.get("predicted", {}).get("step_time_s"), timed["step_s"], 1.0, "s")
        lines.append(f"{timed['step_s']:.4g} s per step{mfu}, {planned}, {timed['device_allocations']} allocations")
    if losses := found.get("losses"):
        lines.append(f"products {losses['products_s']:.4g} s of {losses['step_s']:.4g} s")
        lines += [f"{seconds / losses['step_s']:6.1%} {name[:100]}" for name, seconds in losses["losses"]]
    return lines


def _clauses(found: dict[str, Any], _peak_flops: float | None) -> list[str]:
    return [
        f"{case:28} gradients {value['gradient_error']:.2g} of {value['gradient_bound']:.2g}, "
        f"losses {value['loss_error']:.2g}, {'kept' if value['kept'] else 'BROKEN'}, "
        f"repeats {value['repeats_to_the_bit']}, resumes {value['resumes_to_the_bit']}"
        for family in found.values()
        for case, value in family.items()
        if isinstance(value, dict)
    ]


def _tests(found: dict[str, Any], _peak_flops: float | None) -> list[str]:
    lines = []
    for file, value in found.items():
        lines.append(f"{file}: {value['passed']} passed, {len(value['failed'])} failed, {value['skipped']} skipped")
        lines += [f"  {name}: {told.splitlines()[0][:160]}" for name, told in list(value["failed"].items())[:10]]
    return lines
