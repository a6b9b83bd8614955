"""Waits that are left out, and random orders of the streams: `python -m tests.bench.races plants [NAME...]`, or
`python -m tests.bench.races schedules --minutes 9 --seen FILE`.

`plants` leaves out one wait of the engine or of FSDP2 at a time, and trains in random orders on emulated devices until
a loss, a gradient norm or a value of a checkpoint differs from a CPU's, or an error shows it. Prints `found` with the
number of orders, `NOT FOUND`, or `NOT REACHED` if the case does not run the changed line; ends with 1 then.

`schedules` trains every layout in random orders without a plant, for that many minutes, and adds the results to FILE;
call it again to continue. Prints the number of orders by layout, and each one whose bits differ from a CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ORDERS = 12
"""Random orders that are tried for a plant."""
HANGS_S = 400.0
BATCH = 8
"""Orders of one process."""
PLANT_STEPS = 5
"""The loader's memory is used again after three batches."""

FSDP = "torch.distributed.fsdp._fully_shard"
COLLECTIVES = f"{FSDP}._fsdp_collectives"
GROUP = f"{FSDP}._fsdp_param_group"
STATE = f"{FSDP}._fsdp_state"
ENGINE = "trainspec_cli.engine"
DATA_PARALLEL = f"{ENGINE}.parallel.data_parallel"
EXCHANGE = f"{ENGINE}.comm.exchange"
LOADER = f"{ENGINE}.data.loader"

Change = tuple[str, str, str]
"""Module, text, other text."""


@dataclass(frozen=True)
class Plant:
    case: str
    """A name in `wings.emulated.schedules.CASES`."""
    changes: tuple[Change, ...]


def unwaited(case: str, module: str, call: str) -> Plant:
    """Return a plant that starts an exchange and does not wait for it."""
    return Plant(case, ((module, call, call[:-1] + ", async_op=planted())"),))


def without(case: str, module: str, line: str, *others: Change) -> Plant:
    """Return a plant that leaves a statement out."""
    return Plant(case, ((module, line, re.sub(r"\S.*", "planted()", line, count=1)), *others))


OURS = "                        torch.accelerator.current_stream().wait_event(event)\n"
EARLIER = (DATA_PARALLEL, OURS, "                        planted()\n")
"""The engine makes some of FSDP2's waits a little earlier, to time them: both have to be left out."""

PLANTS = {
    "a batch's copy is overwritten": without("one", LOADER, "            self.copied.synchronize()\n"),
    "a batch in use is overwritten": without("one", LOADER, "            self.used.wait()\n"),
    "a batch is read before its copy": without(
        "one", LOADER, "            slot.copied.wait(torch.accelerator.current_stream(self._device))\n"
    ),
    "the copy of a batch is not marked": without("one", LOADER, "            self.copied.record()\n"),
    "the use of a batch is not marked": without(
        "one", LOADER, "            slot.used.record(torch.accelerator.current_stream(self._device))\n"
    ),
    "a checkpoint is written before its copy": without(
        "one", f"{ENGINE}.checkpoint.saver", "            wait_for(copied)\n"
    ),
    "a step's figures are read early": Plant(
        "one",
        (
            (
                f"{ENGINE}.observe.clock",
                "        wait_for(moment)\n        if not isinstance",
                "        planted()\n        if not isinstance",
            ),
        ),
    ),
    "a step's noise is read early": without("zero3", f"{ENGINE}.run.trainer", "        done.segments.wait()\n"),
    "sum over tp": unwaited("tp_plain", EXCHANGE, "            dist.all_reduce(x, group=self.group)"),
    "exchange along the sequence": Plant(
        "tp",
        (
            (
                EXCHANGE,
                "                wait()\n                return lambda: None\n",
                "                if not (at_once and planted()):\n                    wait()\n"
                "                return lambda: None\n",
            ),
        ),
    ),
    "gradient of a region's input": without(
        "tp",
        EXCHANGE,
        "            end()\n            return mine_BSD",
    ),
    "gradient of a region's output": without("tp", EXCHANGE, "            end()\n            return whole_BSD"),
    "sum of a region's gradient": without("tp_plain", EXCHANGE, "            end()\n            return total"),
    "rows of a sum": unwaited("zero3", EXCHANGE, "_reduce_scatter(output, whole, group=group, **options)"),
    "the step's agreement": unwaited("dp", f"{ENGINE}.run.step", "dist.all_reduce(agreed)"),
    "counts of expert copies": unwaited(
        "ep",
        f"{ENGINE}.parallel.expert",
        "dist.all_to_all_single(came_nL, counts_nL.contiguous(), group=self.peers.group)",
    ),
    "expert copies": unwaited(
        "ep",
        f"{ENGINE}.parallel.expert",
        "dist.all_to_all_single(received, x_MD.contiguous(), list(came), list(sent), group=self.peers.group)",
    ),
    "heads of ulysses": unwaited(
        "ulysses",
        f"{ENGINE}.parallel.context",
        "dist.all_to_all_single(received, sent, group=self.peers.group)",
    ),
    "keys of the ring": without("ring", f"{ENGINE}.parallel.context", "            work.wait()\n"),
    "a stage's message": Plant(
        "1f1b",
        (
            (
                f"{ENGINE}.parallel.pipeline",
                "            work.wait()\n        return",
                "            planted()\n        return",
            ),
        ),
    ),
    "encoded rows": unwaited(
        "dp_int8",
        f"{ENGINE}.comm.compressed",
        "dist.all_to_all_single(received_RB, sent_RB.contiguous(), group=self.group)",
    ),
    "encoded sums": unwaited(
        "dp_int8", f"{ENGINE}.comm.compressed", "all_gather(gathered_B, own_B.contiguous(), group=self.group)"
    ),
    "whole matrices of muon": unwaited(
        "zero3_muon",
        f"{ENGINE}.optim.whole",
        "dist.all_to_all_single(received, out, in_sizes, out_sizes, group=group)",
    ),
    "a shard's whole tensor": unwaited(
        "tp_plain", f"{ENGINE}.shares", "dist.all_gather(gathered, padded, group=cut.group)"
    ),
    # With two kinds of memory: otherwise the parameters' gradients keep the buffer until the update.
    "a gradient freed early": without(
        "one_offload",
        DATA_PARALLEL,
        "        buffer.record_stream(torch.accelerator.current_stream(buffer.device))\n",
    ),
    "parts of a changed layout": without("moved", f"{ENGINE}.checkpoint.reshard", "            work.wait()\n"),
    "gather before the copies are in": without(
        "zero3", COLLECTIVES, "    all_gather_stream.wait_stream(all_gather_copy_in_stream)\n"
    ),
    "gathered parameters are read early": without(
        "zero3", COLLECTIVES, "        device_handle.current_stream().wait_event(all_gather_event)\n", EARLIER
    ),
    "gradients are scattered early": without(
        "zero3", COLLECTIVES, "    reduce_scatter_stream.wait_stream(current_stream)\n"
    ),
    "replicas sum before shards": Plant(
        "hsdp",
        (
            (
                COLLECTIVES,
                "        all_reduce_stream.wait_stream(reduce_scatter_stream)\n        with",
                "        planted()\n        with",
            ),
        ),
    ),
    "gathered buffers are used again early": without(
        "zero3",
        GROUP,
        "            self.comm_ctx.all_gather_copy_in_stream.wait_event(event)\n",
    ),
    "parameters are gathered before their update": Plant(
        "zero3",
        (
            (
                STATE,
                "                self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)\n"
                "                self._comm_ctx.all_gather_stream.wait_stream(current_stream)\n",
                "                planted()\n",
            ),
        ),
    ),
    "gradients are used before their sum": without(
        "zero3", GROUP, "            self.device_handle.current_stream().wait_event(event)\n", EARLIER
    ),
    "a sum's input is freed early": without(
        "zero3",
        GROUP,
        "                        self.device_handle.current_stream().wait_event(oldest.event)\n",
        EARLIER,
    ),
    # With several exchanges in a step, FSDP2 adds gradients on the host, and waits for each copy there.
    "gradients in host memory are read early": without(
        "one_offload", GROUP, "                fsdp_param.grad_offload_event.synchronize()\n"
    ),
}


class Ranks:
    """A process that runs jobs, each on new ranks, which are its forks (`wings.emulated.schedules`)."""

    def __enter__(self) -> Ranks:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wings.emulated.schedules"],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def run(self, number: int, job: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """Run a job; return what its ranks report. If one fails, or after the limit, all are stopped."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job | {"ranks": number, "limit_s": limit_s}) + "\n")
        self._process.stdin.flush()
        printed = self._process.stdout.readline()
        assert printed, "the process that forks the ranks has ended"
        lines: list[dict[str, Any]] = json.loads(printed)
        return lines


@dataclass(frozen=True)
class Found:
    order: int
    """The number of orders until a plant was found."""
    by: str
    """What showed it."""


def find(ranks: Ranks, name: str, expected: Path, orders: int = ORDERS) -> Found | None:
    """Return how a plant was found; None if it was not. `expected`: a folder for the runs on CPUs, which are made
    without the plant. Raises AssertionError if the ranks never reach it."""
    plant = PLANTS[name]
    job = {"cases": [plant.case], "steps": PLANT_STEPS, "expected": str(expected), "seeds": []}
    if not (expected / f"{plant.case}.pt").exists():
        failed = ranks.run(processes(plant.case), job, HANGS_S)
        assert (expected / f"{plant.case}.pt").exists(), failed
    job |= {"seeds": [*range(orders)], "plant": plant.changes, "stop": 1}
    reported = ranks.run(processes(plant.case), job, HANGS_S)
    lines = [line for line in reported if "planted" not in line]
    reached = {line["planted"] for line in reported if "planted" in line}
    counted = {number for number, (*_, other) in enumerate(plant.changes) if "planted()" in other}
    assert reached == counted, f"{name}: of the changes {counted}, {reached} are reached: {lines}"
    for number, line in enumerate(lines, 1):
        if line["differing"]:
            return Found(number, str(line["first"][-1]).strip().splitlines()[-1][:120])
    return None  # also if time was short: that shows nothing


def processes(case: str) -> int:
    from wings.emulated.schedules import CASES

    return CASES[case].case.layout.world_size


def try_plants(names: Sequence[str], expected: Path) -> int:
    missed = 0
    expected.mkdir(parents=True, exist_ok=True)
    with Ranks() as ranks:
        for name in names or PLANTS:
            try:
                found = find(ranks, name, expected)
                shown = "NOT FOUND" if found is None else f"found, order {found.order}: {found.by}"
            except AssertionError as error:
                found = None
                shown = f"NOT REACHED: {error}"
            missed += found is None
            print(f"{name:45} {shown}", flush=True)
    return int(missed > 0)


def try_schedules(minutes: float, seen: Path, only: Sequence[str]) -> int:
    from wings.emulated.schedules import CASES

    ends_at = time.monotonic() + 60 * minutes
    lines = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    with Ranks() as ranks:
        while (left_s := ends_at - time.monotonic()) > 0:
            done = Counter(line["case"] for line in lines)
            # The case with the fewest orders first: the CPU's run is worth several orders, and the first one is slow.
            case = min(only or CASES, key=lambda case: done[case])
            first = 1000 + done[case]
            job = {"cases": [case], "seeds": [*range(first, first + BATCH)], "steps": 2}
            new = [{"case": case} | line for line in ranks.run(processes(case), job, left_s)]
            lines += new
            with seen.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
            for line in new:
                if line["differing"]:
                    print(json.dumps(line), flush=True)
    done = Counter(line["case"] for line in lines)
    print("  ".join(f"{case} {number}" for case, number in sorted(done.items())))
    other = sum(bool(line["differing"]) for line in lines)
    print(f"{len(lines)} orders in {len(done)} layouts; {other} differ from a CPU")
    return int(other > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    plants = commands.add_parser("plants")
    plants.add_argument("names", nargs="*", choices=[[], *PLANTS])
    plants.add_argument("--expected", type=Path, help="keep the CPU's runs in this folder")
    schedules = commands.add_parser("schedules")
    schedules.add_argument("--minutes", type=float, default=9.0)
    schedules.add_argument("--seen", type=Path, required=True)
    schedules.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.command == "plants":
        with tempfile.TemporaryDirectory(prefix="races") as folder:
            return try_plants(given.names, given.expected or Path(folder))
    return try_schedules(given.minutes, given.seen, given.only)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    sys.exit(main())
