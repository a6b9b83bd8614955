"""A model of transformers, with what the trace of its blocks found (`engine/tools/count_module.py`)."""

from __future__ import annotations

from trainspec_cli.planner.workload import Gemm, Layers, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import TracedPart, TransformersModel


def count_params(model: TransformersModel, *, active: bool = False) -> int:
    return sum(part.count * part.params for part in model.parts)


def flops_per_token(model: TransformersModel, seq_len: int) -> float:
    return 3.0 * sum(part.count * part.flops_per_token for part in model.parts)


def mixing_flops_per_token(model: TransformersModel, _seq_len: int) -> float:
    return 3.0 * sum(part.count * _mixing_flops(part) for part in model.blocks)


def _mixing_flops(part: TracedPart) -> float:
    return max(0.0, part.flops_per_token - sum(2.0 * rows * columns for _, rows, columns in part.linear_sizes))


def layer_works(model: TransformersModel, tokens: float, seq_len: int, layout: Layout) -> Layers:
    samples = tokens / seq_len
    scale = seq_len / model.traced_seq_len * 2.0 / model.traced_width

    def work(part: TracedPart) -> tuple[Work]:
        kept = part.kept_bytes("none", samples) * scale
        input_bytes = part.kept_bytes("full", samples) * scale
        gemms = tuple(Gemm(tokens, rows, columns) for _, rows, columns in part.linear_sizes)
        return (
            Work(
                gemms=gemms,
                attention_flops=tokens * _mixing_flops(part),
                pass_bytes=2.0 * kept,
                kernels=16 + len(gemms),
                params=part.params,
                saved_bytes=kept,
                saved_gemm_bytes=min(kept, 2.0 * tokens * sum(gemm.k for gemm in gemms)),
                input_bytes=input_bytes,
            ),
        )

    return tuple(works for part in model.blocks for works in [work(part)] for _ in range(part.count))
