"""PyTorch training state: the content of an attached script's checkpoint, and its files.

CHECKPOINTS/step_00000100/ contains `state.pt` (tensors and plain values, which torch reads without unpickling code) and
`manifest.json` with the digest. Rank 0 writes the folder under a temporary name, flushes it to disk and renames it, so
a checkpoint is either complete or absent."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.tensor import DTensor

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import NEWER_VERSION, UNKNOWN_VERSION
from trainspec_cli.run.folder.files import read_versioned, write_versioned
from trainspec_cli.run.folder.paths import CHECKPOINT_MANIFEST

STATE = "state.pt"
WHOLE = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
PREFIX = "step_"


@dataclass
class Trained:
    """The objects that a script trains. `others` are further objects with `state_dict` and `load_state_dict`, such as a
    scheduler or a scaler."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    others: dict[str, torch.optim.lr_scheduler.LRScheduler]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded, as with FSDP2, which uses DTensors."""
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())

    def state(self) -> dict[str, object]:
        """Return the full state. Called collectively by all ranks of a sharded model; rank 0 gets the state."""
        if self.is_sharded:
            model = sharded.get_model_state_dict(self.model, options=WHOLE)
            optimizer = sharded.get_optimizer_state_dict(self.model, self._bare_optimizer(), options=WHOLE)
        else:
            model = _bare(self.model).state_dict()
            optimizer = self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer} | {name: one.state_dict() for name, one in self.others.items()}

    def restore(self, state: dict[str, dict[str, object]]) -> None:
        if self.is_sharded:
            model: Any = state["model"]  # as returned by `state`
            updates: Any = state["optimizer"]
            sharded.set_model_state_dict(self.model, model, options=WHOLE)
            sharded.set_optimizer_state_dict(self.model, self._bare_optimizer(), updates, options=WHOLE)
        else:
            _bare(self.model).load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        for name, one in self.others.items():
            one.load_state_dict(state[name])

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer inside Accelerate's wrapper."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(inner, torch.optim.Optimizer)
        return inner


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


# Random numbers


def random_state() -> dict[str, object]:
    """Return the random states of Python, numpy, torch and the accelerator of this process."""
    version, numbers, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=True)
    kind, keys, place, has_gauss, cached = of_numpy
    state: dict[str, object] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    chip = torch.accelerator.current_accelerator(check_available=True)
    module: Any = torch.get_device_module(chip) if chip else None
    if chip and getattr(module, "is_initialized", lambda: True)():
        state[chip.type] = module.get_rng_state()
    return state


def set_random_state(state: dict[str, object]) -> None:
    of_python: Any = state["python"]  # as returned by `random_state`
    version, numbers, gauss = of_python
    random.setstate((version, tuple(numbers), gauss))
    of_numpy: Any = state["numpy"]
    kind, keys, *rest = of_numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    for kind in state.keys() - {"python", "numpy", "torch"}:
        module: Any = torch.get_device_module(kind)
        module.set_rng_state(state[kind])


# Checkpoint files


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())


def newest_sound(folder: Path) -> Path | None:
    """Return the newest checkpoint with a valid digest. Damaged checkpoints are reported on stderr."""
    for path in reversed(checkpoints_in(folder)):
        fault = f"{path} is damaged"
        try:
            if read_versioned(path / CHECKPOINT_MANIFEST).get("sha256") == _digest(path / STATE):
                return path
        except MachineError as error:
            if error.problems[0].code in (NEWER_VERSION, UNKNOWN_VERSION):
                fault = str(error)
        except OSError:
            pass
        print(f"trainspec: {fault}, so it is not used", file=sys.stderr)
    return None


def read_state(path: Path) -> dict[str, dict[str, object]]:
    state: dict[str, dict[str, object]] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def write_state(folder: Path, step: int, state: dict[str, object], ranks: int, keep: int) -> tuple[Path, int]:
    """Write a checkpoint, and delete the oldest checkpoints if there are more than `keep`. Return its folder and its
    size in bytes."""
    path = folder / f"{PREFIX}{step:08d}"
    partial = folder / f".{path.name}.{secrets.token_hex(8)}.partial"
    partial.mkdir(parents=True)
    try:
        # Flush the files before the rename and the folder after it, so that a power failure leaves a complete
        # checkpoint or none.
        torch.save(state, partial / STATE)
        _flush(partial / STATE)
        digest = _digest(partial / STATE)
        size_bytes = (partial / STATE).stat().st_size
        manifest: JsonObject = {"step": step, "ranks": ranks, "sha256": digest, "bytes": size_bytes}
        write_versioned(partial / CHECKPOINT_MANIFEST, manifest)
        _flush(partial)
        if path.exists():  # the run was resumed from an older checkpoint
            path.rename(folder / f".{path.name}.{secrets.token_hex(8)}.partial")
        partial.rename(path)
        _flush(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in [*checkpoints_in(folder)[:-keep], *folder.glob(".step_*.partial")]:
        shutil.rmtree(old, ignore_errors=True)
    return path, size_bytes


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
