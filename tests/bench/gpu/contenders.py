"""Who trains in speed.py: each gives the seconds of a step, the mean over those after the first ones."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

from .workloads import Workload, arguments_of, unpredicted

WARMUP_STEPS = 5
CLIP_NORM, LEARNING_RATE = 1.0, 3e-4


@dataclass(frozen=True)
class Contender:
    run: Callable[..., float]
    needs: str
    """A package."""
    setting: str = ""
    serves: Callable[[Workload], bool] = lambda _workload: True


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(CONTENDERS[name].needs) is not None


def run_contender(name: str, workload: Workload, tokens: str, steps: int, device: str) -> float:
    contender = CONTENDERS[name]
    return contender.run(workload, tokens, steps, device, contender.setting)


def read_batches(tokens: str, workload: Workload, steps: int) -> Any:
    """(steps, samples, tokens of a sample) of int64."""
    import torch

    count = steps * workload.batch_size * workload.seq_len
    ids = np.fromfile(tokens, np.uint16, count).astype(np.int64)
    return torch.from_numpy(ids).view(steps, workload.batch_size, workload.seq_len)


# This engine, in a run started as a user would


def run_trainspec(workload: Workload, tokens: str, steps: int, device: str, setting: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder, "run"))
        data = ["data=phantom"] if workload.is_unet else ["data=nanogpt", f"data.path={tokens}"]
        given = [*data, f"train.max_steps={steps + 2}", "run.preflight=false", f"run.dir={run_dir.root}"]
        given += [f"compile={str(setting == 'compiled').lower()}", *([] if workload.is_unet else unpredicted(device))]
        command = [sys.executable, "-m", "trainspec_cli", "launch", *arguments_of(workload, device, *given), "--force"]
        steps_s = follow(command, run_dir, steps)
        return sum(steps_s[WARMUP_STEPS:]) / len(steps_s[WARMUP_STEPS:])


def follow(command: list[str], run_dir: RunDir, steps: int) -> list[float]:
    """The seconds of each step. Then the run is killed: what it would write at its end is tens of gigabytes."""
    launch = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            ended = launch.poll() is not None
            events = [event for event in read_events(run_dir.events(0)) if event["type"] == "step"]
            if len(events) >= steps:
                return [event["step_time_s"] for event in events[:steps]]
            if ended:
                raise RuntimeError(f"Error: {(launch.communicate()[1].strip().splitlines() or ['no word'])[-1]}")
            time.sleep(0.1)
    finally:
        own = psutil.Process(launch.pid)
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launch.wait()


# A plain loop over a model of transformers


def hugging_face_model(workload: Workload) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, settings = hugging_face_config(workload)
    config = AutoConfig.for_model(kind, **settings)
    attention = {"attn_implementation": "sdpa"} if kind != "mamba2" else {}
    return AutoModelForCausalLM.from_config(config, **attention)


def hugging_face_config(workload: Workload) -> tuple[str, dict[str, Any]]:
    """-> (model type, its settings)."""
    model = workload.model
    if isinstance(model, DecoderModel):
        from trainspec_cli.data.huggingface.config import write_config

        config = write_config(model, workload.seq_len, "float32") | {"use_cache": False}
        return config.pop("model_type"), {key: value for key, value in config.items() if key != "architectures"}
    assert isinstance(model, HybridModel), "a U-Net has no contender"
    return "mamba2", {
        "num_hidden_layers": model.mamba_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_heads": model.mamba_heads,
        "head_dim": model.mamba_head_dim,
        "state_size": model.mamba_state_size,
        "n_groups": model.mamba_groups,
        "expand": model.mamba_expand,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def run_hugging_face(workload: Workload, tokens: str, steps: int, device: str, setting: str) -> float:
    """`bf16`: parameters and moments in bf16 too, which costs precision; else autocast over fp32, as this engine."""
    import torch

    with torch.device(device):
        model = hugging_face_model(workload)
    model.train()
    if setting == "bf16":
        model.to(torch.bfloat16)
    forward = model if setting == "eager" else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = read_batches(tokens, workload, steps)
    batches = batches.pin_memory() if device != "cpu" else batches
    for step, batch in enumerate(batches):
        if step == WARMUP_STEPS:
            started = now(device)
        ids = batch.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=setting != "bf16"):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return (now(device) - started) / (steps - WARMUP_STEPS)


def now(device: str) -> float:
    """When the device has done what it was given."""
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def has_fast_scan(workload: Workload) -> bool:
    """transformers' own Mamba-2 holds all of a chunk's states unless these packages are there."""
    if workload.is_unet or workload.precision != "bf16":
        return False
    decoder = isinstance(workload.model, DecoderModel)
    return decoder or all(importlib.util.find_spec(name) for name in ("mamba_ssm", "causal_conv1d"))


def has_fast_autocast(workload: Workload) -> bool:
    """Under autocast transformers multiplies experts in the format of their weights: fp32."""
    return has_fast_scan(workload) and getattr(workload.model, "experts", None) is None


def has_titan_size(workload: Workload) -> bool:
    """Llama 3's own."""
    return workload.is_dense and workload.precision == "bf16" and workload.model.hidden_size in (2048, 4096)


def run_titan(workload: Workload, tokens: str, steps: int, device: str, setting: str) -> float:
    from .titan import train

    return train(workload, read_batches(tokens, workload, steps), WARMUP_STEPS)


CONTENDERS = {
    "trainspec": Contender(run_trainspec, "trainspec_cli", "compiled"),
    "trainspec-eager": Contender(run_trainspec, "trainspec_cli", "eager"),
    "hf": Contender(run_hugging_face, "transformers", "compiled", has_fast_autocast),
    "hf-bf16": Contender(run_hugging_face, "transformers", "bf16", has_fast_scan),
    "hf-eager": Contender(run_hugging_face, "transformers", "eager", has_fast_autocast),
    "torchtitan": Contender(run_titan, "torchtitan", serves=has_titan_size),
}
