"""Far-apart sites over an emulated link: bytes at the socket, held-out loss, speed, and what a kill costs.

    python tests/bench/sites.py loss --sites 2 --seeds 3     sites beside data parallelism at equal tokens
    python tests/bench/sites.py speed                        tokens/s over the link beside no link at all

Every site is a launch of its own. The link is a relay in this process between the sites and the meeting point: it
delays what passes by `--delay-ms`, lets through `--mbit` of each site's each way, and counts the bytes that it reads
from sockets (TLS and all). Site 0 reaches the meeting point through a link too. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.link import Link
from lab.ports import free_port

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.run.folder.paths import RunDir

SITES = "resilience.sites"
WARM_STEPS = 5
"""Steps that a speed leaves out: the first ones take longer."""


def launch(folder: Path, *arguments: str, cores: Collection[int]) -> subprocess.Popen[bytes]:
    """Start a launch on some cores alone."""
    own = partial(os.sched_setaffinity, 0, cores)
    log = (folder / f"{arguments[-1].rpartition('=')[2]}.log").open("wb")
    command = ["nice", "-n", "19", sys.executable, "-m", "trainspec_cli", "launch", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, preexec_fn=own)


def train_sites(folder: Path, wanted: argparse.Namespace, seed: int, *, shaped: bool) -> dict[str, Any]:
    """Train `wanted.sites` sites, and return what came of it."""
    create_secret(folder / "secret")
    port = free_port()
    bytes_per_s = wanted.mbit * 1e6 / 8 if shaped else None
    links = [Link(port, bytes_per_s, wanted.delay_ms / 1e3 if shaped else 0.0) for _ in range(wanted.sites)]
    running = []
    for site in range(wanted.sites):
        endpoint = port if site == 0 else links[site].port  # site 0 is where the meeting point is
        options = [f"{SITES}.site={site}", f"{SITES}.endpoint=127.0.0.1:{endpoint}", f"{SITES}.secret=secret"]
        arguments = [*recipe(wanted, seed), *of_sites(wanted), *options, f"run.dir=site{site}"]
        running.append(launch(folder, *arguments, cores=cores_of(site, wanted.sites)))
    require(running, folder)
    runs = [RunDir(folder / f"site{site}") for site in range(wanted.sites)]
    results = [read_json(run.result_json) for run in runs]
    assert len({result["weights_sha256"] for result in results}) == 1, "all sites end with the same weights"
    return {
        "heldout_bits_per_byte": results[0]["heldout_bits_per_byte"],
        "link_bytes": sum(link.carried_bytes for link in links),
        "units_per_s": sum(map(units_per_s, runs)),
        "waited_s": [round(sum(waits(run)), 3) for run in runs],
    }


def cores_of(site: int, sites: int) -> list[int]:
    """Return the cores of a site: each has its own, and some share one where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[site::sites] or [cores[site % len(cores)]]


def recipe(wanted: argparse.Namespace, seed: int, batch: int | None = None) -> list[str]:
    size = batch or wanted.batch
    return [
        *(f"recipe={wanted.recipe}", f"train.max_steps={wanted.steps}", f"train.seed={seed}", "scheduler=off"),
        *(f"batching.global_batch_size={size}", "cluster.devices_per_node=1", "run.preflight=false"),
        *("checkpoint.interval_steps=null", *wanted.changes),
    ]


def of_sites(wanted: argparse.Namespace) -> list[str]:
    keys = {"count": wanted.sites, "interval_steps": wanted.interval, "fragments": wanted.fragments}
    keys |= {"delay_steps": wanted.delay_steps, "format": wanted.format}
    return ["resilience=sites", *(f"resilience.sites.{key}={value}" for key, value in keys.items())]


def train_together(folder: Path, wanted: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train the same tokens in one run: what data parallelism over all sites computes."""
    arguments = [*recipe(wanted, seed, wanted.batch * wanted.sites), "run.dir=whole"]
    require([launch(folder, *arguments, cores=cores_of(0, wanted.sites))], folder)
    run = RunDir(folder / "whole")
    result = read_json(run.result_json)
    others = wanted.sites - 1
    return {
        "heldout_bits_per_byte": result["heldout_bits_per_byte"],
        "ring_bytes": 2 * others * 4 * read_json(run.plan_json)["params"] * wanted.steps,
        "units_per_s": units_per_s(run),
    }


def require(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in running:
        if process.wait():
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
            raise SystemExit(logs)


def units_per_s(run: RunDir) -> float:
    """Return tokens a second of wall time, from the first steps' end to the last step's."""
    steps = [event for event in read_events(run.events(0)) if event["type"] == "step"][WARM_STEPS - 1 :]
    return sum(step["tokens"] for step in steps[1:]) / (steps[-1]["time"] - steps[0]["time"])


def waits(run: RunDir) -> list[float]:
    return [event["waited_s"] for event in read_events(run.events(0)) if event["type"] == "exchange"][1:]


def bench_loss(wanted: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for seed in range(wanted.first_seed, wanted.first_seed + wanted.seeds):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            together = train_together(Path(one), wanted, seed)
            apart = train_sites(Path(other), wanted, seed, shaped=True)
        rows.append({"seed": seed, "together": together, "apart": apart})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    losses = {key: statistics.mean(row[key]["heldout_bits_per_byte"] for row in rows) for key in ("together", "apart")}
    fewer = statistics.mean(row["together"]["ring_bytes"] / row["apart"]["link_bytes"] for row in rows)
    return {"rows": rows, "mean_loss": losses, "loss_ratio": losses["apart"] / losses["together"], "fewer_bytes": fewer}


def bench_speed(wanted: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for shaped in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found["over the link" if shaped else "no link"] = train_sites(Path(folder), wanted, 0, shaped=shaped)
    return found | {"ratio": found["over the link"]["units_per_s"] / found["no link"]["units_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "speed"))
    parser.add_argument("--recipe", default="tiny")
    numbers = {
        "sites": 2,
        "seeds": 3,
        "first-seed": 0,
        "steps": 200,
        "batch": 4,
        "interval": 100,
        "fragments": 2,
        "delay-steps": 5,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--format", default="int4")
    parser.add_argument("changes", nargs="*", help="key=value of the recipe")
    wanted = parser.parse_intermixed_args()
    bench = {"loss": bench_loss, "speed": bench_speed}[wanted.what]
    print(json.dumps({"settings": vars(wanted), "cores": os.cpu_count(), **bench(wanted)}, indent=2))


if __name__ == "__main__":
    main()
