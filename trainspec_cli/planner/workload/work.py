"""The work of one layer (or head) on one rank for one micro-batch, forward: what the estimators time and weigh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gemm:
    """`count` matrix products of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0
    wide: bool = True
    """Multiplies in the linear layers' format (fp8, ...); the router, the head and frozen parts stay in bf16."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Work:
    """Sizes are of one rank. Bytes of activations are of the compute format (2 bytes an element)."""

    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    """Forward, over the causal half (or the window) alone."""
    attention_head_dim: float = 128.0
    score_bytes: float = 0.0
    """Bytes of the score matrix, were it materialised in 2 bytes."""
    pass_bytes: float = 0.0
    """Memory traffic of the element-wise kernels, forward."""
    loss_bytes: float = 0.0
    """The same of the loss over the vocabulary."""
    eager_bytes: float = 0.0
    """Besides, where operations are kernels of their own: norms, rotations, gates that a fused kernel does in one."""
    tensor_bytes: float = 1e9
    """Bytes of one activation that passes from kernel to kernel."""
    kernels: int = 0
    """Launched by an eager framework, forward."""
    serial_kernels: int = 0
    """Small ones that wait for one another, whatever the batch: their time is their latency."""
    tp_bytes: float = 0.0
    """Bytes of one tensor-parallel exchange (a whole activation); the forward has `tp_exchanges`."""
    tp_exchanges: int = 0
    cp_bytes: float = 0.0
    """Keys and values that context parallelism passes on, whole sequence."""
    ep_bytes: float = 0.0
    """Bytes that a rank sends to the experts, one way."""
    expert_copies: int = 1
    """Experts that each token is sent to."""
    experts: float = 0.0
    """Held by this rank."""
    params: float = 0.0
    """Shared by the data-parallel ranks, on this rank."""
    expert_params: float = 0.0
    saved_bytes: float = 0.0
    """Activations kept for the backward."""
    saved_gemm_bytes: float = 0.0
    """The part of them that are inputs of matmuls alone, kept in 8 bits where those multiply in 8 bits."""
    saved_eager_bytes: float = 0.0
    """Kept besides by a framework without fused norms and activations: fp32 copies, the gate's output."""
    input_bytes: float = 0.0
    """The layer's input: all that full recomputation keeps."""
    leaf: bool = False
    """Its input is the data, and needs no gradient."""
    frozen: bool = False
    """Has no backward: neither it nor anything before it is trained."""

    convolves: bool = False
    """Its products are convolutions, whose kernels have rates of their own."""

    @property
    def flops(self) -> float:
        """Forward."""
        return sum(gemm.flops for gemm in self.gemms) + self.attention_flops

    @property
    def all_params(self) -> float:
        return self.params + self.expert_params


Layers = tuple[tuple[Work, ...], ...]
"""The parts of each layer of a model, in its order; layers of one kind share theirs."""
Kinds = tuple[tuple[int, tuple[Work, ...]], ...]
"""(how many, their parts) for each kind of layer of a model, in the order in which they first come."""
