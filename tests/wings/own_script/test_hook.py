"""The hook in the user's Python: the reader understands what it writes, and it is inactive outside of its launch."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.core.environment_names import LAUNCH_ID, PROGRESS
from trainspec_cli.wings.own_script import journal as progress
from trainspec_cli.wings.own_script.job import HOOK
from trainspec_cli.wings.own_script.watches import locate, main_stack, read_collectives, read_stacks

STAND_IN = Path(__file__).parents[2] / "lab" / "own_commands" / "standin"


@pytest.fixture
def program(tmp_path: Path):
    """Return a function that runs a program under the hook, with a stand-in for torch that only has optimizers."""
    (tmp_path / "progress").mkdir()

    def start(text: str, launch: str = "one", **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text("from torch.optim.optimizer import Optimizer\n" + text)
        variables = {
            LAUNCH_ID: "one",
            PROGRESS: f"{launch}:{tmp_path / 'progress'}",
            "PYTHONPATH": f"{HOOK}:{STAND_IN}",
        }
        return subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=os.environ | variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            text=True,
        )

    return start


def counted(tmp_path: Path) -> tuple[progress.CountedProcess, list[progress.CountedStep]]:
    (path,) = progress.step_files(tmp_path / "progress")
    process, steps = progress.StepFile(path).read()
    assert process is not None
    return process, steps


def test_names_and_layout_match_those_of_the_reader() -> None:
    tree = ast.parse((HOOK / "sitecustomize.py").read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    expected = {
        "LAUNCH_ID": LAUNCH_ID,
        "PROGRESS": PROGRESS,
        "MAGIC": progress.MAGIC,
        "MAGIC_ATTACHED": progress.MAGIC_ATTACHED,
        "HEADER": progress.HEADER.format,
        "HEADER_BYTES": 64,
        "SLOT": progress.SLOT.format,
        "SLOT_BYTES": progress.SLOT.size,
        "SLOTS": progress.SLOTS,
    }
    assert {name: constants[name] for name in expected} == expected
    assert progress.HEADER.size <= progress.HEADER_BYTES


def test_steps_are_counted_with_their_times_and_nothing_is_printed(program, tmp_path) -> None:
    printed = program(
        "o = Optimizer({'step': 41})\nfor _ in range(600): o.step()", RANK="3", WORLD_SIZE="8"
    ).communicate()[0]
    assert printed == ""
    process, steps = counted(tmp_path)
    assert (process.rank, process.world_size, process.updates_before) == (3, 8, 40)
    assert [step.number for step in steps] == list(range(1, 601))
    times = [step.at for step in steps]
    assert times == sorted(times) and times[-1] - times[0] < 60


def test_optimizers_that_step_in_turn_make_one_step_together(program, tmp_path) -> None:
    program("every = [Optimizer() for _ in range(4)]\nfor _ in range(7):\n  for one in every: one.step()").wait()
    process, steps = counted(tmp_path)
    assert len(steps) == 7
    assert process.updates_before == 0 and process.rank is None


@pytest.mark.parametrize(("state", "before"), [("", 0), ("o.load_state_dict({})\n", None), ("{'step': 41}", 40)])
def test_an_optimizer_without_a_count_starts_at_0_unless_a_state_was_loaded(program, tmp_path, state, before) -> None:
    counts = state.startswith("{")
    program(f"o = Optimizer({state if counts else ''})\n{'' if counts else state}o.step()").wait()
    assert counted(tmp_path)[0].updates_before == before


def test_an_optimizer_that_steps_once_per_group_makes_one_step(program, tmp_path) -> None:
    """DeepSpeed's ZeRO does this."""
    text = (
        "o = Optimizer({'step': 1}, {'step': 1})\nevery = o.param_groups\n"
        "for _ in range(7):\n  for one in every:\n    o.param_groups = [one]\n    o.step()\n"
    )
    program(text).wait()
    process, steps = counted(tmp_path)
    assert (len(steps), process.updates_before) == (7, 0)


def test_the_rank_is_that_of_torch_distributed(program, tmp_path) -> None:
    text = (
        "import sys, types\nsys.modules['torch'].distributed = types.SimpleNamespace("
        "get_rank=lambda: 2, get_world_size=lambda: 5)\nOptimizer().step()\n"
    )
    program(text, RANK="0", WORLD_SIZE="1").wait()
    process, _ = counted(tmp_path)
    assert (process.rank, process.world_size) == (2, 5)


def test_a_step_that_only_creates_an_optimizers_state_is_not_counted(program, tmp_path) -> None:
    text = (
        "o = Optimizer({'step': 1})\ndef _init_optim_state(): o.step()\n_init_optim_state()\n"
        "o.state[0]['step'] = 11\nfor _ in range(3): o.step()\n"
    )
    program(text).wait()
    process, steps = counted(tmp_path)
    assert (len(steps), process.updates_before) == (3, 10)


def test_a_program_that_attaches_twice_still_writes_its_stack(program, tmp_path) -> None:
    """`attach` creates a file when it takes over the counting, and another one when it knows the step."""
    process = program(
        "import sys\nhook = sys.modules['_trainspec_steps']\nhook.attach(0, 1, 2)\nhook.attach(7, 1, 2)\n"
        "hook.attached_step()\nprint('here', flush=True)\ninput()"
    )
    assert process.stdout.readline() == "here\n"
    found, steps = progress.StepFile(progress.step_files(tmp_path / "progress")[-1]).read()
    assert (found.rank, found.world_size, found.updates_before, len(steps)) == (1, 2, 7, 1)
    wait_for(lambda: locate(main_stack(read_stacks([found])[found.pid], found)) == "<module>, program.py:8")
    process.communicate("\n")


def test_a_program_without_the_handler_is_not_ended_by_the_signal(program, tmp_path) -> None:
    """Lightning restores all handlers that Python knows of."""
    process = program(
        "import signal\nOptimizer().step()\nsignal.signal(signal.SIGUSR2, signal.SIG_DFL)\n"
        "print('here', flush=True)\ninput()"
    )
    assert process.stdout.readline() == "here\n"
    found, _ = counted(tmp_path)
    assert found.answers and read_stacks([found]) == {}
    process.communicate("\n")
    assert process.returncode == 0


def test_a_forked_process_counts_for_itself(program, tmp_path) -> None:
    text = (
        "import os\no = Optimizer()\no.step()\nchild = os.fork()\no.step()\nif not child: o.step()\nelse: os.wait()\n"
    )
    program(text).wait()
    made = [progress.StepFile(path).read()[1] for path in progress.step_files(tmp_path / "progress")]
    assert sorted(map(len, made)) == [2, 2]


@pytest.mark.parametrize("launch", ["another", ""])
def test_outside_of_its_launch_the_hook_is_inactive(program, tmp_path, launch) -> None:
    text = "import sys\nOptimizer().step()\nprint([place for place in sys.path if 'hook' in place])"
    assert program(text, launch).communicate()[0] == "[]\n"
    assert list((tmp_path / "progress").iterdir()) == []


def test_a_missing_folder_is_ignored(program, tmp_path) -> None:
    text = "import os\nos.rmdir('progress')\no = Optimizer()\no.step()\no.step()\nprint('well')"
    assert program(text).communicate()[0] == "well\n"


def test_a_process_writes_its_stack_on_request(program, tmp_path) -> None:
    process = program("Optimizer().step()\nprint('here', flush=True)\ninput()")
    assert process.stdout.readline() == "here\n"
    found, _ = counted(tmp_path)
    wait_for(lambda: locate(main_stack(read_stacks([found])[found.pid], found)) == "<module>, program.py:4")
    process.communicate("\n")
    assert process.returncode == 0


def test_a_process_that_inherits_an_ignored_signal_writes_its_stack(program, tmp_path) -> None:
    """Agents of several nodes ignore SIGUSR2, and their processes inherit that."""
    process = program(
        "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\no = Optimizer()\no.step()\no.step()\n"
        "print('here', flush=True)\ninput()"
    )
    assert process.stdout.readline() == "here\n"
    found, steps = counted(tmp_path)
    assert found.answers and len(steps) == 2
    wait_for(lambda: locate(main_stack(read_stacks([found])[found.pid], found)) == "<module>, program.py:8")
    process.communicate("\n")
    assert process.returncode == 0


def test_a_handler_of_the_program_is_kept(program, tmp_path) -> None:
    text = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))\n"
    # A signal that arrives just before a read would be handled only after it, so this program does not wait in one.
    process = program(text + "import time\nOptimizer().step()\nprint('here', flush=True)\nwhile True: time.sleep(0.01)")
    process.stdout.readline()
    assert not counted(tmp_path)[0].answers
    process.send_signal(signal.SIGUSR2)
    assert process.stdout.readline() == "mine\n"
    process.kill()


def test_a_handler_that_is_installed_later_is_noticed(program, tmp_path) -> None:
    text = "import signal\no = Optimizer()\no.step()\nsignal.signal(signal.SIGUSR2, lambda *_: None)\no.step()"
    program(text).wait()
    assert not counted(tmp_path)[0].answers


def test_errors_of_the_users_sitecustomize_are_shown(program, tmp_path) -> None:
    own = tmp_path / "site"
    own.mkdir()
    (own / "sitecustomize.py").write_text("raise ValueError('mine')")
    printed = program("print('goes on')", PYTHONPATH=f"{HOOK}:{STAND_IN}:{own}").communicate()[0]
    assert "ValueError: mine" in printed and printed.endswith("goes on\n")


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(12):
    dist.all_reduce(torch.ones(3, 5))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("asks", [1, 3])
def test_a_process_shows_its_newest_collectives_when_asked(program, tmp_path: Path, asks: int) -> None:
    """With torch itself, and as often as someone asks."""
    running = program(DISTRIBUTED, PYTHONPATH=str(HOOK))
    try:
        assert running.stdout.readline() == "ready\n", running.communicate()
        about = {"pid": running.pid, "rank": 0, "world_size": 1, "answers": True, "updates_before": None, "began": 0.0}
        trainer = progress.CountedProcess(**about, main_thread=0, stacks=tmp_path / "progress" / "x.stacks")
        for _ in range(asks):
            (newest,) = read_collectives([trainer]).values()
            assert [one.number for one in newest] == list(range(5, 13))
            assert {(one.kind, one.sizes, one.done) for one in newest} == {("gloo:all_reduce", ((3, 5),), True)}
    finally:
        running.communicate("")
    assert running.returncode == 0, "the thread does not keep the process"
    assert read_collectives([trainer]) == {}, "nobody answers any more"
