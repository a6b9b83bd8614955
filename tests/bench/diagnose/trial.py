"""One case: start the run, disturb it, ask for verdicts, end it, and find how soon they would have come."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from . import judge as judging
from .cases import HANG, HEALTHY, Case
from .injectors import inject, prepare, settle
from .live_run import WARM_STEPS, LiveRun, RunEndedError
from .recipe import arguments, write_documents

START_TIMEOUT_S = 300.0
STEPS_AFTER, HEALTHY_STEPS = 26, 200
"""Steps that the diagnosis has after an injection has begun."""
HANG_S = 12.0
"""The time that it has where no step ends any more: a tenth of the time-out after which the run itself ends."""
STALLED_S = 60.0
STEPS_ASKED = (3, 4, 6, 8, 12, 16, 20, STEPS_AFTER)
"""After the run it is asked what the events of so many steps would have shown: the target is to name within three."""
ASK_TIMEOUT_S = 240.0


class NoDiagnosisError(RuntimeError):
    """`trainspec diagnose` failed, or printed no verdicts."""


@dataclass
class Asked:
    """The verdicts that came while the run went on."""

    verdicts: list[dict[str, Any]]
    step: int = 0
    """The last step when they were asked for."""
    available_bytes: int = 0
    """Memory that was left then."""
    leaked_bytes: int = 0
    """What the rank with the leak had taken since it began."""
    named_after: int | None = None
    """Steps, from the first that was disturbed on, whose events are enough for the right answer."""
    named_after_s: float | None = None


def run_case(case: Case, *, asks: bool = True, keep: Path | None = None) -> dict[str, Any]:
    """Return the case's line of the results. `asks` False: only what the injection does to step times."""
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="diagnose-"))
    try:
        found = _run_in(place, case, asks)
    except (RunEndedError, NoDiagnosisError, subprocess.SubprocessError, psutil.Error) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        if keep:
            shutil.copytree(place, keep / case.key.replace("/", "-"), dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    return {"key": case.key, "case": case.to_plain(), **found, "took_s": round(time.monotonic() - begun, 1)}


def _run_in(place: Path, case: Case, asks: bool) -> dict[str, Any]:
    data = place / "documents.jsonl"
    if any(injection.mechanism == "lengths" for injection in case.injections):
        write_documents(data, case.seed)
    with ExitStack() as stack:
        run = LiveRun(case, arguments(case, data), place)
        stack.callback(run.end)
        prepare(run, case)
        run.await_step(WARM_STEPS, START_TIMEOUT_S)
        settle(run, case)
        run.note_use()
        begins = max((injection.step for injection in case.injections), default=0)
        run.await_step(begins, STALLED_S + START_TIMEOUT_S)
        for injection in case.injections:
            if removable := inject(run, injection):
                stack.callback(removable.remove)
        first = run.step() + 1 if begins else 1
        asked = _ask(run, case, first) if asks else _watch(run, case, first)
        times_s = {**_medians_s(run, first), "processor_s": round(run.processor_s(), 1)}
    if not asks:
        return {"first_step": first, **times_s}
    judged = asdict(judging.judge(case, asked.verdicts, first))
    if judged["exact"] and case.injections and not _hangs(case):
        asked.named_after = _named_after(run, case, first)
    leaks = _exhaustion(case, asked, first)
    more = {**leaks, "named_after": asked.named_after, "named_after_s": asked.named_after_s}
    return {"first_step": first, **times_s, **judged, **more, "verdicts": judging.says(asked.verdicts)}


def _ask(run: LiveRun, case: Case, first: int) -> Asked:
    """Ask once the steps after the injection are made: asking takes a processor, which the run would miss. A hang is
    asked for again and again, since no step ends."""
    asked, begun, held_bytes = Asked([]), time.monotonic(), _leaking_bytes(run, case)
    while True:
        over = _is_over(run, case, first, begun)
        if over or _hangs(case):
            asked.step, asked.available_bytes = run.step(), psutil.virtual_memory().available
            asked.leaked_bytes = _leaking_bytes(run, case) - held_bytes
            asked.verdicts = diagnose(run.folder.root)
            if _hangs(case) and judging.judge(case, asked.verdicts, first).exact:
                asked.named_after_s = round(time.monotonic() - begun, 1)
                return asked
        if over:
            return asked
        time.sleep(0.2)


def _named_after(run: LiveRun, case: Case, first: int) -> int | None:
    """Return of how many steps, from the first that was disturbed on, the right answer needs the events; of
    `STEPS_ASKED`. The run is over."""
    written = run.steps()
    for made in STEPS_ASKED:
        ends = [event["time"] for event in written if event["step"] == first + made - 1]
        if ends and judging.judge(case, diagnose(_cut(run, ends[0])), first).exact:
            return made
    return None


def _cut(run: LiveRun, until: float) -> Path:
    """Return a copy of the run's folder with the events of the time before `until`."""
    copy = run.place / "cut"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run.folder.root, copy)
    for file in (copy / "events").glob("rank*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["time"] <= until))
    return copy


def _leaking_bytes(run: LiveRun, case: Case) -> int:
    """Return the memory of the ranks with a leak."""
    ranks = [one.rank for one in case.injections if one.mechanism == "leak" and one.rank is not None]
    return sum(run.worker(rank).memory_info().rss for rank in ranks)


def _exhaustion(case: Case, asked: Asked, first: int) -> dict[str, Any]:
    """Return the step at which a leak takes the last of the memory that is left, and the one that was told."""
    made = asked.step - first + 1
    if asked.leaked_bytes <= 0 or made <= 0:
        return {}
    true = asked.step + asked.available_bytes * made / asked.leaked_bytes
    told = judging.exhaustion_told(case, asked.verdicts, asked.step)
    return {"asked_at": asked.step, "exhausted_at": round(true), "exhaustion_told": told}


def _watch(run: LiveRun, case: Case, first: int) -> Asked:
    begun = time.monotonic()
    while not _is_over(run, case, first, begun):
        time.sleep(0.2)
    return Asked([])


def _is_over(run: LiveRun, case: Case, first: int, begun: float) -> bool:
    passed_s, made = time.monotonic() - begun, run.step() - first + 1
    if _hangs(case):
        return passed_s > HANG_S
    return made >= (HEALTHY_STEPS if case.name == HEALTHY else STEPS_AFTER) or passed_s > STALLED_S


def _hangs(case: Case) -> bool:
    return any(injection.mechanism == HANG for injection in case.injections)


def diagnose(folder: Path) -> list[dict[str, Any]]:
    """Return the verdicts on a run as its folder shows it. Raises NoDiagnosisError."""
    command = [sys.executable, "-m", "trainspec_cli", "diagnose", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    try:
        verdicts: list[dict[str, Any]] = json.loads(done.stdout)["verdicts"]
    except (ValueError, KeyError):
        raise NoDiagnosisError(f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-600:]}") from None
    return verdicts


def _medians_s(run: LiveRun, first: int) -> dict[str, float | None]:
    """Return the median step before and after the injection; the first steps of a run are not counted."""
    steps = {event["step"]: event["step_time_s"] for event in run.steps()}
    before = [time_s for step, time_s in steps.items() if WARM_STEPS < step < first]
    after = [time_s for step, time_s in steps.items() if step > max(first, WARM_STEPS)]
    medians = {"before_s": before, "after_s": after}
    return {name: round(statistics.median(times), 4) if times else None for name, times in medians.items()}
