"""The sizes of a layer (`Shape`), and what layers of all kinds are made of: norms, regions, feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trainspec_cli.plan.memory.engine.tape import Tape, Value
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.lora import LoraSpec
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel, TextModel
from trainspec_cli.recipe.keys.model_parts import ExpertSpec, LatentAttentionSpec, Layer


@dataclass(frozen=True)
class Shape:
    """Elements are of one rank: tokens of its part of the sequence (context parallelism), heads and widths of its part
    of the matrices (tensor parallelism)."""

    model: TextModel
    layer: Layer
    layout: Layout
    samples: int
    seq_len: int
    """Length of this rank's part of the sequence."""
    width: float
    """Bytes of an element in the compute format."""
    fp8: bool = False
    """Linear layers multiply in it."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    compiled: bool = False
    """Element-wise operations are fused."""

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def outside_tokens(self) -> float:
        """Return the tokens between the regions of tensor parallelism."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def hidden(self) -> int:
        return self.model.hidden_size

    @property
    def decoder(self) -> DecoderModel:
        return self.model.as_decoder

    @property
    def hybrid(self) -> HybridModel:
        assert isinstance(self.model, HybridModel)
        return self.model

    @property
    def experts(self) -> ExpertSpec:
        assert self.model.experts is not None
        return self.model.experts

    @property
    def latent(self) -> LatentAttentionSpec:
        assert self.decoder.mla is not None
        return self.decoder.mla


Part = Callable[[Tape, Value, Shape], Value]


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return tape.norm(x, tape.leaf(shape.hidden), shape.outside_tokens)


def linear(tape: Tape, x: Value, shape: Shape, name: str, outputs: int, inputs: int) -> Value:
    """A rank's part of a matrix, with its adapter beside it, if it has one."""
    tokens, rank = x.elements / inputs, shape.lora.rank
    if shape.lora.is_quantised:
        y = tape.dequantised_linear(x, outputs * inputs, tokens * outputs)
    else:
        y = tape.linear(x, tape.leaf(outputs * inputs), tokens * outputs)
    if not rank or name not in shape.lora.targets:
        return y
    narrow = tape.linear(x, tape.leaf(rank * inputs, frozen=False), tokens * rank)
    return tape.add(y, tape.copy(tape.linear(narrow, tape.leaf(outputs * rank, frozen=False), tokens * outputs)))


def region(tape: Tape, x: Value, shape: Shape, part: Part) -> Value:
    """Record a part between two exchanges over tp. With several samples that along the sequence needs copies."""
    tp, whole = shape.layout.tp, shape.tokens * shape.hidden
    if tp == 1:
        return part(tape, x, shape)
    copied = whole * shape.width if shape.samples > 1 else 0.0
    if shape.layout.sequence_parallel:
        entered = tape.copy(x, whole, scratch=(copied * (1 + 1 / tp), copied))
        return tape.copy(part(tape, entered, shape), whole / tp, scratch=(copied, copied * (1 + 1 / tp)))
    entered = tape.copy_in_backward(x)
    return tape.copy_in_forward(part(tape, entered, shape))


def feed_forward(tape: Tape, x: Value, shape: Shape) -> Value:
    return feed_forward_of(tape, x, shape, shape.decoder.ffn_size)


def feed_forward_of(tape: Tape, x: Value, shape: Shape, width: int) -> Value:
    inner = width // shape.layout.tp
    if not shape.decoder.gated_mlp:
        wide = activate(tape, linear(tape, x, shape, "up", inner, shape.hidden), shape)
    else:
        wide = tape.mul(
            activate(tape, linear(tape, x, shape, "gate", inner, shape.hidden), shape),
            linear(tape, x, shape, "up", inner, shape.hidden),
        )
    return linear(tape, wide, shape, "down", shape.hidden, inner)


def activate(tape: Tape, x: Value, shape: Shape) -> Value:
    """The square of relu takes two steps, and a power's backward two values on the way."""
    if shape.decoder.activation != "relu2":
        return tape.unary(x)
    relu = tape.apply((x,), x.elements, saves_output=True)
    return tape.apply((relu,), x.elements, saved=(relu,), scratch=(0.0, 2 * x.elements * x.width))
