"""One case: start the run, disturb it, ask for verdicts, end it, and find how soon they would have come."""

from __future__ import annotations

import contextlib
import io
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

from trainspec_cli.__main__ import run as trainspec
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

from . import judge as judging
from .cases import HANG, HEALTHY, Case
from .injectors import inject, prepare, settle
from .live_run import RECENT_STEPS, WARM_STEPS, LiveRun, RunEndedError
from .recipe import arguments, write_documents

START_TIMEOUT_S = 300.0
STEPS_AFTER, HEALTHY_STEPS = 26, 200
"""Steps that the diagnosis has after an injection has begun."""
HANG_S = 12.0
"""The time that it has where no step ends any more: a tenth of the time-out after which the run itself ends."""
STALLED_S = 60.0
STEPS_ASKED = (3, 4, 6, 8, 12, 16, 20, STEPS_AFTER)
"""After the run it is asked what the events of so many steps would have shown: the target is to name within three."""
ASK_TIMEOUT_S, ASK_PAUSE_S = 240.0, 1.0


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
    named_after_s: float | None = None
    """Seconds until a hang was named."""


def run_case(case: Case, *, asks: bool = True, keep: Path | None = None) -> dict[str, Any]:
    """Return the case's line of the results. `asks` False: only what the injection does to step times."""
    begun = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="diagnose-"))
    try:
        found = _run_in(place, case, asks)
    except (RunEndedError, NoDiagnosisError, subprocess.SubprocessError, psutil.Error, OSError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    finally:
        if keep:
            shutil.copytree(place, keep / folder_name(case), dirs_exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    return {"key": case.key, "case": case.to_plain(), **found, "took_s": round(time.monotonic() - begun, 1)}


def folder_name(case: Case) -> str:
    """Return the name of the folder in which a case is kept."""
    return case.key.replace("/", "-")


def _run_in(place: Path, case: Case, asks: bool) -> dict[str, Any]:
    data = place / "documents.jsonl"
    if any(injection.mechanism == "lengths" for injection in case.injections):
        write_documents(data, case.seed)
    with ExitStack() as stack:
        run = LiveRun(case, arguments(case, data), place)
        stack.callback(run.end)
        prepare(run, case)
        run.await_step(WARM_STEPS, START_TIMEOUT_S)
        run.start_is_over()
        settle(run, case)
        run.note_use()
        begins = max((injection.step for injection in case.injections), default=0)
        run.await_step(begins, STALLED_S + START_TIMEOUT_S)
        for number, injection in enumerate(case.injections):
            if number:
                run.await_step(run.step() + RECENT_STEPS, STALLED_S)  # so that it is as strong as steps are by now
            if removable := inject(run, injection):
                stack.callback(removable.remove)
        first = run.step() + 1 if begins else 1
        asked = _ask(run, case, first) if asks else _watch(run, case, first)
        times_s = {**_medians_s(run, first), "processor_s": round(run.processor_s(), 1)}
    if not asks:
        return {"first_step": first, **times_s}
    judged = asdict(judging.judge(case, asked.verdicts, first))
    more = {**_exhaustion(case, asked, first), "named_after_s": asked.named_after_s}
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
        time.sleep(ASK_PAUSE_S if _hangs(case) else 0.2)


def ask_again(result: dict[str, Any], case: Case, kept: Path) -> dict[str, Any]:
    """Return the result with what the diagnosis says now of the run's folder as it was kept, and of how many steps,
    from the first that was disturbed on, the right answer needs the events: of `STEPS_ASKED`, None where more are
    needed. Of a hang the run's folder tells no more than was asked while it hung."""
    if "error" in result or _hangs(case):
        return result
    run, first = RunDir(kept / folder_name(case) / "run"), result["first_step"]
    verdicts = diagnose_here(run.root)
    judged = judging.judge(case, verdicts, first)
    named = _steps_until_named(run, case, first) if judged.exact and case.injections else None
    return {**result, **asdict(judged), "named_after": named, "verdicts": judging.says(verdicts)}


def _steps_until_named(run: RunDir, case: Case, first: int) -> int | None:
    ends = {event["step"]: event["time"] for event in read_events(run.events(0)) if event["type"] == "step"}
    for made in STEPS_ASKED:
        if (until := ends.get(first + made - 1)) is None:
            continue
        with tempfile.TemporaryDirectory(prefix="diagnose-") as place:
            if judging.judge(case, diagnose_here(_cut(run, until, Path(place))), first).exact:
                return made
    return None


def _cut(run: RunDir, until: float, place: Path) -> Path:
    """Return a copy of a run's folder in `place`, with the events of the time before `until`."""
    copy = place / "run"
    shutil.copytree(run.root, copy)
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
    return _verdicts(done.stdout, f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-600:]}")


def diagnose_here(folder: Path) -> list[dict[str, Any]]:
    """The same command in this process, which need not start one for each question. Raises NoDiagnosisError."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = trainspec(["diagnose", str(folder), "--json"])
    return _verdicts(printed.getvalue(), f"exit code {code}: {printed.getvalue()[-300:]}")


def _verdicts(printed: str, about: str) -> list[dict[str, Any]]:
    try:
        verdicts: list[dict[str, Any]] = json.loads(printed)["verdicts"]
    except (ValueError, KeyError):
        raise NoDiagnosisError(about) from None
    return verdicts


def _medians_s(run: LiveRun, first: int) -> dict[str, float | None]:
    """Return the median step before and after the injection; the first steps of a run are not counted."""
    steps = {event["step"]: event["step_time_s"] for event in run.steps()}
    before = [time_s for step, time_s in steps.items() if WARM_STEPS < step < first]
    after = [time_s for step, time_s in steps.items() if step > max(first, WARM_STEPS)]
    medians = {"before_s": before, "after_s": after}
    return {name: round(statistics.median(times), 4) if times else None for name, times in medians.items()}
