"""What FSDP2 shards as one: a block's parameters, or those outside of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel

Matrix = tuple[int, int]
"""(rows, elements of a row), after tensor parallelism."""


@dataclass(frozen=True)
class Unit:
    matrices: tuple[Matrix, ...]
    shards: int
    """Ranks over which rows are spread."""

    @property
    def own(self) -> float:
        """Elements of the first rank, whose part is the largest."""
        return float(sum(-(-rows // self.shards) * row for rows, row in self.matrices))

    @property
    def gathered(self) -> float:
        """Elements of all ranks' parts, the last ones padded."""
        return self.own * self.shards

    @property
    def full(self) -> float:
        return float(sum(rows * row for rows, row in self.matrices))


def block_unit(model: DecoderModel, layout: Layout) -> Unit:
    return Unit(tuple(block_matrices(model, layout.tp)), layout.dp_shard * layout.cp)


def block_matrices(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    hidden, head = model.hidden_size, model.head_dim
    query, key = model.num_heads * head // tp, model.num_kv_heads * head // tp
    yield from ((hidden, 1), (query, hidden), (key, hidden), (key, hidden), (hidden, query), (hidden, 1))
    if model.qk_norm:
        yield from ((head, 1), (head, 1))
    width = model.ffn_size // tp
    yield from ((width, hidden),) * (2 if model.gated_mlp else 1)
    yield hidden, width


def outside_unit(model: DecoderModel, layout: Layout, first: bool, last: bool) -> Unit:
    """Embedding, norm and head, as far as a stage has them."""
    table = (model.vocab_size // layout.tp, model.hidden_size)
    matrices = [table] if first or (last and model.tied_embeddings) else []
    matrices += [(model.hidden_size, 1)] if last else []
    matrices += [table] if last and not model.tied_embeddings else []
    return Unit(tuple(matrices), layout.dp_shard * layout.cp)
