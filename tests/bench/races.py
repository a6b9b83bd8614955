"""Waits that are left out, and random orders of the streams: `python -m tests.bench.races plants [NAME...]`, or
`python -m tests.bench.races schedules --minutes 9 --seen FILE`.

`plants` leaves out one wait of the engine or of FSDP2 at a time, and trains in random orders on emulated devices until
a loss, a gradient norm or a value of a checkpoint differs from a CPU's, or an error shows it. Prints `found` with the
number of orders, or `NOT FOUND`; ends with 1 if one was not found.

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

from trainspec_cli.core.environment_names import STORE_FILE

TESTS = Path(__file__).parents[1]
ORDERS = 12
"""Random orders that are tried for a plant."""
HANGS_S = 400.0
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
    return Plant(case, ((module, call, call[:-1] + ", async_op=True)"),))


def without(case: str, module: str, line: str, *others: Change) -> Plant:
    """Return a plant that leaves a statement out."""
    return Plant(case, ((module, line, re.sub(r"\S.*", "pass", line, count=1)), *others))


OURS = "                        torch.accelerator.current_stream().wait_event(event)\n"
EARLIER = (DATA_PARALLEL, OURS, "                        pass\n")
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
                "        if not isinstance",
            ),
        ),
    ),
    "sum over tp": unwaited("tp_plain", EXCHANGE, "            dist.all_reduce(x, group=self.group)"),
    "exchange along the sequence": Plant(
        "tp",
        (
            (
                EXCHANGE,
                "            if has_to_end or at_once:\n",
                "            if at_once:\n                return lambda: None\n            if has_to_end:\n",
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
    "rows of a sum": without("zero3", EXCHANGE, "        work.wait()\n"),
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
                "            pass\n        return",
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
        "zero3", f"{ENGINE}.shares", "dist.all_gather(gathered, padded, group=cut.group)"
    ),
    "a gradient freed early": without(
        "dp",
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
                "        with",
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
                "",
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
    "gradients in host memory are read early": without(
        "zero3_offload", GROUP, "                fsdp_param.grad_offload_event.synchronize()\n"
    ),
}


def run(number: int, job: dict[str, Any], ends_at: float) -> list[dict[str, Any]]:
    """Run the ranks of a job; return what they report. If one fails, or at that moment, all are stopped."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory(prefix="races") as folder:
        base = {"PYTHONPATH": path, STORE_FILE: f"{folder}/store", "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        base |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
        command = [sys.executable, "-m", "wings.emulated.schedules", json.dumps(job)]
        printed = [Path(folder) / f"{rank}.jsonl" for rank in range(number)]
        ranks = []
        for rank, out in enumerate(printed):
            with out.open("w") as stdout, out.with_suffix(".err").open("w") as stderr:
                environment = os.environ | base | {"RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, cwd=TESTS, stdout=stdout, stderr=stderr))
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() > ends_at:
                    break
                time.sleep(0.05)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        lines = [json.loads(line) for out in printed for line in out.read_text().splitlines()]
        if any(rank.returncode > 0 for rank in ranks) and not any(line["differing"] for line in lines):
            lines.append({"differing": 1, "first": [printed[0].with_suffix(".err").read_text()[-2000:]]})
        return lines


def find(name: str, expected: Path, orders: int = ORDERS) -> tuple[int, str] | None:
    """Return the number of orders after which a plant was found, and what showed it; None if it was not. `expected`: a
    folder for the runs on CPUs, which are made without the plant."""
    plant = PLANTS[name]
    job = {"cases": [plant.case], "steps": PLANT_STEPS, "expected": str(expected), "seeds": []}
    if not (expected / f"{plant.case}.pt").exists():
        failed = run(processes(plant.case), job, time.monotonic() + HANGS_S)
        assert (expected / f"{plant.case}.pt").exists(), failed
    job |= {"seeds": [*range(orders)], "plant": plant.changes, "stop": 1}
    lines = run(processes(plant.case), job, time.monotonic() + HANGS_S)
    for number, line in enumerate(lines, 1):
        assert "has no such text" not in str(line["first"]), line["first"]
        if line["differing"]:
            return number, str(line["first"][-1]).strip().splitlines()[-1][:120]
    return None if len(lines) >= orders else (len(lines) + 1, "the ranks hang")


def processes(case: str) -> int:
    from wings.emulated.schedules import CASES

    return CASES[case].case.layout.world_size


def try_plants(names: Sequence[str], expected: Path) -> int:
    missed = 0
    expected.mkdir(parents=True, exist_ok=True)
    for name in names or PLANTS:
        found = find(name, expected)
        missed += found is None
        print(f"{name:45} {'NOT FOUND' if found is None else f'found, order {found[0]}: {found[1]}'}", flush=True)
    return int(missed > 0)


def try_schedules(minutes: float, seen: Path, only: Sequence[str]) -> int:
    from wings.emulated.schedules import CASES

    ends_at = time.monotonic() + 60 * minutes
    lines = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    while time.monotonic() < ends_at:
        done = Counter(line["case"] for line in lines)
        # Cases with the fewest orders first; each process start is worth several orders.
        cases = sorted(only or CASES, key=lambda case: done[case])
        size = processes(cases[0])
        batch = [case for case in cases if processes(case) == size][:6]
        first = 1000 + min(done[case] for case in batch)
        job = {"cases": batch, "seeds": [*range(first, first + 5)], "steps": 2}
        new = run(size, job, ends_at)
        lines += new
        with seen.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        for line in new:
            if line["differing"]:
                print(json.dumps(line), flush=True)
    done = Counter(line["case"] for line in lines if "case" in line)
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
