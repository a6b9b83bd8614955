from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainspec_cli.session import slurm_job
from trainspec_cli.session.launching import in_slurm


class Slurm:
    """Stand-in for Slurm that records requests."""

    def __init__(self) -> None:
        self.requeued: list[str] = []
        self.job = {"Restarts": "0", "Requeue": "1", "BatchFlag": "1", "PreemptTime": "None"}

    def own_address(self) -> str:
        return "node1"

    def show(self, job_id: str) -> dict[str, str]:
        return self.job

    def requeue(self, job_id: str) -> None:
        self.requeued.append(job_id)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Make this process look as if it ran in Slurm job 41."""
    found = Slurm()
    for module in (slurm_job, in_slurm):
        monkeypatch.setattr(module, "slurm", found)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)
