"""Everything that this project says of a GPU, checked on one: `python -m tests.bench.gpu --all OUT`.

    python -m tests.bench.gpu.wheels wheels                   # where there is a network: what the machine may lack
    python -m tests.bench.gpu --all OUT --wheels wheels       # on the GPU; again with the same OUT goes on
    python -m tests.bench.gpu --all OUT --device cpu --tiny   # without one: runs it through, its figures say nothing

Runs the checks of `checks.py` in order of worth, each in a process of its own with a time limit, for `--budget-s`
seconds a call. OUT/results.json is whole at any moment; what failed is in it with its reason and is not tried again
(`--again NAME`). OUT/allocations.jsonl.gz holds what the allocator was asked (`allocations.py`), OUT/log.txt what the
checks said.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

from . import report, wheels
from .record import ItemFailed, Items, OutOfTime, read_json
from .schedule import GOES_ON_ANEW, OUT_OF_TIME, Check, Schedule, kill_all

BUDGET_S = 570.0
"""Of a machine that gives a command ten minutes."""


def main() -> None:
    started = time.monotonic()
    options = parse_arguments()
    python = sys.executable
    if options.wheels:
        python = wheels.install(options.wheels, options.venv)
    if options.check:
        run_check(options)
    if options.show:
        report.show(options.show)
        return
    from .checks import checks

    wanted = [
        one for one in checks(options.tiny) if not options.only or any(w in one.name for w in options.only.split(","))
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    schedule = Schedule(wanted, options.all, lambda check, left_s: command_of(python, check, left_s, options))
    for name in options.again:
        schedule.records.pop(name, None)
    whole = schedule.run(options.budget_s - (time.monotonic() - started))
    report.show(options.all)
    print("everything has been checked" if whole else f"not all is checked: {' '.join(sys.argv[1:])} goes on")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="OUT", help="run what is missing in this folder")
    parser.add_argument("--show", type=Path, metavar="OUT", help="print what this folder holds, and run nothing")
    parser.add_argument("--only", help="checks whose names hold one of these words: speed,memory")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="forget what this check has found")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds of this call (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="cuda, xpu, ...; cpu with --tiny (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds")
    parser.add_argument("--wheels", type=Path, help="install from this folder what is missing here")
    parser.add_argument(
        "--venv", type=Path, default=Path("/tmp/trainspec-gpu-venv"), help="where (default: %(default)s)"
    )
    parser.add_argument("--check", nargs=2, metavar=("NAME", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.all and not options.show:
        parser.error("--all OUT or --show OUT is needed")
    return options


def command_of(python: str, check: Check, left_s: float, options: argparse.Namespace) -> list[str]:
    command = [python, "-m", "tests.bench.gpu", "--all", str(options.all), "--check", check.name, f"{left_s:.1f}"]
    return [*command, "--device", options.device, *["--tiny"] * options.tiny]


def run_check(options: argparse.Namespace) -> None:
    """Run one check in this process, which ends."""
    from .checks import checks

    name, left_s = options.check
    end_with_parent(os.getppid())
    (check,) = (one for one in checks(options.tiny) if one.name == name)
    file = options.all / "running.json"
    found = read_json(file).get("found", {})
    items = Items(file, name, time.monotonic() + float(left_s), found, options.all)
    code = 0
    try:
        check.find(items, options.device, options.tiny)
    except OutOfTime:
        code = OUT_OF_TIME
    except ItemFailed as failed:
        print(items.found[str(failed)]["error"])
        code = GOES_ON_ANEW
    sys.stdout.flush()
    os._exit(code)  # what a failed step has left may not end by itself


def end_with_parent(parent: int) -> None:
    """End this process, and what it has started, when its parent is gone: that call was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_all(os.getpid())

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
