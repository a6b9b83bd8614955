"""Fixtures and hooks for tests of several folders."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from lab import measured, strangers
from lab.drawing import NOT_DRAWN, order_of_commit
from lab.other_frameworks import NOT_IN_CI
from lab.published import MODELS, SIZES
from lab.recorded import Recorded
from lab.tracing import Trace, open_forks, tracer

from trainspec_cli.data.corpus import bpe
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.tools import Curve, MachineProbe, MatmulCurves, Passes, Reference
from trainspec_cli.run.folder.event_types.events import PARTS

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

STATE = tempfile.TemporaryDirectory(prefix="trainspec-state-")
os.environ["XDG_STATE_HOME"] = STATE.name  # runs that tests make are not listed among the user's
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would spin while those of other processes compute
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of hundreds of processes compiles the package for itself
sys.dont_write_bytecode = False

settings.register_profile(
    "trainspec",
    deadline=None,
    derandomize=bool(os.environ.get("TRAINSPEC_CI")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("trainspec")

LONGEST = ("engine", "integration", "planner", "run", "cli", "wings", "slurm", "fuzz")
"""Folders whose files take longest: they begin first, so that no process is left with one of them at the end."""
PROBING = "test_probe.py"
"""It measures this machine, which whole runs wait for: one process does while the others are at the engine's tests."""
LATE_IN_CI = "CI's time for slow tests is over"
EXCUSED_IN_CI = ("needs a GPU", "needs macOS", "only on CUDA", LATE_IN_CI, NOT_IN_CI)

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
SPEC = RunSpec(
    model=DecoderModel(1, 64, 2, 2, 32, 128, 512, tied_embeddings=True),
    data=DataSpec(seq_len=256, source="python_stdlib"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=16),
    train=TrainSection(max_steps=1),
    cluster=ClusterSpec(devices_per_node=2, device="cpu"),
)
CURVES = ("loss", "add", "cast", "optimizer", "all_reduce", "all_gather", "reduce_scatter")
PASSES = ("attention", "attention_narrow", "norm", "rope", "swiglu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the texts in expected/ folders again")


def pytest_configure() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would whatever the tests of one start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Four processes or more for the whole suite, because many tests wait; none for files given by name."""
    return max(4, (os.cpu_count() or 2) // 2) if config.args_source is config.ArgsSource.TESTPATHS else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting leaves a million objects that stay until the end: no garbage collection looks at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder, stably: the order of tests within a file stays. CI runs files of slow tests in an order drawn by
    commit until its time is over, so that a few commits run them all."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    drawn = order_of_commit(sorted(slow)) if os.environ.get("TRAINSPEC_CI") else []
    places = {path: place for place, path in enumerate(drawn)}

    def turn(item: pytest.Item) -> tuple[bool, int]:
        if item.path in places and item.get_closest_marker("slow"):
            return True, places[item.path]
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return item.path.name != PROBING, LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=turn)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files with tests that CI has left out; `.ci/run` repeats this line at its end."""
    reasons = (LATE_IN_CI, NOT_DRAWN)
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    left_out = [one for one in skipped if isinstance(one.longrepr, tuple) and one.longrepr[2].endswith(reasons)]
    if left_out:
        counted = Counter(one.nodeid.partition("::")[0] for one in left_out)
        named = ", ".join(f"{file.removeprefix('tests/')} ({count})" for file, count in sorted(counted.items()))
        terminalreporter.write_line(f"left out: {len(left_out)} slow tests of {len(counted)} files: {named}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a machine that other programs slow, CI begins fewer of the slow tests rather than take longer."""
    last_begin = float(os.environ.get("TRAINSPEC_CI_LAST_BEGIN", "inf"))
    if item.get_closest_marker("slow") and time.time() > last_begin:
        pytest.skip(LATE_IN_CI)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _refuse_skip(report)


def _refuse_skip(report: Report) -> Report:
    """In CI (TRAINSPEC_CI=1) a skipped test is a failure, unless its reason is that CI has no such machine."""
    if not os.environ.get("TRAINSPEC_CI") or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    if not any(excuse in reason for excuse in (*EXCUSED_IN_CI, NOT_DRAWN)):
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {reason}"
    return report


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """recorded(text): the text is the one that expected/ has for this test."""
    return Recorded(request)


@pytest.fixture
def made_up_probe() -> MachineProbe:
    """A machine on which everything takes a second a unit."""
    curve, reference = Curve((1.0, 2.0), (1.0, 2.0)), Reference(plan(SPEC, MACHINE), dict.fromkeys(PARTS, 1.0), 0.0)
    return MachineProbe(
        processes=2,
        compute="bf16",
        empty_step_s=dict.fromkeys(PARTS, 1.0),
        empty_block_s=dict.fromkeys(PARTS, 1.0),
        small=reference,
        large=reference,
        matmul=MatmulCurves(curve, curve, curve),
        bare_bytes=1.0,
        displaced=0.0,
        peak_flops=1.0,
        **dict.fromkeys(CURVES, curve),
        **dict.fromkeys(PASSES, Passes(curve, curve)),
    )


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for TRAINSPEC_CACHE that has a probe of this machine. Tests add to it and take nothing away."""
    return measured.measured_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def forks() -> Iterator[ProcessPoolExecutor]:
    with open_forks() as forks:
        yield forks


@pytest.fixture(scope="session")
def trace(forks: ProcessPoolExecutor) -> Trace:
    return tracer(forks)


@pytest.fixture
def stranger() -> Callable[..., Any]:
    """stranger("mkdir $1", folder): what another user of this machine does, who must get away with it."""
    if why := strangers.lacking():
        pytest.skip(why)

    def act(script: str, *arguments: str | Path) -> None:
        done = strangers.act(script, *arguments)
        assert done.returncode == 0, done.stderr

    return act


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may write to."""
    with strangers.shared_folder() as folder:
        yield folder


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    """hf_folder("qwen3"): a tiny model as `save_pretrained` of transformers writes it, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    import torch

    def make(name: str, **save: Any) -> Path:
        folder = tmp_path / f"hf_{name}"
        config = transformers.AutoConfig.for_model(**(SIZES | MODELS[name]))
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(0.1, 0.3)
        model.save_pretrained(folder, **save)
        bpe.train(["the quick brown fox " * 9], 300).save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """write("recipes/mine.yaml", text): a file in a user's own project, which is the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
        return file

    return write_file


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every ("fsync", NAME) and ("rename", NEW NAME) of this process, in the order of the calls."""
    calls: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def record(call: Callable[..., None]) -> Callable[..., None]:
        def recorded(source: Any, target: Any, **options: Any) -> None:
            call(source, target, **options)
            calls.append(("rename", Path(target).name))

        return recorded

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record(rename))
    monkeypatch.setattr(os, "replace", record(replace))
    return calls
