"""Predict a run on this machine (on GPUs with the capacity planner, on CPUs from a probe), and find changes that would
make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

from trainspec_cli.balance.batch.division import count_micro_batches, turns_of
from trainspec_cli.planner.capacity import software_of, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, chip_of, describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.engine.step import loss_bytes, outer_bytes_of, run_of
from trainspec_cli.planner.memory.predict import feedback_bytes, memory_limit_bytes, predict_memory
from trainspec_cli.planner.setup import RECOMPUTE, UPDATE_BYTES, Setup, matrix_share, moment_bytes, newton_schulz_flops
from trainspec_cli.planner.time.data_parallel import ENCODING_BYTES, GRADIENT_BYTES
from trainspec_cli.planner.time.step import assemble_step, micro_batch
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.model import DecoderModel, departs, loss_chunk_tokens, loss_group_tokens
from trainspec_cli.recipe.keys.training import WireFormat
from trainspec_cli.recipe.results.plan import LocalPrediction, Plan, PlannedLink
from trainspec_cli.recipe.results.tools import PROBED_HEAD_SIZES, PROBED_HEADS, PROBED_TOKENS, Curve, MachineProbe

# The CPU

SIZES = frozenset(
    ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size", "tied_embeddings")
)
ANY = SIZES | {"name", "hf_type", "rope_theta", "rope_scaling", "norm_eps", "global_attention_every"}
"""Decoder fields that may have any value in a model whose arithmetic is that of a llama."""


def is_predictable(plan: Plan) -> bool:
    """Return whether a probe can predict the plan: a llama on the CPU, with all parameters trained, eager blocks, no
    recomputation, and only data parallelism. A llama differs from the plain decoder only in its sizes and position
    embeddings."""
    layout = plan.layout
    model = plan.spec.model
    whole = (layout.cp, layout.tp, layout.pp, layout.ep) == (1, 1, 1, 1)
    eager = not plan.spec.compile and plan.recompute == "none" and plan.offload == "none"
    trained = plan.device == "cpu" and plan.num_nodes == 1 and not plan.spec.lora.rank
    if not (trained and whole and eager and isinstance(model, DecoderModel)):
        return False
    return not any(departs(model, one.name) for one in fields(DecoderModel) if one.name not in ANY)


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Predict the step time of a predictable plan (`is_predictable`), and the peak resident bytes of one process. The
    peak occurs in a step's backward pass, or in the loss before it."""
    memory = {
        "worker": probe.bare_bytes,
        **tensor_bytes(plan),
        "fragmentation": fragmentation(probe) * sum(step_bytes(plan).values()),
    }
    return LocalPrediction(time_s=_step_parts_s(plan, probe), memory=memory, links=_planned_links(plan, probe))


def least_memory(plan: Plan) -> LocalPrediction:
    """Predict only the tensors of a predictable plan (`is_predictable`), without times, on a machine without a
    probe."""
    return LocalPrediction(time_s={}, memory=tensor_bytes(plan))


PASSING = ("gradients", "activations", "loss", "logits", "collectives", "fragmentation")
"""Causes of memory use that are absent between two steps."""
STATE = ("parameters", "optimizer", "error feedback")
MOVING_BYTES = 2.0 * 2**26
"""Size of one bucket of moved state and its messages (`engine/checkpoint/reshard.py`)."""


def moving_bytes(before: LocalPrediction, after: LocalPrediction) -> float:
    """Return the maximum memory that a process needs while its state moves from one layout to another. In the worst
    case, it holds the old and the new state, because a rank may receive all of its new state before it sends
    anything."""
    kept = sum(size for cause, size in before.memory.items() if cause not in PASSING)
    return kept + sum(after.memory.get(cause, 0.0) for cause in STATE) + MOVING_BYTES + sum(before.beside.values())


# GPUs


def is_known(plan: Plan, machine: Machine) -> bool:
    """Return whether the plan runs on this machine's GPUs and their chip is known (`chip_of`)."""
    return plan.device == "cuda" and chip_of(machine)[0] is not None


def predict_device(plan: Plan, machine: Machine) -> LocalPrediction:
    """Predict a plan on known GPUs (`is_known`)."""
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
    """Return the number of bytes that a plan may use on the smallest GPU."""
    return memory_limit_bytes(setup_of(plan, machine).fabric.chip)


def setup_of(plan: Plan, machine: Machine) -> Setup:
    """Return the plan's setup on the detected GPUs, regardless of the recipe's accelerator. Replica groups are treated
    as replicas of one layout."""
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
    """Return the duration of a step in seconds by part, as the engine measures it on a GPU. Exchanges count only while
    the compute stream waits for them, and a pipeline's bubble counts as waiting for messages."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    once = micro_batch(setup, groups, eff)
    time = assemble_step(setup, once, groups, eff)
    # The step model has no separate times for the passes, so the work is split in the same proportion as for the layers
    # and the head. The loss computes its gradients in the forward pass.
    forward = once.num_layers * once.layer.forward + once.head.forward + once.head.backward
    backward = once.num_layers * once.layer.backward
    work_s = time.matmul_s + time.attention_s + time.memory_bound_s
    forward_s = work_s * forward / (forward + backward)
    exposed_s = time.tp_comm_s + time.cp_comm_s + time.ep_comm_s + time.pp_comm_s + time.dp_comm_s + time.bubble_s
    parts = {"data_wait": time.data_s, "forward": forward_s, "optimizer": time.optimizer_s, "other": time.host_s}
    parts["exposed_comm"] = exposed_s
    return parts | {"backward": time.total_s - sum(parts.values())}


# Changes that would make a plan fit

Predict = Callable[[Plan], LocalPrediction]


def suggest(plan: Plan, predict: Predict, limit_bytes: float) -> str:
    """Return the first change that makes the plan fit without changing the result, or "".

    `limit_bytes`: memory that one process may use."""
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


# The CPU: step parts and process memory of an eager decoder, from a probe.
#
# A step takes the time of a nearly empty model (its blocks, hooks and small collectives), plus the time of each
# operation measured at its size, minus the cost of the call. The total is scaled by reference models that the probe has
# trained.


COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
ADAMW_TRAFFIC_BYTES = 28.0
"""Bytes per value that AdamW's kernel moves: it reads a gradient, and both reads and writes a weight and two
moments."""
CAST_BYTES = 6.0
"""Bytes per value that a cast from fp32 to bf16 moves."""


def _decoder(plan: Plan) -> DecoderModel:
    assert isinstance(plan.spec.model, DecoderModel), "only decoders are predictable, and the engine probes with them"
    return plan.spec.model


def block_matrices(model: DecoderModel) -> tuple[int, ...]:
    """Return the number of elements of each matrix in a block."""
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    hidden = model.hidden_size
    ffn = model.ffn_size
    return (hidden * query, hidden * key, hidden * key, query * hidden, hidden * ffn, hidden * ffn, ffn * hidden)


def unit_params(plan: Plan) -> tuple[int, int]:
    """Return the number of parameters in one block and outside the blocks, which are the two kinds of sharded units."""
    model = _decoder(plan)
    block = sum(block_matrices(model)) + 2 * model.hidden_size
    return block, plan.params - model.num_layers * block


def micro_tokens(plan: Plan) -> int:
    return plan.micro_batch_size * plan.spec.data.seq_len


def _step_parts_s(plan: Plan, probe: MachineProbe) -> dict[str, float]:
    """Return the duration of a step in seconds by part, with the same names as in the step events.

    The curves provide the differences between models; the reference models trained by the probe provide the absolute
    times. Cold caches and load from other programs slow both equally. Waiting for peers is proportional to their
    work."""
    parts = curve_parts_s(plan, probe)
    references = [(curve_parts_s(one.plan, probe), one.parts_s) for one in probe.references]
    held = {}
    for part, seconds in parts.items():
        # The measured time of the reference models divided by the time from the curves, interpolated linearly in the
        # logarithm.
        ratios = {own[part]: took[part] / own[part] for own, took in references if own[part] > 0 and took[part] > 0}
        sizes = tuple(sorted(ratios))
        ratio = Curve(sizes, tuple(ratios[size] for size in sizes)).at(min(seconds, sizes[-1])) if ratios else 1.0
        held[part] = seconds * ratio
    # In addition to the message time, processes wait for each other for a fraction of the passes' time.
    took = probe.large.parts_s
    beyond_s = took["exposed_comm"] - curve_parts_s(probe.large.plan, probe)["exposed_comm"]
    waiting_s = max(0.0, beyond_s) / (took["forward"] + took["backward"]) * (held["forward"] + held["backward"])
    return held | {"exposed_comm": parts["exposed_comm"] + waiting_s}


def curve_parts_s(plan: Plan, probe: MachineProbe) -> dict[str, float]:
    """Return the duration of a step in seconds by part, based only on the curves."""
    layers = _decoder(plan).num_layers
    parts = {part: own + layers * probe.empty_block_s[part] for part, own in probe.empty_step_s.items()}
    passes_s = zip(_block_passes_s(plan, probe), _outside_passes_s(plan, probe), strict=True)
    for part, (block_s, outside_s) in zip(("forward", "backward"), passes_s, strict=True):
        parts[part] = plan.grad_accum_steps * (parts[part] + layers * block_s + outside_s)
    # FSDP2 exchanges one unit at a time: each block, and everything outside the blocks.
    block, outside = unit_params(plan)
    blocks_s = layers * _unit_collectives_s(plan, block, probe, is_block=True)
    parts["exposed_comm"] += blocks_s + _unit_collectives_s(plan, outside, probe, is_block=False)
    parts["optimizer"] += _update_s(plan, probe)
    return parts


def _update_s(plan: Plan, probe: MachineProbe) -> float:
    """Return the duration of an update in seconds, excluding call overhead. It is measured for AdamW; for other
    optimizers it is scaled by memory traffic relative to AdamW's, with Newton-Schulz as matrix multiplications."""
    optimizer = plan.spec.optim.kept_state
    model = _decoder(plan)
    usual_s = probe.optimizer.beyond_call(plan.params / plan.layout.dp_shard)
    if optimizer == "adamw8bit":
        return usual_s * UPDATE_BYTES[optimizer] / ADAMW_TRAFFIC_BYTES
    if optimizer == "muon":
        elements = sum(newton_schulz_flops(model)) / plan.layout.dp_shard / (2 * PROBED_TOKENS)
        products_s = _products_s(probe.matmul.forward, int(elements), PROBED_TOKENS)
        return usual_s * (1 + matrix_share(model) * UPDATE_BYTES[optimizer] / ADAMW_TRAFFIC_BYTES) + products_s
    return usual_s


def _block_passes_s(plan: Plan, probe: MachineProbe) -> tuple[float, float]:
    """Return the times in seconds (forward, backward) of one block on one micro-batch, excluding call overhead."""
    model = _decoder(plan)
    tokens = micro_tokens(plan)
    hidden = model.hidden_size
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    params, _ = unit_params(plan)
    forward = backward = 0.0
    for elements in block_matrices(model):
        forward += _products_s(probe.matmul.forward, elements, tokens)
        backward += _products_s(probe.matmul.input_gradient, elements, tokens)
        backward += _products_s(probe.matmul.weight_gradient, elements, tokens)
    for operation, elements in (
        (probe.norm, tokens * hidden),
        (probe.norm, tokens * hidden),
        (probe.rope, tokens * query),
        (probe.rope, tokens * key),
        (probe.swiglu, tokens * model.ffn_size),
    ):
        forward += operation.forward.beyond_call(elements)
        backward += operation.backward.beyond_call(elements)
    forward += _attention_s(probe.attention_narrow.forward, probe.attention.forward, plan)
    backward += _attention_s(probe.attention_narrow.backward, probe.attention.backward, plan)
    # Additions. Forward: two residuals. Backward: their gradients, and the input gradients of q, k, v and of gate, up.
    forward += 2 * probe.add.beyond_call(tokens * hidden) + probe.cast.beyond_call(params)
    backward += 5 * probe.add.beyond_call(tokens * hidden) + 2 * probe.cast.beyond_call(params)
    return forward, backward


def _outside_passes_s(plan: Plan, probe: MachineProbe) -> tuple[float, float]:
    """Return the times in seconds (forward, backward) of the embedding, last norm, head and loss. The loss computes its
    gradients in the forward pass; the backward pass scales them."""
    model = _decoder(plan)
    tokens = micro_tokens(plan)
    hidden = model.hidden_size
    head = model.vocab_size * hidden
    _, params = unit_params(plan)
    products = (probe.matmul.forward, probe.matmul.input_gradient, probe.matmul.weight_gradient)
    forward = sum(_products_s(curve, head, tokens) for curve in products)
    chunk = min(tokens, loss_chunk_tokens(model.vocab_size))
    forward += tokens / chunk * probe.loss.beyond_call(chunk * model.vocab_size)
    width = COMPUTE_BYTES[plan.compute]
    groups = math.ceil(tokens / loss_group_tokens(hidden, width, loss_chunk_tokens(model.vocab_size)))
    added = 2 * groups * (width < 4)  # in fp32, the matrix multiplication itself adds
    forward += added * probe.cast.beyond_call(head) + probe.cast.beyond_call(params)
    forward += probe.norm.forward.beyond_call(tokens * hidden) + probe.add.beyond_call(tokens * hidden)
    backward = probe.norm.backward.beyond_call(tokens * hidden) + 2 * probe.add.beyond_call(tokens * hidden)
    # The embedding's gradient is scaled and cast, zeroed and filled, then copied for the collective.
    backward += 2 * probe.cast.beyond_call(head) + 2 * probe.add.beyond_call(head) + 2 * probe.cast.beyond_call(params)
    return forward, backward


def _attention_s(narrow: Curve, wide: Curve, plan: Plan) -> float:
    """Interpolate linearly in the head size, between the two probed sizes."""
    seq_len = plan.spec.data.seq_len
    small, large = PROBED_HEAD_SIZES
    model = _decoder(plan)
    own = narrow.at(seq_len)
    probed = max(0.0, own + (wide.at(seq_len) - own) * (model.head_dim - small) / (large - small))
    return probed * micro_tokens(plan) / PROBED_TOKENS * model.num_heads / PROBED_HEADS


def _products_s(curve: Curve, elements: int, tokens: int) -> float:
    return max(0.0, curve.at(elements) * tokens / PROBED_TOKENS - curve.seconds[0])


def _planned_links(plan: Plan, probe: MachineProbe) -> tuple[PlannedLink, ...]:
    """Return the links of the data-parallel axes with several ranks. In a ring all-gather, each rank sends everything
    except one part."""
    params = max(unit_params(plan))
    layout = plan.layout
    links = []
    if (ranks := layout.dp_shard) > 1:
        gathered_bytes = params * COMPUTE_BYTES[plan.compute]
        rate = gathered_bytes * (ranks - 1) / ranks / probe.all_gather.at(gathered_bytes)
        links.append(PlannedLink("dp_shard", rate))
    if (ranks := layout.dp_replicate) > 1:
        summed_bytes = params / layout.dp_shard * COMPUTE_BYTES[plan.spec.precision.reduce]
        rate = 2 * (summed_bytes * (ranks - 1) / ranks) / probe.all_reduce.at(summed_bytes)
        links.append(PlannedLink("dp_replicate", rate))
    return tuple(links)


def _unit_collectives_s(plan: Plan, params: int, probe: MachineProbe, *, is_block: bool) -> float:
    """Return the duration in seconds of a unit's collectives: parameters are gathered in the compute format, and
    gradients are reduced in the format `precision.reduce`."""
    layout = plan.layout
    seconds = 0.0
    reduced_bytes = params * COMPUTE_BYTES[plan.spec.precision.reduce]
    if layout.dp_shard > 1:
        # A block's parameters are freed after its forward pass and gathered again in the backward pass.
        gatherings = 1 if layout.keeps_parameters else plan.grad_accum_steps * (2 if is_block else 1)
        seconds += gatherings * probe.all_gather.at(params * COMPUTE_BYTES[plan.compute])
        exchanges = plan.grad_accum_steps if layout.exchanges_every_backward else 1
        seconds += exchanges * _reduce_s(plan.comm.gradients, params, reduced_bytes, probe)
    if layout.dp_replicate > 1 and plan.comm.gradients == "full":
        seconds += probe.all_reduce.beyond_call(reduced_bytes / layout.dp_shard)
    elif layout.dp_replicate > 1:
        seconds += 2 * _reduce_s(plan.comm.gradients, params / layout.dp_shard, 0.0, probe)
    return seconds


def _reduce_s(chosen: WireFormat, values: float, full_bytes: float, probe: MachineProbe) -> float:
    """Return the duration of a reduce-scatter in seconds. An all-to-all moves the same amount as an all-gather;
    encoding moves memory like casts."""
    if chosen == "full":
        return probe.reduce_scatter.at(full_bytes)
    encoding_s = ENCODING_BYTES[chosen] / CAST_BYTES * probe.cast.beyond_call(values)
    return probe.all_gather.at(values * GRADIENT_BYTES[chosen]) + encoding_s


def tensor_bytes(plan: Plan) -> dict[str, float]:
    """Return the memory in bytes, by cause, that does not depend on the machine and is therefore known without a
    probe."""
    found = {"parameters": parameter_bytes(plan), **step_bytes(plan), "checkpoint copy": copy_bytes(plan)}
    if kept := feedback_bytes(_decoder(plan), plan.as_one_group.layout, plan.comm):
        found["error feedback"] = kept
    if outer := outer_bytes_of(plan.spec) * plan.params / plan.layout.dp_shard:
        found["outer optimizer"] = outer
    return found


def copy_bytes(plan: Plan) -> float:
    """Return the size in bytes of the state's copy while a checkpoint is written. Ranks divide among themselves the
    part that all of them have. In host memory, there are two copies."""
    checkpoint = plan.spec.checkpoint
    moments = moment_bytes(plan.spec.model, plan.spec.optim.kept_state, plan.spec.lora)
    held = (4 + moments) * plan.params / plan.world_size
    if checkpoint.memory_interval_steps is not None:
        return 2 * held
    return held if checkpoint.interval_steps is not None and checkpoint.mode == "async" else 0.0


def fragmentation(probe: MachineProbe) -> float:
    """Return the heap fragmentation as a fraction of a step's allocations, measured on the larger reference model.

    The temporaries of the first step leave holes that the optimizer's moments fill, so both count."""
    plan = probe.large.plan
    grown_bytes = probe.large.grown_bytes - parameter_bytes(plan)
    return max(0.0, grown_bytes / sum(step_bytes(plan).values()) - 1.0)


def parameter_bytes(plan: Plan) -> float:
    """Return the sizes in bytes of the rank's part of the parameters in fp32, and of the gathered parameters in the
    compute format."""
    block, outside = unit_params(plan)
    freed = plan.layout.shards_parameters
    gathered = (2 * block if freed else _decoder(plan).num_layers * block) + outside
    return 4 * plan.params / plan.layout.dp_shard + COMPUTE_BYTES[plan.compute] * gathered


def step_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes that the first step allocates. The optimizer's moments persist; everything else is freed and
    allocated again."""
    model = _decoder(plan)
    moments = moment_bytes(model, plan.spec.optim.kept_state, plan.spec.lora)
    formats = COMPUTE_BYTES[plan.compute] + COMPUTE_BYTES[plan.spec.precision.reduce]
    own = plan.params / plan.layout.dp_shard
    return {
        "optimizer": moments * own,
        "gradients": 4 * own,
        "activations": micro_tokens(plan) * model.num_layers * activation_bytes_per_token(model, plan.compute),
        "loss": loss_bytes(run_of(plan), model) + 4.0 * model.vocab_size * model.hidden_size,
        "collectives": formats * max(unit_params(plan)),
    }


def activation_bytes_per_token(model: DecoderModel, compute: str) -> int:
    """Return the bytes per token that a block saves for its backward pass: the inputs of norms (twice, in fp32) and of
    matrices; the attention's q, k, v, output and log-sum-exps; and the feed-forward's gate, its activation, up and the
    product of the last two."""
    unit = COMPUTE_BYTES[compute]
    norms = 2 * (8 + unit) * model.hidden_size + 8
    attention = unit * model.head_dim * 2 * (model.num_heads + model.num_kv_heads) + 4 * model.num_heads
    return norms + attention + 4 * unit * model.ffn_size
