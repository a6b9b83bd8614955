"""Two sites as two launches of real processes, with a real kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab.ports import free_port
from lab.thin_link import Link
from lab.waiting import wait_for

from trainspec_cli.launcher.backend.processes import workers_among
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.generations import create_secret
from trainspec_cli.rundir.paths import RunDir

pytest.importorskip("cryptography")

RECIPE = (
    *("recipe=tiny", "resilience=sites", "cluster.devices_per_node=2", "layout=fsdp", "run.preflight=false"),
    *("resilience.sites.interval_steps=8", "resilience.sites.fragments=2", "resilience.sites.delay_steps=2"),
    *("batching.global_batch_size=4", "checkpoint.interval_steps=5"),
)


class TwoSites:
    def __init__(self, folder: Path, environment: dict[str, str], *changes: str, delay_s: float = 0.0):
        create_secret(folder / "secret")
        self.folder, self.port = folder, free_port()
        self.link = Link(self.port, None, delay_s)
        """Of site 1."""
        self.sites = [self._start(site, environment, changes) for site in range(2)]

    def _start(self, site: int, environment: dict[str, str], changes: tuple[str, ...]) -> subprocess.Popen[str]:
        port = self.link.port if site else self.port
        options = ("--site", str(site), "--sites-endpoint", f"127.0.0.1:{port}", "--sites-secret", "secret")
        command = [sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, *changes, f"run.dir=site{site}", *options]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run_dir(self, site: int) -> RunDir:
        return RunDir(self.folder / f"site{site}")

    def reached(self, site: int, step: int) -> bool:
        events = self.run_dir(site).events(0)
        return events.exists() and any(e["type"] == "step" and e["step"] >= step for e in read_events(events))

    def wait(self) -> None:
        for process in self.sites:
            output, _ = process.communicate()
            assert process.returncode == 0, output

    def digests(self) -> set[str]:
        return {read_json(self.run_dir(site).result_json)["weights_sha256"] for site in range(2)}


@pytest.mark.slow
def test_two_sites_of_two_ranks_each_end_with_the_same_weights(tmp_path: Path, environment: dict[str, str]) -> None:
    sites = TwoSites(tmp_path, environment, "train.max_steps=20")
    sites.wait()
    assert len(sites.digests()) == 1
    taken = [range(e["took"][0], sum(e["took"])) for site in range(2) for e in _steps(sites.run_dir(site))]
    assert sorted(position for own in taken for position in own) == list(range(2 * 4 * 20))


@pytest.mark.slow
def test_a_site_whose_rank_is_killed_comes_back_while_the_other_goes_on(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    sites = TwoSites(tmp_path, environment, "train.max_steps=400")
    wait_for(lambda: sites.reached(1, 30), sites.sites[1])
    supervisor = psutil.Process(sites.sites[1].pid)
    os.kill(workers_among(supervisor.children(recursive=True))[0].pid, signal.SIGKILL)
    sites.wait()
    assert len(sites.digests()) == 1
    first = [e for e in read_events(sites.run_dir(0).events(0)) if e["type"] == "recovery"]
    assert [(e["change"], e["group"]) for e in first] == [("site_left", 1), ("site_joined", 1)]


@pytest.mark.slow
def test_sites_exchange_less_often_over_a_slow_link(tmp_path: Path, environment: dict[str, str]) -> None:
    follows = ("scheduler=auto", "resilience.sites.max_interval_steps=40")
    sites = TwoSites(tmp_path, environment, "train.max_steps=80", *follows, delay_s=1.0)
    sites.wait()
    assert len(sites.digests()) == 1
    changes = [[e for e in read_events(sites.run_dir(site).events(0)) if e["type"] == "interval"] for site in range(2)]
    assert changes[0][0]["interval_steps"] > changes[0][0]["before_interval_steps"] == 8
    heard = [[(e["round"], e["interval_steps"], e["delay_steps"], e["reason"]) for e in own] for own in changes]
    assert heard[0] == heard[1], "both hear the same"
    taken = [range(e["took"][0], sum(e["took"])) for site in range(2) for e in _steps(sites.run_dir(site))]
    positions = sorted(position for own in taken for position in own)
    assert positions == list(range(len(positions))), "each is taken once"


def _steps(run: RunDir) -> list[dict[str, list[int]]]:
    return [event for event in read_events(run.events(0)) if event["type"] == "step"]
