"""Far-apart sites in one process: a real meeting point on the loopback, and coordinators that train in threads.

A site's model has four parameters; a sample moves them by an amount that its position decides, so that equal samples
give equal weights to the last bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.engine_runs import CPU, Numbered, run_of
from lab.waiting import wait_for
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.training_run import TrainProgress
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec, SitesSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSection, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.generations import create_secret, read_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import listen
from trainspec_cli.wings.sites.engine.far_sites import FarSites
from trainspec_cli.wings.sites.meeting_point import MeetingPoint, make_meeting_point
from trainspec_cli.wings.sites.server import SiteInbox, make_inbox

STEPS, BATCH, WAIT_S = 24, 4, 60
NAMES = ("embed.weight", "blocks.0.weight", "blocks.1.weight", "norm.weight")
SITES = SitesSpec(interval_steps=8, fragments=2, delay_steps=2, grace_s=20.0)


def begun(values: int) -> Tensor:
    """Return what a share begins with."""
    return torch.arange(float(values)) / values


class Killed(Exception):  # noqa: N818
    """The site's processes have ended."""


Saved = tuple[int, dict[str, Tensor], dict[str, Tensor]]
"""(step, weights, what the coordinator has saved)"""


class Site:
    """One site of one rank."""

    def __init__(self, lab: SitesLab, number: int, saved: Saved | None = None):
        self.lab, self.number = lab, number
        self.shares = [Share(name, nn.Parameter(begun(lab.values))) for name in NAMES]
        self.error = None
        mesh = SimpleNamespace(
            data_rank=0,
            layout=Layout(),
            rank=lambda axis: 0,
            group=lambda axis: dist.distributed_c10d._get_default_group(),
        )
        state: Any = SimpleNamespace(
            clock=StepClock(CPU), device=CPU, shares=self.shares, mesh=mesh, beyond={}, stages=None
        )
        spec = lab.spec_of(number)
        plan: Any = SimpleNamespace(
            spec=spec, replica_groups=1, layout=Layout(), micro_batch_size=1, grad_accum_steps=1, total_steps=STEPS
        )
        self.state, self.saves, self.took, self.progress = state, {}, [], TrainProgress()
        run_dir = RunDir(lab.folder / f"site{number}")
        self.run = run_of(plan, state, run_dir, Journal(run_dir, 0, spec))
        self.stop = self.run.stop
        self.coordinator = FarSites(self.run, Numbered())
        if saved:
            self._load(*saved)
        self.thread = threading.Thread(target=self._train, name=f"site {number}", daemon=True)
        self.thread.start()

    @property
    def weights(self) -> Tensor:
        return torch.cat([share.local.detach() for share in self.shares])

    def saved(self) -> Saved:
        weights = {share.name: share.local.detach().clone() for share in self.shares}
        return self.progress.step, weights, {name: kept.clone() for name, kept in self.state.beyond.items()}

    def _load(self, step: int, weights: dict[str, Tensor], beyond: dict[str, Tensor]) -> None:
        self.progress = TrainProgress(step)
        with torch.no_grad():
            for share in self.shares:
                share.local.copy_(weights[share.name])
            for name, kept in beyond.items():
                self.state.beyond[name].copy_(kept)

    def _train(self) -> None:
        try:
            while self.progress.step < STEPS:
                self._save()
                if not self._step():
                    break
            if self.progress.step == STEPS:
                self.coordinator.bring_together(self.progress)
        except Exception as error:
            self.error = error
        finally:
            self.coordinator.leave()

    def _save(self) -> None:
        self.saves[self.progress.step] = self.saved()
        self.lab.reached(self, self.progress.step)

    def _step(self) -> bool:
        start = self.coordinator.begin(self.progress, TrainProgress)
        self.progress = start.progress
        if start.stop or self.progress.step == STEPS:
            return not start.stop
        samples = self.coordinator.take([(0, BATCH), (0, BATCH)])
        self.lab.computes(self)
        assert self.coordinator.commit()
        with torch.no_grad():
            for (positions,) in samples.micro_batches:
                for position in positions.tolist():
                    self._learn(position)
        self.took.append((self.progress.step, *samples.took))  # type: ignore[misc]
        self.progress = TrainProgress(self.progress.step + 1, self.progress.samples + samples.step_samples)
        return True

    def _learn(self, position: int) -> None:
        for place, share in enumerate(self.shares):
            moves = torch.sin(torch.arange(float(self.lab.values)) * (position + place + 1))
            share.local.mul_(0.99).add_(moves, alpha=0.01)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.run_dir.events(0)) if event["type"] == kind]


class SitesLab:
    """A run of several sites. `acts`: (site, step) -> what happens there, once."""

    def __init__(self, folder: Path, sites: int = 2, **changes: Any):
        self.folder, self.sites = folder, sites
        self.secret = folder / "secret"
        create_secret(self.secret)
        self.acts: dict[tuple[int, int], Callable[[Site], None]] = {}
        self.compute_s: dict[int, float] = {}
        self.sections: dict[str, Any] = {}
        self.settings = replace(SITES, count=sites, **changes)
        self.silence_s, self.return_s = 10.0, 5.0
        self.port = 0
        self.values = 130
        """Of a share."""
        self.point: MeetingPoint
        self.inboxes: dict[int, SiteInbox] = {}
        self.addresses: dict[int, str] = {}
        """Where each site is reached directly."""
        self.endpoints: dict[int, int] = {}
        """The port that a site uses to reach the meeting point, if it is another one."""
        self.started: list[Site] = []
        self.logs: list[TextIO] = []

    def spec_of(self, site: int) -> RunSpec:
        endpoint = f"127.0.0.1:{self.endpoints.get(site, self.port)}"
        reached = {"endpoint": endpoint, "listen": self.addresses.get(site)}
        sites = replace(self.settings, site=site, secret=str(self.secret), **reached)
        spec = RunSpec(
            model=DecoderModel(1, 32, 2, 1, 16, 48, 50),
            data=DataSpec(seq_len=1, source="python_stdlib"),
            optim=OptimSpec(lr=1.0),
            batching=BatchingSpec(global_batch_size=BATCH, micro_batch_size=1),
            train=TrainSection(max_steps=STEPS),
            resilience=ResilienceSpec(mode="sites", heartbeat_timeout_s=self.silence_s, sites=sites),
            run=RunSection(node_timeout_s=self.return_s),
        )
        return replace(spec, **self.sections)

    def open(self) -> None:
        """Open the meeting point, the first time or again."""
        listener = listen("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self.log = (self.folder / "sites.log").open("a", encoding="utf-8")
        secret = read_secret(self.secret)
        self.point = make_meeting_point(self._plan_of(0), self.folder / "sites", secret, self.log)
        self.point.start(listener)

    def open_inbox(self, site: int) -> int:
        """Have a site listen for the others, in place of its supervisor; return the port."""
        listener = listen("127.0.0.1")
        port = int(listener.getsockname()[1])
        self.addresses[site] = f"127.0.0.1:{port}"
        self.logs.append((self.folder / f"site{site}.log").open("a", encoding="utf-8"))
        self.inboxes[site] = make_inbox(self._plan_of(site), read_secret(self.secret), self.logs[-1])
        self.inboxes[site].start(listener)
        return port

    def _plan_of(self, site: int) -> Any:
        return SimpleNamespace(spec=self.spec_of(site), layout=Layout(), total_steps=STEPS)

    def close(self) -> None:
        self.point.close()
        for inbox in self.inboxes.values():
            inbox.close()
        for log in (self.log, *self.logs):
            log.close()

    @property
    def said(self) -> str:
        return (self.folder / "sites.log").read_text(encoding="utf-8")

    def said_by(self, site: int) -> str:
        """Return what the inbox of a site has logged."""
        return (self.folder / f"site{site}.log").read_text(encoding="utf-8")

    def start(self, number: int, saved: Saved | None = None) -> Site:
        self.started.append(Site(self, number, saved))
        return self.started[-1]

    def reached(self, site: Site, step: int) -> None:
        if act := self.acts.pop((site.number, step), None):
            act(site)

    def computes(self, site: Site) -> None:
        time.sleep(self.compute_s.get(site.number, 0.0))

    def wait(self, *sites: Site) -> None:
        for site in sites:
            site.thread.join(WAIT_S)
            assert not site.thread.is_alive(), f"site {site.number} hangs at step {site.progress.step}: {self.said}"
            if site.error and not isinstance(site.error, Killed):
                raise site.error

    def run_all(self) -> list[Site]:
        self.open()
        sites = [self.start(number) for number in range(self.sites)]
        self.wait(*sites)
        self.close()
        return sites


def kill(_site: Site) -> None:
    raise Killed


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition)
