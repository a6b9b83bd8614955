"""Checks of whole runs, started as a user starts them."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

from .machine import ROOT, describe_machine, measure_chip
from .record import Items, last_lines
from .schedule import kill_all
from .workloads import WORKLOADS, arguments_of, on_one, unpredicted, write_tokens

CLI = (sys.executable, "-m", "trainspec_cli")
KERNEL_RUNS = {
    "llama": ("recipe=quickstart", "optim.name=adamw", "data.seq_len=512"),
    "experts": ("recipe=tiny_moe", "model.hidden_size=256", "model.experts.expert_ffn_size=512", "data.seq_len=512"),
    "mamba2": ("recipe=tiny_mamba2", "model.hidden_size=256", "data.seq_len=512"),
}


def run(*command: str, **environment: str) -> str:
    """Return what a command prints. Raises RuntimeError with the end of what it said where it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT)
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}: {last_lines(ended.stdout + ended.stderr)}")
    return ended.stdout


def machine(items: Items, device: str, tiny: bool) -> None:
    items.take("machine", describe_machine)
    items.take("chip", lambda: measure_chip(device))


def quickstart(items: Items, device: str, tiny: bool) -> None:
    given = ["recipe=quickstart", *on_one(device), *unpredicted(device)]
    if tiny:
        given += ["train.max_steps=4", "train.eval_interval_steps=2", "data.max_bytes=400000"]
        given.append("optim.schedule.warmup_steps=0")
    items.take("quickstart", lambda: launched(*given), least_s=30)


def launched(*arguments: str) -> dict[str, Any]:
    """Launch a run and return its figures: speed, waits, copies, allocations, memory, and the prediction of each."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        started = time.monotonic()
        run(*CLI, "launch", *arguments, f"run.dir={root}", "--force")
        return figures_of(RunDir(root)) | {"whole_s": time.monotonic() - started}


def figures_of(run_dir: RunDir, skipped: int = 5) -> dict[str, Any]:
    events = list(read_events(run_dir.events(0)))
    steps = [event for event in events if event["type"] == "step"]
    late = steps[skipped:] or steps
    result = json.loads((run_dir.root / "result.json").read_text())
    plan = json.loads((run_dir.root / "plan.json").read_text())
    return {
        "steps": len(steps),
        "step_s": statistics.median(step["step_time_s"] for step in late),
        "parts_s": {part: statistics.median(step["time_s"][part] for step in late) for part in late[0]["time_s"]},
        "h2d_copies": statistics.median(step["h2d_copies"] for step in late),
        "h2d_bytes": statistics.median(step["h2d_bytes"] for step in late),
        "allocations": sum(step["allocations"] for step in late),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "result": {key: value for key, value in result.items() if isinstance(value, int | float | str)},
        "prediction": plan.get("prediction"),
        "saves": [event for event in events if event["type"] == "checkpoint"],
        "memory": [event for event in events if event["type"] == "memory"],
    }


def tests(files: Sequence[str], items: Items, device: str, tiny: bool) -> None:
    for file in files:
        items.take(file, functools.partial(pytest_of, file), least_s=20)


def pytest_of(file: str) -> dict[str, Any]:
    """Run one file or folder of tests; the failures are named."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        workers = "8" if (ROOT / file).is_dir() and (os.cpu_count() or 1) > 8 else "0"
        ended = subprocess.run([*command, "-n", workers, file], capture_output=True, text=True, cwd=ROOT)
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report: {last_lines(ended.stdout + ended.stderr)}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {case.get("name", ""): told for case in cases if (told := _failure(case))}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def _failure(case: ElementTree.Element) -> str:
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return "" if found is None else last_lines(found.get("message") or found.text or "failed")


def kernels(items: Items, device: str, tiny: bool) -> None:
    for name, arguments in list(KERNEL_RUNS.items())[: 1 if tiny else None]:
        sized = ("recipe=tiny",) if tiny else arguments
        command = (*CLI, "kernels", *sized, *on_one(device), *unpredicted(device), "--again", "--json")
        items.take(name, lambda command=command: json.loads(run(*command)), least_s=60)


def data_path(items: Items, device: str, tiny: bool) -> None:
    """Waits for data, copies, allocations, and step time and memory against the prediction, of a launched run."""
    for name in ("dense_1b", "dense_8b")[: 1 if tiny else None]:
        workload = WORKLOADS[name].shrunk() if tiny else WORKLOADS[name]
        folder = Path(tempfile.mkdtemp())
        steps = 8 if tiny else 20
        tokens = write_tokens(folder, workload, 4 * steps * workload.units_a_step)
        given = ("data=nanogpt", f"data.path={tokens}", f"train.max_steps={steps}", "checkpoint.interval_steps=null")
        compiled = f"compile={str(not tiny).lower()}"
        arguments = arguments_of(workload, device, *unpredicted(device), *given, "run.preflight=false", compiled)
        items.take(name, functools.partial(launched, *arguments), least_s=60)


def stall(items: Items, device: str, tiny: bool) -> None:
    """How long a checkpoint holds training up, written at once and beside it."""
    sizes = (
        () if tiny else ("model.num_layers=12", "model.hidden_size=1024", "model.num_heads=16", "model.ffn_size=2816")
    )
    sizes += () if tiny else ("model.num_kv_heads=16", "model.head_dim=64", "optim.name=adamw", "precision=bf16")
    steps = (
        ("train.max_steps=12", "checkpoint.interval_steps=4")
        if tiny
        else ("train.max_steps=40", "checkpoint.interval_steps=10")
    )
    recipe = ("recipe=tiny" if tiny else "recipe=quickstart", *sizes, *steps, "train.eval_interval_steps=null")
    for mode in ("async", "sync"):
        given = (*recipe, *on_one(device), *unpredicted(device), "sample.max_new_tokens=0", f"checkpoint.mode={mode}")
        items.take(mode, functools.partial(launched, *given), least_s=45)


def out_of_memory(items: Items, device: str, tiny: bool) -> None:
    """A batch that is too large for the device: the run takes less at a time and goes on with the same samples."""
    items.take(
        "injected",
        lambda: launched(
            "recipe=tiny", *on_one(device), *unpredicted(device), "fault=oom(rank=0,step=5,above=4)", "scheduler=auto"
        ),
    )
    if device == "cpu":
        return
    workload = WORKLOADS["dense_1b"].with_batch(512)
    tokens = write_tokens(Path(tempfile.mkdtemp()), workload, 16 * workload.units_a_step)
    given = ("data=nanogpt", f"data.path={tokens}", "train.max_steps=3", "run.preflight=false", "scheduler=auto")
    items.take("real", lambda: launched(*arguments_of(workload, device, *given)), least_s=90)


def elastic(items: Items, device: str, tiny: bool) -> None:
    """Two replica groups on one device, each a node of its own by its name; one is killed and heals."""
    items.take("two groups", lambda: two_groups(device), least_s=60)


def two_groups(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        given = ("recipe=tiny", *on_one(device), *unpredicted(device), "resilience=elastic", "train.max_steps=100000")
        given += ("resilience.exchange_timeout_s=20", "optim.schedule.kind=constant", "train.log_interval_steps=100")
        command = [*CLI, "launch", *given, f"run.dir={root}", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29653"]
        nodes = []
        try:
            for node in range(2):
                named = os.environ | {"SLURMD_NODENAME": f"half{node}"}
                nodes.append(
                    subprocess.Popen(
                        [*command, "--node-rank", str(node), "--force"],
                        env=named,
                        stdout=subprocess.DEVNULL,
                        stderr=(Path(folder) / f"node{node}.log").open("w"),
                        cwd=ROOT,
                    )
                )
            return kill_and_heal(RunDir(root), nodes)
        except TimeoutError as error:
            said = "\n".join(last_lines(file.read_text()) for file in sorted(Path(folder).glob("node*.log")))
            raise RuntimeError(f"{error}: {said}") from error
        finally:
            for node in nodes:
                kill_all(node.pid)
                node.wait()


def kill_and_heal(run_dir: RunDir, nodes: Sequence[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Kill the worker of the second node, and wait until both groups step together again."""
    before = wait_for_step(run_dir, nodes, after=20, groups=2)
    victim = worker_below(nodes[1].pid)
    killed_at = time.time()
    victim.kill()
    alone = wait_for_step(run_dir, nodes, since=killed_at, groups=1)
    healed = wait_for_step(run_dir, nodes, since=alone["time"], groups=2)
    return {
        "step_s": before["step_time_s"],
        "stall_s": alone["time"] - killed_at,
        "healed_after_s": healed["time"] - killed_at,
        "steps": healed["step"],
    }


def wait_for_step(
    run_dir: RunDir, nodes: Sequence[subprocess.Popen[bytes]], *, after: int = 0, since: float = 0.0, groups: int
) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(node.poll() is not None for node in nodes):
            raise TimeoutError(f"a node ended with {[node.poll() for node in nodes]}")
        for event in read_events(run_dir.events(0)) if run_dir.events(0).is_file() else ():
            took_part = len(event.get("groups", ())) == groups
            if event["type"] == "step" and took_part and event["step"] > after and event["time"] > since:
                return dict(event)
        time.sleep(0.2)
    raise TimeoutError(f"no step of {groups} groups in 120 s")


def worker_below(pid: int) -> psutil.Process:
    """Return the process of a rank."""
    for process in psutil.Process(pid).children(recursive=True):
        if rank_of(process) is not None:
            return process
    raise RuntimeError("no worker is there to kill")


def speed(name: str, items: Items, device: str, tiny: bool, rounds: int = 1) -> None:
    """Tokens a second (of a U-Net volumes) of every contender, in turns."""
    from .contenders import WARMUP_STEPS
    from .speed import TINY_CONTENDERS, measure

    workload = WORKLOADS[name].shrunk() if tiny else WORKLOADS[name]
    steps = WARMUP_STEPS + (2 if tiny else 15)
    tokens = Path(tempfile.mkdtemp(), "drawn_train.bin")
    if not workload.is_unet:
        write_tokens(tokens.parent, workload, 4 * steps * workload.units_a_step)
    contenders = serving(TINY_CONTENDERS if tiny else ("trainspec", "hf", "hf-bf16", "torchtitan"), workload)
    if "hf" in contenders and rounds == 1:  # bf16 parameters are the peer where autocast is none
        contenders = [one for one in contenders if one != "hf-bf16"]
    for number in range(1 if tiny else rounds):
        for contender in contenders:
            measured = functools.partial(one_round, measure, name, contender, workload, tokens, steps, device, tiny)
            items.take(f"{contender} {number + 1}", measured, least_s=45)


def serving(names: Sequence[str], workload: Any) -> list[str]:
    from .contenders import CONTENDERS, is_installed

    return [name for name in names if is_installed(name) and CONTENDERS[name].serves(workload)]


def one_round(
    measure: Any, name: str, contender: str, workload: Any, tokens: Path, steps: int, device: str, tiny: bool
) -> dict[str, Any]:
    rate = measure(name, contender, workload, tokens, steps, device, tiny)
    if isinstance(rate, str):
        raise RuntimeError(rate)
    return {"units_per_s": rate, "flops_per_s": rate * workload.flops_per_token, "workload": workload.describe()}
