"""What tests of several rooms share."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from lab import measured, strangers
from lab.tracing import Trace, open_tracer

from trainspec_cli.corpus import bpe
from trainspec_cli.planner.plan import plan
from trainspec_cli.rundir.events import PARTS
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec, Machine
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection
from trainspec_cli.spec.results.probe import Curve, MachineProbe, MatmulCurves, Passes, Reference

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

LAUNCHING = ("integration", "slurm", "cli", "launch", "certify", "engine", "planner", "fuzz")
"""Folders whose files take longest: they begin first, so that no process is left with one of them at the end."""
EXCUSED_IN_CI = ("needs a GPU", "needs macOS", "runs on CUDA alone")

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


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes or more for the whole suite, most of which waits; none for files that somebody names."""
    return max(2, (os.cpu_count() or 2) // 2) if config.args_source is config.ArgsSource.TESTPATHS else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder, stably: the order of tests within a file stays."""
    items.sort(key=lambda item: LAUNCHING.index(folder) if (folder := _folder(item)) in LAUNCHING else len(LAUNCHING))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


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
    if not any(excuse in reason for excuse in EXCUSED_IN_CI):
        report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {reason}"
    return report


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
        **dict.fromkeys(CURVES, curve),
        **dict.fromkeys(PASSES, Passes(curve, curve)),
    )


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for TRAINSPEC_CACHE that has a probe of this machine. Tests add to it and take nothing away."""
    return measured.measured_cache(tmp_path_factory)


@pytest.fixture(scope="session")
def trace() -> Iterator[Trace]:
    with open_tracer() as trace:
        yield trace


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
    """A folder in which every user may make files."""
    with strangers.shared_folder() as folder:
        yield folder


SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 100.0, "rope_scaling": LLAMA3_ROPE},
    "llama_biased": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}
"""Published families, tiny; their random weights are large enough for logits to tell them apart."""


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    """hf_folder("qwen3"): what `save_pretrained` of transformers writes of a tiny model, with a tokenizer beside it."""
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
