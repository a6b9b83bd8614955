"""From a plan to a model, an optimizer and their place in the mesh; each phase once, in order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainspec_cli.engine.mesh import build_mesh, data_parallel_rank
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.optim.build import build_optimizer
from trainspec_cli.engine.parallel.data_parallel import apply_data_parallel
from trainspec_cli.engine.parallel.materialise import materialise
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass
class Machinery:
    """What a trainer works with."""

    device: torch.device
    mesh: DeviceMesh
    clock: StepClock
    model: Any
    optimizer: torch.optim.Optimizer
    data_rank: int
    """Among the data-parallel ranks."""


def join_processes(device_type: str) -> torch.device:
    """Meet the other ranks (torchrun's environment says where); -> this rank's device."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(BACKENDS[device_type], timeout=COLLECTIVE_TIMEOUT)
    return device


def build_machinery(plan: Plan, device: torch.device) -> Machinery:
    """Model on meta -> compile -> shard -> materialise -> optimizer."""
    mesh = build_mesh(plan.layout, device.type)
    clock = StepClock(device)
    model = build_model(plan)
    if plan.spec.compile:
        for module in model.compile_modules():
            module.compile()
    apply_data_parallel(
        model,
        mesh,
        compute=DTYPES[plan.compute],
        reduce=DTYPES[plan.spec.precision.reduce],
        free_after_forward=plan.layout.zero_stage == 3,
        time_collective=clock.collective,
    )
    materialise(model, device, plan.spec.train.seed)
    optimizer = build_optimizer(model, plan.spec.optim)
    return Machinery(device, mesh, clock, model, optimizer, data_parallel_rank(mesh, plan.layout))


def build_model(plan: Plan) -> Decoder:
    assert isinstance(plan.spec.model, DecoderModel), "other families are refused before launch"
    with torch.device("meta"):
        return Decoder(plan.spec.model, plan.spec.data.seq_len)
