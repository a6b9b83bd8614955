"""A process's peak memory on this machine's CPU, by cause: an eager decoder, from a probe."""

from __future__ import annotations

from trainspec_cli.planner.memory.engine.run import outer_bytes_of
from trainspec_cli.planner.memory.frameworks import feedback_bytes
from trainspec_cli.planner.setup import moment_bytes
from trainspec_cli.planner.time.local import COMPUTE_BYTES, micro_tokens, unit_params
from trainspec_cli.recipe.keys.model import DecoderModel, loss_chunk_tokens
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import MachineProbe

LOSS_BYTES_A_LOGIT = 12
"""fp32 logits and their softmax (2 x 4), and logits and their gradient in bf16 (2 x 2); in fp32 a third one (4)."""


def peak_memory(plan: Plan, model: DecoderModel, probe: MachineProbe) -> dict[str, float]:
    """Resident bytes of one process at its peak, by cause; that is in a step's backward, or in the loss before it."""
    return {
        "worker": probe.bare_bytes,
        **tensor_bytes(plan, model),
        "fragmentation": fragmentation(probe) * sum(step_bytes(plan, model).values()),
    }


def tensor_bytes(plan: Plan, model: DecoderModel) -> dict[str, float]:
    """The part of `peak_memory` that is the same on every machine, and so known before a probe."""
    return {
        "parameters": parameter_bytes(plan, model),
        **step_bytes(plan, model),
        "checkpoint copy": copy_bytes(plan),
        **({"error feedback": kept} if (kept := feedback_bytes(model, plan.as_one_group.layout, plan.comm)) else {}),
        **({"outer optimizer": outer} if (outer := outer_bytes(plan)) else {}),
    }


def outer_bytes(plan: Plan) -> float:
    """Bytes that an outer optimizer keeps for the parameters of one process."""
    return outer_bytes_of(plan.spec) * plan.params / plan.layout.dp_shard


def copy_bytes(plan: Plan) -> float:
    """The state copied aside to be written: the ranks share out what is theirs together. In host memory it is held
    twice."""
    checkpoint = plan.spec.checkpoint
    moments = moment_bytes(plan.spec.model, plan.spec.optim.kept_state, plan.spec.lora)
    held = (4 + moments) * plan.params / plan.world_size
    if checkpoint.memory_interval_steps is not None:
        return 2 * held
    return held if checkpoint.interval_steps is not None and checkpoint.mode == "async" else 0.0


def fragmentation(probe: MachineProbe) -> float:
    """Return the share that the heap's holes add to what steps allocate, as the larger reference model has shown.

    The first step's temporaries leave holes that the optimizer's moments are laid into, so both count.
    """
    plan = probe.large.plan
    model = probe.large.plan.spec.model
    assert isinstance(model, DecoderModel), "the engine probes with decoders"
    grown_bytes = probe.large.grown_bytes - parameter_bytes(plan, model)
    return max(0.0, grown_bytes / sum(step_bytes(plan, model).values()) - 1.0)


def parameter_bytes(plan: Plan, model: DecoderModel) -> float:
    """Own ones in fp32, and in the compute format those that are gathered."""
    block, outside = unit_params(plan, model)
    freed = plan.layout.shards_parameters
    gathered = (2 * block if freed else model.num_layers * block) + outside
    return 4 * plan.params / plan.layout.dp_shard + COMPUTE_BYTES[plan.compute] * gathered


def step_bytes(plan: Plan, model: DecoderModel) -> dict[str, float]:
    """Bytes that the first step allocates: the optimizer's moments last, all else is freed and allocated again."""
    moments = moment_bytes(model, plan.spec.optim.kept_state, plan.spec.lora)
    formats = COMPUTE_BYTES[plan.compute] + COMPUTE_BYTES[plan.spec.precision.reduce]
    own = plan.params / plan.layout.dp_shard
    return {
        "optimizer": moments * own,
        "gradients": 4 * own,
        "activations": micro_tokens(plan) * model.num_layers * activation_bytes_per_token(model, plan.compute),
        "loss": loss_bytes(plan, model),
        "collectives": formats * max(unit_params(plan, model)),
    }


def activation_bytes_per_token(model: DecoderModel, compute: str) -> int:
    """Bytes that a block saves for its backward, a token: inputs of norms (twice, in fp32) and of matrices, the
    attention's q, k, v, output and log-sums, and the feed-forward's gate, its activation, up and their product."""
    unit = COMPUTE_BYTES[compute]
    norms = 2 * (8 + unit) * model.hidden_size + 8
    attention = unit * model.head_dim * 2 * (model.num_heads + model.num_kv_heads) + 4 * model.num_heads
    return norms + attention + 4 * unit * model.ffn_size


def loss_bytes(plan: Plan, model: DecoderModel) -> float:
    """A chunk of logits with all that is made of them, and the head's gradient in fp32."""
    chunk = min(micro_tokens(plan), loss_chunk_tokens(model.vocab_size))
    return chunk * model.vocab_size * LOSS_BYTES_A_LOGIT + 4.0 * model.vocab_size * model.hidden_size
