"""Inject, ask, judge: `python -m tests.bench.diagnose --causes all --count 30 --seed 1 --out FILE`.

Runs cases one after another, or `--jobs` at a time, and appends a line of JSON for each to FILE; those that are there
already are passed over, unless they failed. Then prints the confusion matrix of all that FILE holds. Without
`--held-out` two thirds of the cases are run, with it the last third, which nobody is to look at before the end.
`--again AGAIN` runs nothing: it asks the diagnosis of today about the folders that `--keep` has kept, and after how
many steps it would have known, and writes that to AGAIN. Needs root, for control groups and network namespaces.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `lab`, as in the tests

from lab import hosts, quota

from .cases import Case, case_names, draw_case, is_held_out
from .matrix import misses, render
from .trial import ask_again, run_case


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs would not hear SIGINT
        signal.signal(number, _end)
    options = _parse()
    if why := quota.lacking() or hosts.lacking():
        sys.exit(f"cannot inject here: {why}")
    if options.again:
        _ask_again(options)
    elif options.jobs > 1:
        _run_jobs(options.jobs)
    elif not options.matrix:
        _run_slice(options)
    if not options.slice and not options.effects:
        results = [
            result for result in _read(options.again or options.out) if _wanted(result["case"]["index"], options)
        ]
        print(render(results))
        for line in misses(results):
            print(f"miss: {line}")


def _end(*_: object) -> None:
    """End the bench with all that it has started; a second signal does not end it in the middle of that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.exit("ended by a signal")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--causes", default="ten", help="ten, all, pairs, or names with commas")
    parser.add_argument("--count", type=int, default=30, help="cases of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true", help="the third that is left to the end")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--slice", default="", help="I/N: every Nth case, from the Ith on")
    parser.add_argument("--effects", action="store_true", help="only measure what injections do to step times")
    parser.add_argument("--matrix", action="store_true", help="run nothing")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--again", type=Path, help="run nothing: ask again of the folders of --keep, and write here")
    options = parser.parse_args()
    if options.again and not options.keep:
        parser.error("--again needs --keep")
    return options


def _run_slice(options: argparse.Namespace) -> None:
    number, of = map(int, (options.slice or "0/1").split("/"))
    for case in list(_cases(options))[number::of]:
        if case.key in {result["key"] for result in _read(options.out) if "error" not in result}:
            continue
        result = run_case(case, asks=not options.effects, keep=options.keep)
        with options.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(_summary(result), flush=True)


def _ask_again(options: argparse.Namespace) -> None:
    known = {result["key"] for result in _read(options.again)}
    for result in _read(options.out):
        if result["key"] not in known and _wanted(result["case"]["index"], options):
            case = result["case"]
            asked = ask_again(result, draw_case(case["name"], case["index"], case["seed"]), options.keep)
            with options.again.open("a") as file:
                file.write(json.dumps(asked) + "\n")
            print(_summary(asked), flush=True)


def _run_jobs(jobs: int) -> None:
    """Each job is a process: its control groups and network namespaces bear its number."""
    command = [sys.executable, "-m", __spec__.parent, *sys.argv[1:], "--jobs", "1"]
    started = [subprocess.Popen([*command, "--slice", f"{number}/{jobs}"]) for number in range(jobs)]
    try:
        codes = [job.wait() for job in started]
    finally:
        for job in started:
            job.terminate()
    if any(codes):
        sys.exit("a job failed")


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the first case of each cause, then the second of each, and so on."""
    for index in range(options.count):
        if _wanted(index, options):
            yield from (draw_case(name, index, options.seed) for name in case_names(options.causes))


def _wanted(index: int, options: argparse.Namespace) -> bool:
    return is_held_out(index) == options.held_out


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each case: one that failed is run again."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({result["key"]: result for result in map(json.loads, lines)}.values())


def _summary(result: dict[str, Any]) -> str:
    shown = ("error", "exact", "cause", "named_after", "before_s", "after_s", "took_s")
    return f"{result['key']}: " + ", ".join(f"{key} {result[key]}" for key in shown if key in result)


if __name__ == "__main__":
    main()
