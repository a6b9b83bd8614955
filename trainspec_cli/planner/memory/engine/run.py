"""A step of the engine as its memory follows from it: whether it can be counted, and the count of a rank's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from trainspec_cli.core.wings import Point
from trainspec_cli.planner.memory.engine.tape import Tape, Value
from trainspec_cli.planner.memory.engine.units import Matrix, Unit
from trainspec_cli.planner.pipeline import cut_layers
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    CONV_TAPS,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    Layer,
    ModelSpec,
    TextModel,
    has_layer_list,
)
from trainspec_cli.recipe.keys.run import Recompute, RunSpec
from trainspec_cli.recipe.keys.training import BLOCK, QUANTISED_ROW, QUANTISED_SIZE, STACKED_VALUES, KeptState, LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import parts_for

KEPT_BYTES: Point[float] = Point("kept_bytes")
"""Bytes that a wing keeps on the device for each trained parameter, sharded as the optimizer's state is."""
WIDTHS = {"bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}


@dataclass(frozen=True)
class EngineRun:
    model: ModelSpec
    layout: Layout
    seq_len: int
    samples: int
    """Samples of a micro-batch."""
    micro_batches: int
    compute: str
    reduce: str
    recompute: Recompute
    optimizer: KeptState
    matmul: str = "compute"
    lora: LoraSpec = field(default_factory=LoraSpec)
    compiled: bool = False
    """Blocks are compiled (torch.compile)."""
    outer_bytes: float = 0.0
    """Bytes that an outer optimizer keeps for each trained parameter (`KEPT_BYTES`)."""


def run_of(plan: Plan) -> EngineRun:
    model, spec = plan.spec.model, plan.spec
    return EngineRun(
        model,
        plan.layout,
        spec.data.seq_len,
        plan.micro_batch_size,
        plan.grad_accum_steps,
        plan.compute,
        spec.precision.reduce,
        plan.recompute,
        spec.optim.kept_state,
        spec.precision.matmul,
        spec.lora,
        spec.compile and fuses_countably(model, spec.lora, spec.precision.matmul, plan.compute),
        outer_bytes_of(spec),
    )


def outer_bytes_of(spec: RunSpec) -> float:
    """Return the bytes that the wings which a recipe uses keep for each trained parameter."""
    return sum(parts_for(KEPT_BYTES, spec), 0.0)


def is_counted(model: ModelSpec, offload: str) -> bool:
    """The engine builds the model, its family says how to count it, and nothing is offloaded."""
    return bool(model.record.memory) and model.is_built and offload == "none"


def fuses_countably(model: ModelSpec, lora: LoraSpec, matmul: str, compute: str) -> bool:
    """Return whether what a compiler fuses in the model's blocks is counted: those of whole attention and feed-forwards
    in one format, all trained. Other blocks' compiled graphs were not held against the count."""
    if not has_layer_list(model) or lora.rank or matmul not in ("compute", compute):
        return False
    layers = set(model.layer_list)
    plain = all(set(layer.mixers) <= {"attention", "feed_forward"} for layer in layers)
    return plain and all(layer.window is None for layer in layers) and not model.as_decoder.attention_sinks


def engine_peak(run: EngineRun, pipeline_rank: int) -> dict[str, float]:
    """Return the bytes by cause (`CAUSES`) at the fullest moment of one pipeline rank, where `is_counted`."""
    family = cast("FamilyMemory", import_module(run.model.record.memory))
    return family.replay(run, pipeline_rank)


class FamilyMemory(Protocol):
    """The functions of the module that a family's record names (`FamilyRecord.memory`)."""

    def replay(self, run: EngineRun, pipeline_rank: int) -> dict[str, float]:
        """Bytes by cause (`CAUSES`) at the fullest moment of a step on one rank of the pipeline."""


def rank_peaks(run: EngineRun) -> Iterator[dict[str, float]]:
    """Yield the peaks of all pipeline ranks.

    A rank that has no more layers of any kind than one before it holds no more than that one, which keeps them for more
    micro-batches, and is not counted by itself, unless it has the head.
    """
    counted: list[tuple[Counter[Layer], dict[str, float]]] = []
    for rank, layers in enumerate(_layers_of_ranks(run)):
        fuller = [peak for others, peak in counted if layers <= others]
        if fuller and rank < run.layout.pp - 1:
            yield fuller[0]
        else:
            counted.append((layers, engine_peak(run, rank)))
            yield counted[-1][1]


def _layers_of_ranks(run: EngineRun) -> list[Counter[Layer]]:
    """Layers of each kind on each rank of the pipeline."""
    if run.layout.pp == 1:
        return [Counter()]
    if not has_layer_list(run.model):  # no rank is known to hold as much as another one
        return [Counter({Layer((), rank): 1}) for rank in range(run.layout.pp)]
    layers = run.model.layer_list
    stages = cut_layers(len(layers), run.layout)
    return [
        Counter(layers[layer] for stage in run.layout.stages_of_rank(rank) for layer in stages[stage])
        for rank in range(run.layout.pp)
    ]


def tensors_by_cause(plan: Plan) -> dict[str, float] | None:
    """Bytes of the fullest stage's tensors, blocks eager; None where the engine's memory is not counted."""
    if not is_counted(plan.spec.model, plan.offload):
        return None
    return max(rank_peaks(run_of(plan)), key=lambda peak: sum(peak.values()))


CAUSES = ("parameters", "optimizer", "gradients", "gathered", "activations", "logits", "collectives", "temporaries")
"""Gradients: sharded ones, which the optimizer reads, and whole ones until they are exchanged. Collectives: the buffers
of data parallelism's exchanges, and pipelines' messages. Within a block's backward its own gradients count as
activations until it ends."""


class Account:
    def __init__(self) -> None:
        self.live = dict.fromkeys(CAUSES, 0.0)
        self.at_peak = dict(self.live)
        self._total = self._peak = 0.0

    def add(self, cause: str, size: float) -> None:
        self.live[cause] += size
        self._total += size
        if self._total > self._peak:
            self.touch(0.0)

    def touch(self, size: float, cause: str = "temporaries") -> None:
        """`size` more bytes are live for a moment."""
        if self._total + size > self._peak:
            self._peak = self._total + size
            self.at_peak = {**self.live, cause: self.live[cause] + size}


# The state of the optimizers of the engine, tensor by tensor, and what an update allocates beside it.


MOMENT = 4.0
"""Bytes of a moment that is not quantised, and of a block's scale."""
CHUNK_VALUES = 2**24
"""Values that adamw8bit updates at a time (`engine/optim/adamw8bit.py`)."""
CHUNK_BYTES = 22.0
"""Bytes of each of them: gradient and moments in fp32, and, while one is quantised, its blocks and their codes."""
MATRICES_AT_ONCE = 9
"""Copies of the largest matrix, or stack of small ones, that muon has at a time in the format that it computes in:
Newton-Schulz's own five, the parts that are exchanged and those that arrive."""


def state_bytes(optimizer: KeptState, unit: Unit, *, in_block: bool, outer_bytes: float = 0.0) -> float:
    """Return the bytes of the optimizer's state of a unit's trained parameters, on the rank with the largest part;
    `outer_bytes`: of a parameter, those of an outer optimizer."""
    own = sum(
        _bytes_of_row(optimizer, (rows, row), in_block) * -(-rows // unit.shards) for rows, row in unit.trained.matrices
    )
    return own + outer_bytes * unit.trained.own


def _bytes_of_row(optimizer: KeptState, matrix: Matrix, in_block: bool) -> float:
    rows, row = matrix
    if isinstance(optimizer, float):
        return optimizer * row
    if optimizer == "sgd":
        return 0.0
    if optimizer == "muon" and in_block and is_hidden(matrix):
        return MOMENT * row
    if optimizer == "adamw8bit" and rows * row >= QUANTISED_SIZE and row >= QUANTISED_ROW:
        return 2 * (row + MOMENT * -(-row // BLOCK))
    return 2 * MOMENT * row


def is_hidden(matrix: Matrix) -> bool:
    """Return whether muon orthogonalises a matrix of a block; vectors and the taps of convolutions it leaves to adamw.

    Stacked biases count as matrices, as they are few.
    """
    return matrix[1] not in (1, CONV_TAPS)


def update_bytes(optimizer: KeptState, blocks: Iterable[Unit], outside: Iterable[Unit], width: float) -> float:
    """Return the bytes of an update's temporaries, of which the largest parameter has the most; muon computes in a
    format of `width` bytes."""
    of_blocks = [matrix for unit in blocks for matrix in unit.trained.matrices]
    own = [-(-rows // unit.shards) * row for unit in (*blocks, *outside) for rows, row in unit.trained.matrices]
    if optimizer == "adamw8bit":
        return CHUNK_BYTES * min(CHUNK_VALUES, max(own, default=0))
    if optimizer == "muon":
        hidden = [rows * row for rows, row in of_blocks if is_hidden((rows, row))]
        stacked = min(STACKED_VALUES, sum(hidden))
        return MATRICES_AT_ONCE * width * max(stacked, max(hidden, default=0))
    return 0.0


# The sizes of a layer (`Shape`), and what layers of all kinds are made of: norms, regions, feed-forwards.


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


# FSDP2 (torch 2.13) on an account: units are gathered, let go, and their gradients reduced.
#
# What it holds is as read from its source: a forward keeps its all-gather's buffer until the next one's parameters are
# copied out, a backward gathers the unit before while it works on its own, and the buffer of a reduce-scatter lives
# until the next one.


MASTER_WIDTH = 4.0
"""Bytes of a parameter as it is kept, of its gradient there and of each moment."""


@dataclass
class Sharded:
    """A unit's state."""

    unit: Unit
    is_gathered: bool = False
    prefetched: bool = False
    gradient_bytes: float = 0.0
    """Unsharded gradients, as autograd made them."""
    accumulated_bytes: float = 0.0
    """The same in the format of the exchange, waiting for the last micro-batch."""
    has_gradient: bool = False


class Sharding:
    """The sharded parameters of one stage. `keeps`: they are gathered once a step; else they are freed after each
    forward and each backward."""

    def __init__(self, account: Account, width: float, reduce_width: float, *, keeps: bool):
        self.account, self.width, self.reduce_width, self.keeps = account, width, reduce_width, keeps
        self.buffer_bytes = 0.0
        """Bytes of the last forward's all-gather."""
        self.reduced_bytes = 0.0
        """Bytes of the last reduce-scatter."""

    def gather(self, part: Sharded) -> None:
        """Gather the part's parameters in a forward."""
        if part.is_gathered or not part.unit.full:
            return
        size, account = part.unit.gathered * self.width, self.account
        if part.unit.shards > 1:
            self.prefetch(part)
            account.add("collectives", -self.buffer_bytes)
            self.buffer_bytes, part.prefetched = size, False
        self._copy_out(part, size)

    def _copy_out(self, part: Sharded, size: float) -> None:
        self.account.add("gathered", size)
        self.account.touch(size if part.unit.reorders else 0.0)
        part.is_gathered = True

    def end_forward(self) -> None:
        self.account.add("collectives", -self.buffer_bytes)
        self.buffer_bytes = 0.0

    def free_after_forward(self, part: Sharded) -> None:
        if not self.keeps and part.unit.shards > 1:
            self.free(part)

    def free(self, part: Sharded) -> None:
        if part.is_gathered:
            self.account.add("gathered", -part.unit.gathered * self.width)
            part.is_gathered = False

    def prefetch(self, part: Sharded | None) -> None:
        if part is None or part.is_gathered or part.prefetched or part.unit.shards == 1:
            return
        self.account.touch((part.unit.gathered + part.unit.own) * self.width, "collectives")
        self.account.add("collectives", part.unit.gathered * self.width)
        part.prefetched = True

    def gather_again(self, part: Sharded) -> None:
        """Gather the part's parameters in a backward, where the buffer is freed at once."""
        if part.is_gathered:
            return
        size = part.unit.gathered * self.width
        self._copy_out(part, size)
        if part.prefetched:
            self.account.add("collectives", -size)
        part.prefetched = False

    def make_early_gradient(self, part: Sharded) -> None:
        size = part.unit.early * self.width
        self.account.add("gradients", size)
        part.gradient_bytes += size

    def make_gradient(self, part: Sharded, *, put_off: bool = False) -> None:
        """Or what was put off of it. A second one is added to the first, into new memory."""
        size = (part.unit.trained.full - (part.unit.early if put_off else 0.0)) * self.width
        if part.gradient_bytes:
            self.account.touch(part.unit.trained.largest * self.width, "gradients")
        self.account.add("gradients", size - part.gradient_bytes)
        part.gradient_bytes = size

    def after_backward(self, part: Sharded, *, exchanges: bool, last: bool) -> None:
        """Free the parameters, unless micro-batches follow for which they are kept; where nothing is exchanged yet,
        gradients take the format of the exchange."""
        if last or not self.keeps:
            self.free(part)
        if not exchanges and part.gradient_bytes and self.reduce_width != self.width and not part.accumulated_bytes:
            part.accumulated_bytes = part.unit.trained.full * self.reduce_width
            self.account.add("gradients", part.accumulated_bytes)
        if part.accumulated_bytes:
            self.account.add("gradients", -part.gradient_bytes)
            part.gradient_bytes = 0.0
        if exchanges:
            self._reduce(part)

    def _reduce(self, part: Sharded) -> None:
        """Copied into one buffer, summed over ranks; the own part stays: over one rank, the buffer itself."""
        waiting = part.gradient_bytes + part.accumulated_bytes
        if not waiting:
            return
        account, size = self.account, part.unit.trained.gathered * self.reduce_width
        if part.unit.shards == 1 and self.reduce_width == MASTER_WIDTH and not part.has_gradient:
            account.add("collectives", -self.reduced_bytes)
            account.add("gradients", size)
            account.add("gradients", -waiting)
            part.gradient_bytes = part.accumulated_bytes = self.reduced_bytes = 0.0
            part.has_gradient = True
            return
        account.touch(part.unit.trained.largest * self.width if part.unit.reorders else 0.0, "collectives")
        account.add("collectives", -self.reduced_bytes)
        account.add("collectives", size)
        # foreach_reduce frees its list of whole gradients after the copy, but a loop's variable keeps the last one
        # until the function returns: of a first stage that is the whole embedding's.
        last_rows, row = part.unit.trained.matrices[-1]
        last = last_rows * row * (self.reduce_width if part.accumulated_bytes else self.width)
        lingering = last if part.unit.shards > 1 else 0.0
        account.add("gradients", lingering - waiting)
        own = part.unit.trained.own * MASTER_WIDTH
        narrow = part.unit.trained.own * (self.reduce_width if self.reduce_width < MASTER_WIDTH else 0.0)
        account.touch(narrow + own, "collectives" if part.has_gradient else "gradients")
        account.add("gradients", 0.0 if part.has_gradient else own)
        account.add("gradients", -lingering)
        part.gradient_bytes = part.accumulated_bytes = 0.0
        self.reduced_bytes, part.has_gradient = size, True

    def end_backward(self) -> None:
        self.account.add("collectives", -self.reduced_bytes)
        self.reduced_bytes = 0.0
