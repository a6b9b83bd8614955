"""`trainspec run --nnodes`: a command of the user's own on several nodes, here processes of one machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from lab.ports import free_port
from lab.waiting import wait_for

from trainspec_cli.run.folder.event_types.events import HangEvent, StartEvent, StepEvent, UsageEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script import journal as progress

SCRIPTS = Path(__file__).parents[1] / "lab" / "own_commands"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
PLAIN = (sys.executable,)
UNCOUNTED = (sys.executable, "-I")


@pytest.fixture
def start_nodes(start_trainspec):
    """Starts the same command on two nodes, with options of `trainspec run`; -> their processes, the first first."""

    def start(*command: str, options: tuple[str, ...] = (), numbers: tuple[int, ...] = (0, 1)):
        nodes = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--dir", "run", *options)
        return [start_trainspec("run", *nodes, "--node-rank", str(number), "--", *command) for number in numbers]

    return start


TWO_OF_THREE = ("--nnodes", "2:3")
WITH_SPARE = ("--nnodes", "2+1")


@pytest.fixture
def start_three(start_trainspec):
    """Starts the same command on three nodes, or on those of `numbers`; -> their processes."""
    endpoint = f"127.0.0.1:{free_port()}"

    def start(*options: str, numbers: tuple[int, ...] = (0, 1, 2), steps: int = 100_000):
        command = (*TORCHRUN, str(SCRIPTS / "ddp.py"), str(steps), "0.1")
        nodes = (*options, "--rdzv-endpoint", endpoint, "--dir", "run")
        return [start_trainspec("run", *nodes, "--node-rank", str(number), "--", *command) for number in numbers]

    return start


def switch_off(node) -> None:
    """Kill all processes of a node at once."""
    family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    node.wait()


def wait_for_worlds(run: RunDir, sizes: list[int], node) -> None:
    """Until the newest of the starts with these numbers of ranks makes steps."""

    def are_made() -> bool:
        events = [event for event in read_log(run.events(0)) if isinstance(event, StartEvent | StepEvent)]
        starts = [event.world_size for event in events if isinstance(event, StartEvent)]
        return starts == sizes and all(isinstance(event, StepEvent) for event in events[-3:])

    wait_for(are_made, node)


def stop(nodes) -> str:
    """Ask the first of the nodes to stop; -> what they printed."""
    nodes[0].send_signal(signal.SIGINT)
    codes, said = ended(nodes)
    assert codes == [6] * len(nodes), said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("options", "worlds"), [(TWO_OF_THREE, [3, 2]), (WITH_SPARE, [2, 2])], ids=["fewer", "spare"])
def test_a_command_restarts_without_a_node_that_died(start_three, tmp_path, wait_for_step, options, worlds):
    nodes = start_three(*options)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    switch_off(nodes[1])
    wait_for_worlds(run, worlds, nodes[0])
    said = stop([nodes[0], nodes[2]])
    assert "the run restarts on 2 nodes" in said and "node 2: joined start 2" in said


@pytest.mark.slow
def test_a_command_on_fewer_nodes_restarts_on_all_when_a_node_returns(start_three, tmp_path, wait_for_step):
    nodes = start_three(*TWO_OF_THREE)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    switch_off(nodes[2])
    wait_for_worlds(run, [3, 2], nodes[0])
    nodes[2:] = start_three(*TWO_OF_THREE, numbers=(2,))
    wait_for_worlds(run, [3, 2, 3], nodes[0])
    assert "the command restarts with it" in stop(nodes)


@pytest.mark.slow
def test_a_command_waits_for_a_node_that_died_and_has_no_substitute(start_three, tmp_path, wait_for_step):
    nodes = start_three("--nnodes", "2", numbers=(0, 1))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    switch_off(nodes[1])
    nodes[1:] = start_three("--nnodes", "2", numbers=(1,))
    wait_for_worlds(run, [2, 2], nodes[0])
    assert "the run waits for it" in stop(nodes)


@pytest.mark.slow
def test_another_node_takes_a_command_over_from_the_first(start_three, tmp_path, wait_for_step):
    """Later, the first node returns under its number, and all three run the command."""
    nodes = start_three(*TWO_OF_THREE)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    switch_off(nodes[0])
    wait_for_worlds(run, [3, 2], nodes[1])
    nodes = [*nodes[1:], *start_three(*TWO_OF_THREE, numbers=(0,))]
    wait_for_worlds(run, [3, 2, 3], nodes[0])
    said = stop(nodes)
    assert "node 1: takes over the run" in said and "node 0: joined start 3" in said


def ended(nodes) -> tuple[list[int], str]:
    """Return the exit codes, and what was printed with its lines joined."""
    said = " ".join(" ".join(node.communicate()[0].split()) for node in nodes)
    return [node.returncode for node in nodes], said


def steps_of(run: RunDir, rank: int = 0) -> list[int]:
    return [event.step for event in read_log(run.events(rank)) if isinstance(event, StepEvent)]


def pids_of(run: RunDir) -> dict[int, int]:
    """The processes of the newest start that train, by rank."""
    folders = max((run.root / "progress").iterdir()).iterdir()
    found = [progress.StepFile(path).read()[0] for folder in folders for path in progress.step_files(folder)]
    return {one.rank or 0: one.pid for one in found if one}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
def test_ranks_of_both_nodes_are_in_one_run(start_nodes, tmp_path, read_result, launcher):
    codes, said = ended(start_nodes(*launcher, str(SCRIPTS / "ddp.py"), "12", "0.3"))
    assert codes == [0, 0], said
    assert (read_result("run")["status"], read_result("run")["steps"]) == ("done", 12)
    run = RunDir(tmp_path / "run")
    assert [steps_of(run, rank) for rank in (0, 1)] == [list(range(1, 13))] * 2
    assert all(any(isinstance(event, UsageEvent) for event in read_log(run.events(rank))) for rank in (0, 1))
    assert len(list(run.logs.glob("launch_01/node0000[01]/output.log"))) == 2
    assert len(list(run.logs.glob("launch_01/node0000[01]/ranks/*/attempt_0/*/stderr.log"))) == (
        2 if launcher is TORCHRUN else 0
    )


@pytest.mark.slow
def test_a_killed_process_of_one_node_restarts_all_within_one_budget(start_nodes, tmp_path, read_result, wait_for_step):
    nodes = start_nodes(*TORCHRUN, str(SCRIPTS / "ddp.py"), "60", "0.1", options=("--max-restarts", "1"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    os.kill(pids_of(run)[1], signal.SIGKILL)
    codes, said = ended(nodes)
    assert codes == [0, 0], said
    assert "killed by SIGKILL" in said and "the last restart" in said
    result = read_result("run")
    assert (result["status"], result["steps"], len(result["recoveries"])) == ("done", 60, 1)
    assert len(list((tmp_path / "run" / "generations").glob("*.json"))) == 2
    assert [steps_of(run, rank)[-1] for rank in (0, 1)] == [60, 60]


@pytest.mark.slow
def test_a_failure_before_the_first_step_ends_all_nodes(start_nodes, tmp_path, read_result):
    codes, said = ended(start_nodes(*PLAIN, str(SCRIPTS / "fails_on_one.py")))
    assert codes == [5, 5], said
    assert "broken on rank 1" in said
    assert (read_result("run")["status"], read_result("run")["exit_code"]) == ("failed", 1)
    assert len(list((tmp_path / "run" / "generations").glob("*.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_to_stop_on_either_node_reaches_both(start_nodes, tmp_path, read_result, wait_for_step, asked):
    nodes = start_nodes("env", "PLACE=saves", *PLAIN, str(SCRIPTS / "loop.py"), "4000", "0.01")
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    wait_for(lambda: len(pids_of(run)) == 2, nodes[0])
    started = pids_of(run)
    nodes[asked].send_signal(signal.SIGINT)
    codes, said = ended(nodes)
    assert codes == [6, 6], said
    assert all("saved" in log.read_text() for log in run.logs.glob("launch_01/node*/output.log"))
    assert (read_result("run")["status"], read_result("run")["exit_code"]) == ("stopped", 0)
    assert not any(map(psutil.pid_exists, started.values()))


@pytest.mark.slow
def test_a_stopped_rank_of_the_other_node_is_named(start_nodes, tmp_path, wait_for_step):
    options = ("--hang-s", "6", "--max-restarts", "0")
    nodes = start_nodes(*TORCHRUN, str(SCRIPTS / "ddp.py"), "4000", "0.05", options=options)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, nodes[0])
    os.kill(pids_of(run)[1], signal.SIGSTOP)
    codes, said = ended(nodes)
    assert codes == [5, 5], said
    assert "rank 1: it" in said and "not respond" in said
    hung = {rank: [event for event in read_log(run.events(rank)) if isinstance(event, HangEvent)] for rank in (0, 1)}
    assert [hung[rank][0].waiting for rank in (0, 1)] == [True, False]
    assert "ddp.py" in hung[1][0].stack


def uncounted_process(node) -> int:
    """The process that trains below one node's."""
    return next(
        child.pid
        for child in psutil.Process(node.pid).children(recursive=True)
        if child.cmdline()[1:2] == ["-I"] and "ddp.py" in " ".join(child.cmdline())
    )


@pytest.mark.slow
def test_a_stopped_process_of_the_other_node_is_named_where_no_step_is_counted(start_nodes, tmp_path):
    options = ("--hang-s", "10", "--max-restarts", "0")
    nodes = start_nodes(*UNCOUNTED, str(SCRIPTS / "ddp.py"), "4000", "0.05", options=options)
    wait_for((tmp_path / "checkpoint.pt").exists, nodes[0])
    stopped = uncounted_process(nodes[1])
    os.kill(stopped, signal.SIGSTOP)
    codes, said = ended(nodes)
    assert codes == [5, 5], said
    assert "no activity for" in said and f"rank 1, process {stopped} (" in said and "is stopped" in said
    assert not psutil.pid_exists(stopped)


@pytest.mark.slow
def test_what_is_not_counted_is_started_again_on_all_nodes_once_one_has_worked(start_nodes, tmp_path, read_result):
    nodes = start_nodes(*UNCOUNTED, str(SCRIPTS / "ddp.py"), "60", "0.1", options=("--work-s", "1"))
    wait_for((tmp_path / "checkpoint.pt").exists, nodes[0])
    os.kill(uncounted_process(nodes[1]), signal.SIGKILL)
    codes, said = ended(nodes)
    assert codes == [0, 0], said
    result = read_result("run")
    assert (result["status"], result["steps"], len(result["recoveries"])) == ("done", 0, 1)


@pytest.mark.slow
def test_a_number_that_is_given_twice_is_refused_and_the_run_goes_on(start_nodes):
    codes, said = ended(start_nodes(*PLAIN, str(SCRIPTS / "ddp.py"), "80", "0.1", numbers=(0, 1, 1)))
    assert sorted(codes) == [0, 0, 2], said
    assert "--node-rank 1 " in said and "twice" in said


@pytest.mark.slow
def test_another_command_than_the_first_nodes_is_refused(start_trainspec, tmp_path):
    nodes = ("run", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--dir", "run", "--node-rank")
    first = start_trainspec(*nodes, "0", "--", sys.executable, str(SCRIPTS / "ddp.py"), "5")
    other = start_trainspec(*nodes, "1", "--", sys.executable, str(SCRIPTS / "ddp.py"), "6")
    codes, said = ended([other])
    assert codes == [2] and "first node runs" in said and "ddp.py 5" in said, said
    first.send_signal(signal.SIGINT)
    assert ended([first])[0] == [130], "it has begun nothing"
