"""Process groups of real processes, built through a real rendezvous server."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.ranks import run_ranks

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.rendezvous.address import Rendezvous

WORKER = Path(__file__).parent / "store_worker.py"
HERE = "127.0.0.1"


@pytest.fixture
def rendezvous(tmp_path):
    job = Job(tmp_path, (), {LAUNCH_ID: f"store-{os.getpid()}"}, 1, 1.0, tmp_path / "logs")
    create_secret(job.run.secret(1))
    made = Rendezvous(job, ResilienceSpec(), job.run.secret(1), HERE)
    yield made
    made.close()


def test_groups_are_built_and_train_through_the_rendezvous_server(rendezvous):
    environment = {**rendezvous.environment, "GLOO_SOCKET_IFNAME": "lo"}
    ended = run_ranks(WORKER, [(rank, 3) for rank in range(3)], environment)
    assert [rank.code for rank in ended] == [0, 0, 0]
    losses = [ast.literal_eval(rank.printed) for rank in ended]
    assert all(len(own) == 3 and own[2] > 0 for own in losses)


@pytest.mark.slow
def test_who_has_another_secret_builds_nothing(rendezvous, tmp_path):
    create_secret(tmp_path / "guess")
    script = (
        "import trainspec_cli.engine.comm.joining as r\n"
        "r.CONNECT_TIMEOUT_S = 0\n"
        "from datetime import timedelta\n"
        "r.RendezvousStore(timedelta(seconds=1))"
    )
    environment = {**os.environ, **rendezvous.environment, "TRAINSPEC_SECRET_FILE": str(tmp_path / "guess")}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "rendezvous server" in ended.stderr or "closed the connection" in ended.stderr
