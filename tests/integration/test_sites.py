"""Sites as launches of real processes, with a real kill, and with strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from lab.link import Link
from lab.ports import free_port
from lab.waiting import wait_for

from trainspec_cli.run.backend.processes import workers_among
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.launched import listening

pytest.importorskip("cryptography")

RECIPE = (
    *("recipe=tiny", "resilience=sites", "layout=fsdp", "run.preflight=false"),
    *("resilience.sites.interval_steps=8", "resilience.sites.fragments=2", "resilience.sites.delay_steps=2"),
    *("batching.global_batch_size=4", "checkpoint.interval_steps=5"),
)

OF = "resilience.sites"
TWO_RANKS = "cluster.devices_per_node=2"


class Sites:
    """`ports`: by site, that at which it listens for the others. `delay_s`: of the last site's link, one way."""

    def __init__(self, folder: Path, environment: dict[str, str], *changes: str, count: int = 2, delay_s: float = 0.0):
        create_secret(folder / "secret")
        self.folder, self.port, self.ports = folder, free_port(), dict[int, int]()
        self.link = Link(self.port, None, delay_s)
        if count > 2:
            self.ports = {site: free_port() for site in range(1, count)}
        changes = (*changes, f"resilience.sites.count={count}")
        self.sites = [self._start(site, environment, changes, count) for site in range(count)]

    def _start(
        self, site: int, environment: dict[str, str], changes: tuple[str, ...], count: int
    ) -> subprocess.Popen[str]:
        port = self.link.port if site == count - 1 else self.port
        keys = {f"{OF}.site": site, f"{OF}.endpoint": f"127.0.0.1:{port}", f"{OF}.secret": "secret"}
        if site in self.ports:
            keys[f"{OF}.listen"] = f"127.0.0.1:{self.ports[site]}"
        keys |= dict(word.split("=", 1) for word in (*RECIPE, *changes, f"run.dir=site{site}"))
        words = [f"{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "trainspec_cli", "launch", *words]
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
        return {read_json(self.run_dir(site).result_json)["weights_sha256"] for site in range(len(self.sites))}


@pytest.mark.slow
def test_two_sites_of_two_ranks_each_end_with_the_same_weights(tmp_path: Path, environment: dict[str, str]) -> None:
    sites = Sites(tmp_path, environment, TWO_RANKS, "train.max_steps=20")
    sites.wait()
    assert len(sites.digests()) == 1
    taken = [range(e["took"][0], sum(e["took"])) for site in range(2) for e in _steps(sites.run_dir(site))]
    assert sorted(position for own in taken for position in own) == list(range(2 * 4 * 20))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "ranks"), [(2, TWO_RANKS), (3, "cluster.devices_per_node=1")])
def test_a_site_whose_rank_is_killed_comes_back_while_the_others_go_on(
    tmp_path: Path, environment: dict[str, str], count: int, ranks: str
) -> None:
    sites = Sites(tmp_path, environment, ranks, "train.max_steps=400", count=count)
    wait_for(lambda: sites.reached(1, 30), sites.sites[1])
    supervisor = psutil.Process(sites.sites[1].pid)
    os.kill(workers_among(supervisor.children(recursive=True))[0].pid, signal.SIGKILL)
    sites.wait()
    assert len(sites.digests()) == 1
    for other in (site for site in range(count) if site != 1):
        seen = [e for e in read_events(sites.run_dir(other).events(0)) if e["type"] == "recovery"]
        assert [(e["change"], e["group"]) for e in seen] == [("site_left", 1), ("site_joined", 1)]
    if count > 2:
        ways = (sites.run_dir(2).root / "sites" / "sites.log").read_text(encoding="utf-8")
        assert ways.count("site 1 is connected") == 2, "the killed site's way is there again"


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "step"), [(1, 3), (0, 3), (1, 20)])
def test_a_site_whose_rank_is_killed_before_the_first_checkpoint_begins_again(
    tmp_path: Path, environment: dict[str, str], killed: int, step: int
) -> None:
    """It joins the other site, which has gone on. Site 0 hosts."""
    slow = "fault=slow(step=3,seconds=0.2,steps=60)"  # so that the other site is still there when it comes back
    changes = ("cluster.devices_per_node=1", "train.max_steps=60", "checkpoint.interval_steps=1000", slow)
    sites = Sites(tmp_path, environment, *changes)
    supervisor = psutil.Process(sites.sites[killed].pid)
    wait_for(lambda: sites.reached(killed, step), sites.sites[killed])
    os.kill(workers_among(supervisor.children(recursive=True))[0].pid, signal.SIGKILL)
    sites.wait()
    assert len(sites.digests()) == 1
    for site in range(2):
        result = read_json(sites.run_dir(site).result_json)
        assert (result["status"], result["steps"]) == ("done", 60)
    recoveries = read_json(sites.run_dir(killed).result_json)["recoveries"]
    assert [one["kind"] for one in recoveries].count("restart") == 1


@pytest.mark.slow
def test_three_sites_send_directly_and_strangers_at_their_ports_change_nothing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    alone, molested = tmp_path / "alone", tmp_path / "molested"
    digests = []
    for folder in (alone, molested):
        folder.mkdir()
        changes = ("train.max_steps=24", "cluster.devices_per_node=1", "scheduler=off")
        sites = Sites(folder, environment, *changes, count=3)
        if folder == molested:
            wait_for(lambda sites=sites: sites.reached(1, 6), sites.sites[1])
            _molest_inboxes(sites)
        sites.wait()
        digests.append(sites.digests())
        for site in (1, 2):
            log = (sites.run_dir(site).root / "sites" / "sites.log").read_text(encoding="utf-8")
            assert f"site {3 - site} is connected directly" in log
            events = read_events(sites.run_dir(site).events(0))
            assert not [event for event in events if event["type"] in ("warning", "recovery")]
    assert len(digests[0]) == 1 and digests[0] == digests[1]


def _molest_inboxes(sites: Sites) -> None:
    for site, port in sites.ports.items():
        listens = listening(psutil.Process(sites.sites[site].pid))
        assert ("127.0.0.1", port) in listens and {address for address, _ in listens} == {"127.0.0.1"}
        for content in (b"", b"\x16\x03\x01" + bytes(200), b"x" * 2**16):
            with socket.create_connection(("127.0.0.1", port), 20) as stranger, suppress(OSError):
                stranger.sendall(content)


def _steps(run: RunDir) -> list[dict[str, list[int]]]:
    return [event for event in read_events(run.events(0)) if event["type"] == "step"]
