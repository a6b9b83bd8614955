"""What replica groups cost and save on this machine: `python tests/bench/elastic.py series|soak|overhead [options]`.

series    kill -9 of random groups at random moments, each after the last one has healed: stalls, lost steps, recoveries
soak      one fault every 20 s for 10 minutes, whatever has healed by then
overhead  step time of a 30M-parameter llama in replica groups against the same processes as plain replicas
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.events import EventTail, read_events
from trainspec_cli.run.folder.paths import RunDir

TINY = ("recipe=tiny", "optim.schedule.kind=constant", "train.max_steps=10000000", "train.log_interval_steps=1000")
ELASTIC = ("resilience=elastic", "resilience.max_restarts_per_hour=100000", "resilience.exchange_timeout_s=10")
MODEL_30M = (
    *("model.num_layers=8", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=64"),
    *("model.ffn_size=1376", "model.vocab_size=8192", "data.tokenizer.vocab_size=8192", "model.tied_embeddings=true"),
    *("data.seq_len=256", "batching.global_batch_size=8"),
)


class Launched:
    """A run that goes on until it is asked to stop."""

    def __init__(self, root: Path, *arguments: str):
        self.run = RunDir(root)
        command = [sys.executable, "-m", "trainspec_cli", "launch", f"run.dir={root}", "--force", *arguments]
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        self._tail, self.events = EventTail(self.run.events(0)), []

    def read(self) -> list[dict[str, Any]]:
        """The events so far."""
        assert self.process.poll() is None, "the run has ended"
        self.events += self._tail.read()
        return self.events

    def wait_for(self, kind: str, since: float, group: int | None = None, timeout_s: float = 300) -> dict[str, Any]:
        """The first event after the time `since` that is of `kind` (a change of a group, or a step)."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.read():
                what = event.get("change") or event["type"]
                if event["time"] >= since and what == kind and group in (None, event.get("group")):
                    return event
            time.sleep(0.02)
        raise TimeoutError(f"{kind} of group {group}")

    def worker(self, group: int, rank: int) -> psutil.Process | None:
        """Of the group's present start."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get(GROUP) == str(group) and rank_of(process) == rank:
                return process
        return None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(180)


def check(run: RunDir) -> str:
    """Every sample once, one sequence without gaps, equal weights. A rank killed between a step and its note of it may
    have left its part of it unnoted."""
    files = sorted(run.events_folder.glob("group*/rank00000.jsonl"))
    own = [event for file in files for event in read_events(file)]
    portions = {(e["step"], *e["took"]) for e in own if e["type"] == "step"}
    taken = Counter(p for _, start, samples in portions for p in range(start, start + samples))
    made = [e for e in read_events(run.events(0)) if e["type"] == "step"]
    begins = dict(zip((e["step"] for e in made), accumulate((e["samples"] for e in made), initial=0), strict=False))
    before_a_loss = {e["step"] - 1 for e in read_events(run.events(0)) if e.get("change") == "left"}
    samples = {e["step"]: range(begins[e["step"]], begins[e["step"]] + e["samples"]) for e in made}
    unnoted = {step for step, positions in samples.items() if not taken.keys() >= set(positions)}
    digests = {e["weights_sha256"] for e in own if e["type"] == "end"}
    whole = [e["step"] for e in made] == list(range(1, len(made) + 1))
    return (
        f"{len(made)} steps without a gap: {whole}; {len(taken)} samples noted, none twice: "
        f"{set(taken.values()) == {1}}; "
        f"{len(unnoted)} steps not noted whole, each the last before a loss: {unnoted <= before_a_loss}; "
        f"digests: {len(digests)}"
    )


def series(options: argparse.Namespace, root: Path) -> None:
    chance = random.Random(options.seed)
    launched = start(options, root)
    left, joined = [], []
    for number in range(options.kills):
        group, rank = chance.randrange(options.groups), chance.randrange(options.size)
        time.sleep(chance.uniform(0.2, 1.5))
        worker = launched.worker(group, rank)
        assert worker is not None, f"group {group} is not there"
        at = time.time()
        worker.kill()
        left.append(launched.wait_for("left", at, group))
        joined.append(launched.wait_for("joined", at, group))
        tell(number, f"kill -9 of rank {rank}", left[-1], joined[-1])
    code = launched.stop()
    usual = statistics.median(e["step_time_s"] for e in launched.events if e["type"] == "step")
    stalls, rejoins = ([event["stall_s"] for event in events] for events in (left, joined))
    print(f"{len(joined)} kills, {len(joined)} recoveries; exit code {code}; step {usual * 1e3:.0f} ms")
    print(f"stall after a kill: median {statistics.median(stalls):.2f} s, most {max(stalls):.2f} s")
    print(f"steps lost: most {max(event['lost_steps'] for event in left)}")
    print(f"stall at a rejoin: median {statistics.median(rejoins):.3f} s, most {max(rejoins):.3f} s")
    print(check(launched.run))


def soak(options: argparse.Namespace, root: Path) -> None:
    chance = random.Random(options.seed)
    launched = start(options, root)
    ends_at, number = time.monotonic() + options.minutes * 60, 0
    while time.monotonic() < ends_at:
        group, rank = chance.randrange(options.groups), chance.randrange(options.size)
        number_sent = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        worker = launched.worker(group, rank)
        if worker is not None:
            worker.send_signal(number_sent)
        step = max((e["step"] for e in launched.read() if e["type"] == "step"), default=0)
        print(f"{time.strftime('%H:%M:%S')} step {step}: {number_sent.name} to group {group} {worker and worker.pid}")
        number += 1
        time.sleep(options.interval_s)
    launched.wait_for("step", time.time())
    code = launched.stop()
    recoveries = json.loads(launched.run.result_json.read_text())["recoveries"]
    for recovery in recoveries:
        print(" ", recovery)
    kinds = Counter(recovery["kind"] for recovery in recoveries)
    print(f"{number} faults; {dict(kinds)}; exit code {code}")
    print(check(launched.run))


def overhead(options: argparse.Namespace, root: Path) -> None:
    """Alternating short runs, so that the machine's moods meet both."""
    times: dict[str, list[float]] = {"plain": [], "elastic": []}
    for turn in range(options.turns):
        for name in times:
            groups = (*ELASTIC, f"resilience.replica_groups={options.groups}") if name == "elastic" else ("layout=ddp",)
            folder = root / f"{name}{turn}"
            devices = f"cluster.devices_per_node={options.groups}"
            command = ["launch", f"run.dir={folder}", "--force", "recipe=tiny", *MODEL_30M, devices, *groups]
            command += [f"train.max_steps={options.steps}", "precision.compute=fp32"]
            subprocess.run([sys.executable, "-m", "trainspec_cli", *command], check=True, stdout=subprocess.DEVNULL)
            steps = [e["step_time_s"] for e in read_events(RunDir(folder).events(0)) if e["type"] == "step"]
            times[name] += steps[5:]
            print(f"{name}: median {statistics.median(steps[5:]):.3f} s, least {min(steps[5:]):.3f} s", flush=True)
    plain, elastic = (statistics.median(times[name]) for name in ("plain", "elastic"))
    print(f"plain {plain:.3f} s, elastic {elastic:.3f} s per step: {elastic / plain - 1:+.1%}")


def start(options: argparse.Namespace, root: Path) -> Launched:
    devices = f"cluster.devices_per_node={options.groups * options.size}"
    groups = f"resilience.replica_groups={options.groups}"
    layout = ("layout=fsdp",) if options.size > 1 else ()
    slow = [f"slow(group={g},step=0,seconds={options.step_s},steps=100000000)" for g in range(options.groups)]
    faults = (f"fault={'; '.join(slow)}",) if options.step_s else ()
    settings = (*TINY, *ELASTIC, groups, devices, *layout, *faults, "batching.global_batch_size=16")
    launched = Launched(root / "run", *settings)
    launched.wait_for("step", 0.0)
    return launched


def tell(number: int, fault: str, left: dict[str, Any], joined: dict[str, Any]) -> None:
    away_s = joined["time"] - left["time"]
    print(
        f"{number + 1}: {fault} of group {left['group']} at step {left['step']}: stall {left['stall_s']:.2f} s, "
        f"{left['lost_steps']} lost; back after {away_s:.1f} s, stall {joined['stall_s']:.3f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["series", "soak", "overhead"])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=1, help="ranks of a group, which shard their model")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--interval-s", type=float, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(
        "--step-s", type=float, default=0.2, help="each step of a group sleeps so long; 0 computes alone"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainspec-elastic-") as folder:
        {"series": series, "soak": soak, "overhead": overhead}[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
