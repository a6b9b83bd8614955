"""Expert layers: router, dispatch, expert matmuls, combination."""

from __future__ import annotations

from trainspec_cli.planner.workload.work import Gemm, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ExpertSpec


def shared_width(experts: ExpertSpec) -> int:
    """Feed-forward width of all shared experts together."""
    return experts.shared_experts * (experts.shared_expert_ffn_size or experts.expert_ffn_size)


def expert_layer_params(experts: ExpertSpec, hidden: int, gated: bool) -> int:
    """Count the parameters of all experts, the shared ones and the router."""
    return experts.num_experts * routed_expert_params(experts, hidden, gated) + common_params(experts, hidden, gated)


def active_expert_params(experts: ExpertSpec, hidden: int, gated: bool) -> int:
    """Count the parameters that one token meets."""
    return experts.top_k * routed_expert_params(experts, hidden, gated) + common_params(experts, hidden, gated)


def routed_expert_params(experts: ExpertSpec, hidden: int, gated: bool) -> int:
    """Count the parameters of one expert: its matrices, and their biases where it has any."""
    halves = 2 if gated else 1
    width = experts.expert_ffn_size
    return (halves + 1) * hidden * width + (halves * width + hidden if experts.bias else 0)


def common_params(experts: ExpertSpec, hidden: int, gated: bool) -> int:
    """Count the parameters that every token meets: the shared experts, their gate, and the router."""
    shared = (3 if gated else 2) * hidden * shared_width(experts) + (hidden if experts.shared_gate else 0)
    return shared + experts.num_experts * (hidden + (1 if experts.bias else 0))


def expert_work(experts: ExpertSpec, hidden: int, gated: bool, tokens: float, layout: Layout) -> Work:
    """Norm, router, experts and residual of one layer, its copies of tokens spread evenly over the experts.

    Experts are split by `etp`; the tokens of a tensor-parallel group are spread over it first (sequence parallel).
    """
    tp = layout.tp
    etp = layout.etp
    ep = layout.ep
    split = tp if layout.sequence_parallel else 1
    gates = 2 if gated else 1
    copies = tokens * experts.top_k * etp / tp
    local = experts.num_experts / ep
    width = experts.expert_ffn_size / etp
    shared = shared_width(experts) / tp
    rows = copies / local
    gemms = [Gemm(rows, gates * width, hidden, local), Gemm(rows, hidden, width, local)]
    if shared:
        gemms += [Gemm(tokens, gates * shared, hidden), Gemm(tokens, hidden, shared)]
    matrices = 3 if gated else 2
    routed = routed_expert_params(experts, hidden, gated) * experts.num_experts / (ep * etp)
    # Each copy is permuted before and after the experts, and weighed and summed on its return.
    permute = 2.0 * copies * hidden * 6
    return Work(
        gemms=(*gemms, Gemm(tokens / split, experts.num_experts, hidden, wide=False)),
        pass_bytes=2.0 * (tokens * 7 * hidden / split + copies * (gates + 1) * width + tokens * (gates + 1) * shared)
        + permute,
        tensor_bytes=2.0 * copies * hidden,
        kernels=100,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1 if (shared and tp > 1) or etp > 1 else 0,
        ep_bytes=2.0 * copies * hidden,
        expert_copies=experts.top_k,
        experts=local,
        params=matrices * hidden * shared + hidden * (experts.num_experts + 1),
        expert_params=routed,
        saved_bytes=2.0
        * (2 * tokens * hidden / split + copies * (hidden + (gates + 1) * width) + tokens * (gates + 1) * shared),
        saved_gemm_bytes=2.0 * (copies * (hidden + width) + tokens * (hidden / split + shared)),
        input_bytes=2.0 * tokens * hidden / split,
    )
