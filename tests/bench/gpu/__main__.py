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

from .record import ItemFailed, Items, OutOfTime, read_json

BUDGET_S = 570.0
"""Of a machine that gives a command ten minutes."""


def main() -> None:
    options = parse_arguments()
    if options.wheels:
        go_on_in_environment(options)
    if options.check:
        run_check(options)
    from . import report  # from here on in a Python that has what the checks need

    if not options.show:
        whole = run_all(options)
    report.show(options.show or options.all)
    if not options.show:
        again = f"not all is checked: {' '.join(['python -m tests.bench.gpu', *sys.argv[1:]])} goes on"
        print("everything has been checked" if whole else again)


def go_on_in_environment(options: argparse.Namespace) -> None:
    """Install the wheels, and begin anew in the environment that has them."""
    from . import wheels

    started = time.monotonic()
    python = wheels.install(options.wheels, options.venv)
    place = sys.argv.index("--wheels")
    given = [*sys.argv[1:place], *sys.argv[place + 2 :]]
    left_s = options.budget_s - (time.monotonic() - started)
    os.execv(python, [python, "-m", "tests.bench.gpu", *given, "--budget-s", f"{left_s:.0f}"])


def run_all(options: argparse.Namespace) -> bool:
    """Run what is missing, as far as the time of this call goes; return True if nothing is missing any more."""
    from .checks import checks
    from .schedule import Check, Schedule

    def command(check: Check, left_s: float) -> list[str]:
        own = [
            sys.executable,
            "-m",
            "tests.bench.gpu",
            "--all",
            str(options.all),
            "--check",
            check.name,
            f"{left_s:.1f}",
        ]
        return [*own, "--device", options.device, *["--tiny"] * options.tiny]

    started = time.monotonic()
    words = options.only.split(",") if options.only else [""]
    wanted = [check for check in checks(options.tiny) if any(word in check.name for word in words)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    schedule = Schedule(wanted, options.all, command)
    for name in options.again:
        schedule.records.pop(name, None)
    return schedule.run(options.budget_s - (time.monotonic() - started))


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


def run_check(options: argparse.Namespace) -> None:
    """Run one check in this process, which ends."""
    from .checks import checks
    from .schedule import GOES_ON_ANEW, OUT_OF_TIME

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

    from .schedule import kill_all

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_all(os.getpid())

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
