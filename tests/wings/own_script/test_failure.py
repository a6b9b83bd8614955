"""How a user's command has ended, according to its output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError, WorkerError
from trainspec_cli.run.folder.record import NodeErrorRecord, RunRecord, write_error, write_run_record
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.outcome import conclude
from trainspec_cli.run.supervise import Ending
from trainspec_cli.wings.own_script.failure import explain_own_end, find_exception
from trainspec_cli.wings.own_script.job import OUTPUT_LOG, CommandSettings, OwnJob, write_own_job
from trainspec_cli.wings.own_script.launching import RUNS_OF_COMMANDS, exit_code_of

LOST = "[pair.cc:537] Read error [127.0.0.1]:63156: Connection reset by peer"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path, ("python", "train.py"), {}, 1, 60.0, tmp_path / "logs", program="train.py", log=OUTPUT_LOG)
    made.logs.mkdir()
    return made


RAISED = """Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    main()
  File "/home/me/train.py", line 20, in main
    loss = model(batch)
  File "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight)
RuntimeError: shapes (2x8 and 9x8)
"""


@pytest.mark.parametrize(
    "text",
    [
        RAISED,
        "".join(f"[rank1]: {line}\n" for line in RAISED.splitlines()),
        "".join(f"[default1]:[rank1]: {one}\n[default0]:step 3\n" for one in RAISED.splitlines()),
        f"\r 30%|###   | 3/10{RAISED}",
        RAISED + RAISED.replace("RuntimeError: shapes (2x8 and 9x8)", "subprocess.CalledProcessError: Command 'a'"),
        RAISED + 'Original Traceback (most recent call last):\n  File "/b.py", line 1, in f\nValueError: b\n',
    ],
    ids=["plain", "rank", "two ranks", "progress bar", "launcher", "worker"],
)
def test_an_exception_is_found_with_the_line_in_the_users_code(text: str) -> None:
    found = find_exception(text)
    assert found is not None
    assert (found.type, found.file, found.line) == ("RuntimeError", "/home/me/train.py", 20)
    assert found.summary.endswith("(2x8 and 9x8) (train.py:20)")
    assert len(found.excerpt.splitlines()) == 5, "from that frame on"


@pytest.mark.parametrize("text", ["", "step 3\n", 'Traceback (most recent call last):\n  File "a.py", line 1, in b\n'])
def test_an_incomplete_traceback_is_not_an_exception(text: str) -> None:
    assert find_exception(text) is None


@pytest.mark.parametrize(
    ("exception", "word", "has_cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "device", True),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "host", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 GiB", "host", True),
        ("MemoryError", "host", True),
        (f"RuntimeError: {LOST}", "", False),
    ],
)
def test_host_and_device_memory_are_distinguished(job: Job, exception: str, word: str, has_cause: bool) -> None:
    job.torchrun_log.write_text(RAISED.replace("RuntimeError: shapes (2x8 and 9x8)", exception))
    explanation = explain_own_end(job, 1, [])
    assert explanation.headline.endswith(f"code 1: {exception} (train.py:20)")
    assert explanation.detail.startswith('  File "/home/me/train.py", line 20') and len(explanation.detail) < 300
    assert explanation.hint.startswith(f"the {word} ran out of memory" if word else "")
    assert bool(explanation.hint) is bool(word) and bool(explanation.cause) is has_cause


@pytest.mark.parametrize(("host", "exit_code"), [("b", WorkerError.exit_code), ("", MachineError.exit_code)])
@pytest.mark.parametrize(
    ("argv", "hint"),
    [(["run", "--nnodes=2", "--node-rank", "0"], "with --node-rank 1; "), (["run"], "node 1 printed; ")],
)
def test_all_nodes_end_with_the_same_code_if_one_is_lost_or_never_joined(
    job: Job, host: str, exit_code: int, argv: list[str], hint: str
) -> None:
    job = replace(job, nodes=(0, 1))
    write_run_record(job.run, RunRecord(recipe="train.py", created_at=1.0, argv=tuple(argv), command=("train.py",)))
    write_own_job(job.run, OwnJob(2, CommandSettings(3, 60.0, None, None, 300.0), 0, None))
    write_error(job.run.node_error(1), NodeErrorRecord(node=1, host=host, message="is gone", lost=True))
    outcome = conclude(job, Ending(job, None, stop_requested=False), RUNS_OF_COMMANDS.decide)
    assert (outcome.exit_code, outcome.result.exit_code) == (exit_code, None)
    assert exit_code_of(job.run, outcome.result) == exit_code
    assert (hint if not host else "node 1 printed; ") in RUNS_OF_COMMANDS.hint(job, outcome)
    job.run.job_sbatch.touch()
    assert RUNS_OF_COMMANDS.hint(job, outcome).endswith("/job.sbatch")
