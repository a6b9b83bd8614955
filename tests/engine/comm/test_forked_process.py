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
def program():
{body}
with open(sys.argv[1], "wb") as out, open(sys.argv[2], "wb") as err:
    process = ForkedProcess(program, {environment!r}, out.fileno(), err.fileno())
print(process.pid, flush=True)
print(process.wait(60), flush=True)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that forks one with this body."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        text = HOST.format(body="".join(f"    {line}\n" for line in body.splitlines()), environment=ENVIRONMENT)
        command = [sys.executable, "-c", text, str(tmp_path / "out"), str(tmp_path / "err")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends(process: subprocess.Popen[str]) -> int:
    """The exit code of the forked process."""
    return int(process.communicate()[0].split()[-1])


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("print('done')", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("sys.exit('no room')", 1, "no room"),
        ("raise ValueError('the loss')", 1, "ValueError: the loss"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", 1, "KeyboardInterrupt"),
    ],
)
def test_it_ends_as_a_python_process_does(host, tmp_path: Path, body: str, code: int, error: str) -> None:
    assert ends(host(body)) == code
    assert error in (tmp_path / "err").read_text()
    assert ("Traceback" in (tmp_path / "err").read_text()) == ("Error" in error or "Interrupt" in error)


def test_it_has_its_own_environment_session_title_and_output(host, tmp_path: Path) -> None:
    body = (
        "print(sorted(os.environ), os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd'))[:4])\n"
        "print('to stderr', file=sys.stderr)\n"
        "sys.stdin.close()\nimport time; time.sleep(600)"
    )
    process = host(body)
    assert process.stdout
    worker = psutil.Process(int(process.stdout.readline()))
    assert (rank_of(worker), worker.name()) == (7, "rank 7")
    while not (tmp_path / "err").read_text():
        assert process.poll() is None
    assert (tmp_path / "out").read_text() == f"{sorted(ENVIRONMENT)} True ['0', '1', '2', '3']\n", "written at once"
    assert (tmp_path / "err").read_text() == "to stderr\n"
    worker.terminate()
    assert ends(process) == -15, "not the parent's handler"


def test_its_threads_and_exit_handlers_end_before_it_does(host, tmp_path: Path) -> None:
    body = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'exit handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )
    assert ends(host(body)) == 0
    assert (tmp_path / "out").read_text() == "thread\nexit handler\n"


def test_waiting_for_it_has_an_end(host) -> None:
    process = host("import time; time.sleep(600)")
    assert process.stdout
    pid = int(process.stdout.readline())
    waiting = ForkedProcess.__new__(ForkedProcess)
    waiting.pid, waiting.returncode = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"), None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.05)
    os.kill(waiting.pid, signal.SIGKILL)
    assert waiting.wait(60) == waiting.wait(0) == -9
    os.kill(pid, signal.SIGKILL)
    assert ends(process) == -9
