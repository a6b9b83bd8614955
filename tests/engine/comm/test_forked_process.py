"""A forked process behaves as one of its own does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from lab.waiting import PATIENCE_S, wait_for

from trainspec_cli.engine.comm.forking import ForkedProcess
from trainspec_cli.run.backend.processes import rank_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
ENVIRONMENT = {"RANK": "7", "OWN": "yes"}

# The programs run in a clean Python, as torchrun is: this test's own process has threads.
HOST = """
import os, signal, sys
from trainspec_cli.engine.comm.forking import ForkedProcess
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler", flush=True))
os.environ["OF_THE_PARENT"] = "yes"
for number, body in enumerate({bodies!r}):
    with open(f"{folder}/out{{number}}", "wb") as out, open(f"{folder}/err{{number}}", "wb") as err:
        process = ForkedProcess(lambda: exec(body, globals()), {environment!r}, out.fileno(), err.fileno())
    print(process.pid, flush=True)
    print(process.wait({patience}), flush=True)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that forks one with each of these bodies, one after another."""
    started: list[subprocess.Popen[str]] = []

    def start(*bodies: str) -> subprocess.Popen[str]:
        text = HOST.format(bodies=bodies, folder=tmp_path, environment=ENVIRONMENT, patience=PATIENCE_S)
        command = [sys.executable, "-c", text]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


ENDS = (
    ("print('done')", 0, ""),
    ("raise SystemExit(3)", 3, ""),
    ("raise SystemExit", 0, ""),
    ("sys.exit('no room')", 1, "no room"),
    ("raise ValueError('the loss')", 1, "ValueError: the loss"),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ("os.kill(os.getpid(), signal.SIGINT)", 1, "KeyboardInterrupt"),
)
"""(body, exit code, what is written to stderr)"""
THREADS = (
    "import atexit, threading, time\n"
    "atexit.register(print, 'exit handler')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
)


OWN = (
    "print(sorted(os.environ), os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd'))[:4])\n"
    "print('to stderr', file=sys.stderr)\n"
    "sys.stdin.close()\nimport time; time.sleep(600)"
)


def test_it_behaves_as_a_python_process_of_its_own(host, tmp_path: Path) -> None:
    """It has its own environment, session, title and output, and its threads and exit handlers end before it does."""
    process = host(OWN, *(body for body, _, _ in ENDS), THREADS)
    assert process.stdout
    worker = psutil.Process(int(process.stdout.readline()))
    wait_for((tmp_path / "err0").read_text, process)
    assert (rank_of(worker), worker.name()) == (7, "rank 7")
    assert (tmp_path / "out0").read_text() == f"{sorted(ENVIRONMENT)} True ['0', '1', '2', '3']\n", "written at once"
    assert (tmp_path / "err0").read_text() == "to stderr\n"
    worker.terminate()
    first, *found = [int(line) for line in process.communicate()[0].split()[::2]]
    assert first == -15, "not the parent's handler"
    assert found == [*(code for _, code, _ in ENDS), 0]
    for number, (body, _, error) in enumerate(ENDS, start=1):
        written = (tmp_path / f"err{number}").read_text()
        assert error in written, body
        assert ("Traceback" in written) == ("Error" in error or "Interrupt" in error), body
    assert (tmp_path / f"out{len(ENDS) + 1}").read_text() == "thread\nexit handler\n"


def test_waiting_for_it_has_an_end() -> None:
    waiting = ForkedProcess.__new__(ForkedProcess)
    waiting.pid, waiting.returncode = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"), None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.05)
    os.kill(waiting.pid, signal.SIGKILL)
    assert waiting.wait(PATIENCE_S) == waiting.wait(0) == -9
