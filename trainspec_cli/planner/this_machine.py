"""Predict a run on this machine: on its GPUs by the capacity planner, on its CPU by a probe; find what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.balance.batch.division import count_micro_batches, turns_of
from trainspec_cli.planner.capacity import software_of, template_of
from trainspec_cli.planner.hardware.cluster import chip_of, describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import axis_groups
from trainspec_cli.planner.memory.frameworks import memory_limit_bytes
from trainspec_cli.planner.memory.local import peak_memory, tensor_bytes
from trainspec_cli.planner.memory.predict import predict_memory
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.time.local import planned_links, step_parts_s
from trainspec_cli.planner.time.step import assemble_step, micro_batch
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan
from trainspec_cli.recipe.results.tools import MachineProbe

# The CPU

DEPARTURES = (
    *("gated_mlp", "activation", "gate_limit", "learned_positions", "sliding_window", "mla", "experts"),
    *("prediction_layers", "attention_bias", "qk_norm", "attention_sinks"),
)
"""Fields of a decoder by which its arithmetic is another than the llama's."""


def is_predictable(plan: Plan) -> bool:
    """A probe speaks of llamas on the CPU, trained whole, whose blocks are eager, kept whole, and spread by data
    parallelism alone."""
    layout = plan.layout
    whole = (layout.cp, layout.tp, layout.pp, layout.ep) == (1, 1, 1, 1)
    eager = not plan.spec.compile and plan.recompute == "none" and plan.offload == "none"
    trained = plan.device == "cpu" and plan.num_nodes == 1 and not plan.spec.lora.rank
    return trained and whole and eager and is_llama(plan.spec.model)


def is_llama(model: ModelSpec) -> bool:
    """A decoder that departs from the llama in nothing but its sizes and positions."""
    if not isinstance(model, DecoderModel):
        return False
    plain = {name: DecoderModel.__dataclass_fields__[name].default for name in DEPARTURES}
    return all(getattr(model, name) == value for name, value in plain.items())


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Predict a plan that `is_predictable`."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(
        time_s=step_parts_s(plan, model, probe),
        memory=peak_memory(plan, model, probe),
        links=planned_links(plan, model, probe),
    )


def least_memory(plan: Plan) -> LocalPrediction:
    """Predict the tensors alone of a plan that `is_predictable`, on a machine without a probe; it has no times."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(time_s={}, memory=tensor_bytes(plan, model))


PASSING = ("gradients", "activations", "loss", "logits", "collectives", "fragmentation")
"""Causes of memory that a process has none of between two steps."""
STATE = ("parameters", "optimizer", "error feedback")
MOVING_BYTES = 2.0 * 2**26
"""A bucket of the state that is being moved (`engine/checkpoint/reshard.py`), and its messages."""


def moving_bytes(before: LocalPrediction, after: LocalPrediction) -> float:
    """Return what a process needs at most while its state goes from one layout to another.

    At most both lie there whole: a rank may get all that is new to it before it gives anything away.
    """
    kept = sum(size for cause, size in before.memory.items() if cause not in PASSING)
    return kept + sum(after.memory.get(cause, 0.0) for cause in STATE) + MOVING_BYTES + sum(before.beside.values())


# GPUs


def is_known(plan: Plan, machine: Machine) -> bool:
    """The plan runs on GPUs of this machine whose chip is known (`chip_of`)."""
    return plan.device == "cuda" and chip_of(machine)[0] is not None


def predict_device(plan: Plan, machine: Machine) -> LocalPrediction:
    """Predict a plan whose GPUs are known (`is_known`)."""
    setup = setup_of(plan, machine)
    eff = efficiency_of(plan.spec.cluster)
    memory = max(predict_memory(setup, plan.recompute), key=lambda stage: stage.total_bytes)
    return LocalPrediction(
        time_s=gpu_parts_s(setup, eff),
        memory={
            "parameters": memory.parameters_bytes,
            "gradients": memory.gradients_bytes,
            "optimizer": memory.optimizer_bytes,
            "activations": memory.activations_bytes,
            "logits": memory.logits_bytes,
            "collectives": memory.comm_buffers_bytes,
            **({"error feedback": memory.feedback_bytes} if memory.feedback_bytes else {}),
        },
        beside={"fragmentation": memory.fragmentation_bytes, "context": memory.context_bytes},
    )


def device_limit_bytes(plan: Plan, machine: Machine) -> float:
    """Bytes that a plan may take of the smallest GPU."""
    return memory_limit_bytes(setup_of(plan, machine).fabric.chip)


def setup_of(plan: Plan, machine: Machine) -> Setup:
    """Return the plan's setup on the GPUs that were found, whatever accelerator the recipe describes; its replica
    groups are replicas of one layout."""
    cluster = replace(plan.spec.cluster, accelerator=None, devices_per_node=plan.devices_per_node)
    template = template_of(plan.spec, describe_fabric(cluster, machine))
    layout = plan.as_one_group.layout
    return replace(
        template,
        layout=layout,
        replica_groups=plan.replica_groups if plan.replica_groups > 1 else template.replica_groups,
        micro_batch_size=float(plan.micro_batch_size),
        grad_accum=plan.grad_accum_steps,
        compute=plan.compute,
        recompute=RECOMPUTE[plan.recompute],
        offload_optimizer=plan.offload == "optimizer",
        matmul=plan.compute if plan.spec.precision.matmul == "compute" else template.matmul,
        software=replace(software_of(plan.spec, layout.sharding), wire=plan.comm),
    )


def gpu_parts_s(setup: Setup, eff: Efficiency) -> dict[str, float]:
    """Seconds by part of a step, as the engine marks them on a GPU: gradients travel inside the backward."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    once = micro_batch(setup, groups, eff)
    time = assemble_step(setup, once, groups, eff)
    # The step's model has no times of passes: its work is split in the proportion of a mean layer and the head.
    forward = sum(part.time.forward for part in (once.layer, once.head))
    backward = sum(part.time.backward for part in (once.layer, once.head))
    work_s = time.matmul_s + time.attention_s + time.memory_bound_s
    forward_s = work_s * forward / (forward + backward)
    parts = {"data_wait": time.data_s, "forward": forward_s, "optimizer": time.optimizer_s, "other": time.host_s}
    return parts | {"backward": time.total_s - sum(parts.values())}


# What would fit

Predict = Callable[[Plan], LocalPrediction]


def suggest(plan: Plan, predict: Predict, limit_bytes: float) -> str:
    """The first change, of those that keep the result the same, with which the plan fits; "" where none does.

    `limit_bytes` is what one process may take.
    """
    ranks = plan.layout.data_parallel_size
    per_rank = math.ceil(plan.spec.batching.global_batch_size / (ranks * plan.replica_groups))
    sharded = replace(plan.layout, dp_replicate=1, dp_shard=ranks, zero_stage=3)
    for layout, words in ((plan.layout, ""), (sharded, f"layout.dp_replicate=1 layout.dp_shard={ranks}")):
        sizes = range(plan.micro_batch_size, 0, -1)
        for accum in dict.fromkeys(count_micro_batches(per_rank, size, turns_of(layout)) for size in sizes):
            micro = math.ceil(per_rank / accum)
            other = replace(plan, layout=layout, micro_batch_size=micro, grad_accum_steps=accum)
            if predict(other).needed_bytes <= limit_bytes:
                return " ".join(filter(None, (words, f"batching.micro_batch_size={micro}")))
    return ""
