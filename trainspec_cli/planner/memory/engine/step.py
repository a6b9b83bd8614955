"""Replay an engine step: the pipeline's actions on the block profiles, with FSDP2's all-gathers and reduce-scatters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Literal, Protocol, cast

from trainspec_cli.core.wings import Point
from trainspec_cli.planner.memory.engine.blocks import BlockProfile, Shape, block_layout, profile_block
from trainspec_cli.planner.memory.engine.tape import Event, Stretch
from trainspec_cli.planner.memory.engine.units import (
    Unit,
    block_unit,
    experts_unit,
    freeze,
    frozen_block,
    frozen_experts,
    frozen_names,
    frozen_outside,
    outside_unit,
    state_bytes,
    update_bytes,
    whole_experts,
)
from trainspec_cli.planner.pipeline import Action, actions, cut_layers
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    Layer,
    ModelSpec,
    TextModel,
    has_layer_list,
    loss_chunk_tokens,
    loss_group_tokens,
)
from trainspec_cli.recipe.keys.run import Recompute, RunSpec
from trainspec_cli.recipe.keys.training import KeptState, LoraSpec, ParameterGroup
from trainspec_cli.recipe.parameter_names import is_frozen
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import parts_for

KEPT_BYTES: Point[float] = Point("kept_bytes")
"""Bytes per trained parameter that a plug-in keeps on the device, sharded like the optimizer state."""
WIDTHS = {"bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}


@dataclass(frozen=True)
class EngineRun:
    model: ModelSpec
    layout: Layout
    seq_len: int
    samples: int
    """Number of samples per micro-batch."""
    micro_batches: int
    compute: str
    reduce: str
    recompute: Recompute
    optimizer: KeptState
    matmul: str = "compute"
    lora: LoraSpec = field(default_factory=LoraSpec)
    compiled: bool = False
    """True if blocks are compiled (torch.compile)."""
    outer_bytes: float = 0.0
    """Bytes that an outer optimizer keeps per trained parameter (`KEPT_BYTES`)."""
    offloads: bool = False
    """True if shards, their gradients and the optimizer state are in host memory."""
    groups: tuple[ParameterGroup, ...] = ()
    """The recipe's parameter groups, which may freeze parameters."""


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
        spec.compile and fuses_countably(model, spec.lora, spec.precision.matmul, plan.compute, spec.optim.groups),
        outer_bytes_of(spec),
        plan.offload != "none",
        spec.optim.groups,
    )


def outer_bytes_of(spec: RunSpec) -> float:
    """Return the bytes per trained parameter that the recipe's plug-ins keep on the device."""
    return sum(parts_for(KEPT_BYTES, spec), 0.0)


def is_counted(model: ModelSpec, offload: str) -> bool:
    """Return whether memory can be counted, which requires that the engine supports the model and that its family can
    be counted. With `offload`, only text models can be counted."""
    return bool(model.record.memory) and model.is_built and (offload == "none" or isinstance(model, TextModel))


def fuses_countably(
    model: ModelSpec, lora: LoraSpec, matmul: str, compute: str, groups: tuple[ParameterGroup, ...] = ()
) -> bool:
    """Return whether the count covers fusion in the model's compiled blocks. It does for blocks whose weights are all
    trained, with full attention and feed-forwards in a single format; it has not been compared with the compiled graphs
    of other blocks."""
    frozen = lora.rank or any(group.frozen for group in groups)
    if not has_layer_list(model) or frozen or matmul not in ("compute", compute):
        return False
    layers = set(model.layer_list)
    plain = all(set(layer.mixers) <= {"attention", "feed_forward"} for layer in layers)
    return plain and all(layer.window is None for layer in layers) and not model.as_decoder.attention_sinks


def engine_peak(run: EngineRun, pipeline_rank: int) -> PeakMemory:
    """Return the memory in bytes, by cause (`CAUSES`), at the peak of one pipeline rank, if `is_counted`."""
    family = cast("FamilyMemory", import_module(run.model.record.memory))
    return family.replay(run, pipeline_rank)


class FamilyMemory(Protocol):
    """The functions that a memory module (`FamilyRecord.memory`) provides."""

    def replay(self, run: EngineRun, pipeline_rank: int) -> PeakMemory:
        """Return the memory in bytes, by cause (`CAUSES`), at the peak of a step on one pipeline rank."""


def rank_peaks(run: EngineRun) -> Iterator[PeakMemory]:
    """Yield the peaks of all pipeline ranks.

    A rank that does not have more layers of any kind than an earlier rank needs no more memory, because the earlier
    rank keeps activations for more micro-batches. Such a rank is not counted separately unless it has the head.
    """
    counted: list[tuple[Counter[Layer], PeakMemory]] = []
    for rank, layers in enumerate(_layers_of_ranks(run)):
        fuller = [peak for others, peak in counted if layers <= others]
        if fuller and rank < run.layout.pp - 1:
            yield fuller[0]
        else:
            counted.append((layers, engine_peak(run, rank)))
            yield counted[-1][1]


def _layers_of_ranks(run: EngineRun) -> list[Counter[Layer]]:
    """Return the number of layers of each kind on each pipeline rank."""
    if run.layout.pp == 1:
        return [Counter()]
    if not has_layer_list(run.model):  # in that case, ranks cannot be compared
        return [Counter({Layer((), rank): 1}) for rank in range(run.layout.pp)]
    layers = run.model.layer_list
    stages = cut_layers(len(layers), run.layout)
    return [
        Counter(layers[layer] for stage in run.layout.stages_of_rank(rank) for layer in stages[stage])
        for rank in range(run.layout.pp)
    ]


def tensors_by_cause(plan: Plan) -> dict[str, float] | None:
    """Return the memory of tensors in bytes, with eager blocks, on the stage that needs the most; None if the engine's
    memory cannot be counted, or with `offload`, because a trace does not separate host memory."""
    if not is_counted(plan.spec.model, plan.offload) or plan.offload != "none":
        return None
    return max(rank_peaks(run_of(plan)), key=lambda peak: sum(peak.values()))


CAUSES = ("parameters", "optimizer", "gradients", "gathered", "activations", "logits", "collectives", "temporaries")
"""Causes of memory use. Gradients are the sharded ones, which the optimizer reads, and the unsharded ones until they
are exchanged. Collectives are the buffers of data-parallel exchanges, and the pipeline's messages. Until a block's
backward pass ends, its gradients count as activations."""


Stream = Literal["compute", "gather", "reduce"]
"""The stream in which memory is allocated. The caching allocator has a separate pool for each stream, which no other
stream can use. FSDP2 allocates the buffers of all-gathers in one stream, and sums of gradients in another."""


class PeakMemory(dict[str, float]):
    """Memory in bytes, by cause (`CAUSES`), at the peak of a rank's step."""

    idle_bytes = 0.0
    """Bytes that are reserved but unused at that moment, because the pools peak at different moments."""


class Account:
    def __init__(self) -> None:
        self.live = dict.fromkeys(CAUSES, 0.0)
        self._at_peak = PeakMemory(self.live)
        self._total = self._peak = 0.0
        self._in_pool: dict[Stream, float] = {"compute": 0.0, "gather": 0.0, "reduce": 0.0}
        self._pool_peaks = dict(self._in_pool)

    @property
    def at_peak(self) -> PeakMemory:
        self._at_peak.idle_bytes = sum(self._pool_peaks.values()) - self._peak
        return self._at_peak

    def add(self, cause: str, size: float, stream: Stream = "compute") -> None:
        self.live[cause] += size
        self._total += size
        self._in_pool[stream] += size
        self.touch(0.0, stream=stream)

    def touch(self, size: float, cause: str = "temporaries", stream: Stream = "compute") -> None:
        """Record that `size` additional bytes are live for a moment."""
        self._pool_peaks[stream] = max(self._pool_peaks[stream], self._in_pool[stream] + size)
        if self._total + size > self._peak:
            self._peak = self._total + size
            self._at_peak = PeakMemory({**self.live, cause: self.live[cause] + size})


# FSDP2 (torch 2.13): units are gathered and freed, and their gradients are reduced.
#
# Lifetimes follow its source. A forward pass keeps its all-gather buffer until the next unit's parameters are copied
# out. A backward pass gathers the previous unit while it processes the current one. The buffer of a reduce-scatter
# lives until the next reduce-scatter.


MASTER_WIDTH = 4.0
"""Bytes per value in a sharded parameter, its gradient and each moment."""


@dataclass
class Sharded:
    """The state of one unit."""

    unit: Unit
    is_gathered: bool = False
    prefetched: bool = False
    gradient_bytes: float = 0.0
    """Unsharded gradients from autograd."""
    accumulated_bytes: float = 0.0
    """The same gradients in the exchange format, waiting for the last micro-batch."""
    has_gradient: bool = False


class Sharding:
    """The sharded parameters of one stage. `keeps`: whether they are gathered once per step instead of being freed
    after each forward and backward pass. `offloads`: whether reduced gradients are moved to the host."""

    def __init__(self, account: Account, width: float, reduce_width: float, *, keeps: bool, offloads: bool = False):
        self.account, self.width, self.reduce_width, self.keeps = account, width, reduce_width, keeps
        self.offloads = offloads
        self.buffer_bytes = 0.0
        """Size of the forward pass's most recent all-gather buffer."""
        self.reduced_bytes = 0.0
        """Size of the most recent reduce-scatter buffer."""

    def gather(self, part: Sharded) -> None:
        """Gather the part's parameters in a forward pass."""
        if part.is_gathered or not part.unit.full:
            return
        size, account = part.unit.gathered * self.width, self.account
        if part.unit.shards > 1:
            self.prefetch(part)
            account.add("collectives", -self.buffer_bytes, "gather")
            self.buffer_bytes, part.prefetched = size, False
        self._copy_out(part, size)

    def _copy_out(self, part: Sharded, size: float) -> None:
        self.account.add("gathered", size)
        self.account.touch(size if part.unit.reorders else 0.0)
        part.is_gathered = True

    def end_forward(self) -> None:
        self.account.add("collectives", -self.buffer_bytes, "gather")
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
        self.account.touch((part.unit.gathered + part.unit.own) * self.width, "collectives", "gather")
        self.account.add("collectives", part.unit.gathered * self.width, "gather")
        part.prefetched = True

    def gather_again(self, part: Sharded) -> None:
        """Gather the part's parameters in a backward pass, and free the buffer immediately."""
        if part.is_gathered:
            return
        size = part.unit.gathered * self.width
        self.prefetch(part)
        self._copy_out(part, size)
        if part.prefetched:
            self.account.add("collectives", -size, "gather")
        part.prefetched = False

    def make_early_gradient(self, part: Sharded) -> None:
        size = part.unit.early * self.width
        self.account.add("gradients", size)
        part.gradient_bytes += size

    def make_gradient(self, part: Sharded, *, put_off: bool = False) -> None:
        """Create the gradient (or a deferred part of it); a second gradient is added to the first in new memory."""
        size = (part.unit.trained.full - (part.unit.early if put_off else 0.0)) * self.width
        if part.gradient_bytes:
            self.account.touch(part.unit.trained.largest * self.width, "gradients")
        self.account.add("gradients", size - part.gradient_bytes)
        part.gradient_bytes = size

    def after_backward(self, part: Sharded, *, exchanges: bool, last: bool) -> None:
        """Free the parameters unless they are kept for later micro-batches. If nothing is exchanged yet, convert
        gradients to the exchange format."""
        if last or not self.keeps:
            self.free(part)
        if not exchanges and part.gradient_bytes and self.reduce_width != self.width and not part.accumulated_bytes:
            part.accumulated_bytes = part.unit.trained.full * self.reduce_width
            each = part.gradient_bytes / part.unit.trained.full
            for rows, row in part.unit.trained.matrices:
                self.account.add("gradients", rows * row * self.reduce_width)
                self.account.add("gradients", -rows * row * each)
            part.gradient_bytes = 0.0
        if part.accumulated_bytes:
            self.account.add("gradients", -part.gradient_bytes)
            part.gradient_bytes = 0.0
        if exchanges:
            self._reduce(part)

    def _reduce(self, part: Sharded) -> None:
        """Copy gradients into one buffer and sum them over ranks, keeping this rank's part. With a single rank, this
        part is the buffer itself."""
        waiting = part.gradient_bytes + part.accumulated_bytes
        if not waiting:
            return
        account, size = self.account, part.unit.trained.gathered * self.reduce_width
        keeps_buffer = self.offloads or not part.has_gradient
        if part.unit.shards == 1 and self.reduce_width == MASTER_WIDTH and keeps_buffer:
            account.add("collectives", -self.reduced_bytes)
            # With offloading, the result is copied to the host, and the next reduction reuses the buffer.
            account.add("collectives" if self.offloads else "gradients", size)
            account.add("gradients", -waiting)
            part.gradient_bytes = part.accumulated_bytes = 0.0
            self.reduced_bytes = size if self.offloads else 0.0
            part.has_gradient = True
            return
        account.touch(part.unit.trained.largest * self.width if part.unit.reorders else 0.0, "collectives")
        account.add("collectives", -self.reduced_bytes)
        account.add("collectives", size)
        # foreach_reduce frees its list of full gradients after the copy, but a loop variable keeps the last one until
        # the function returns. On the first stage, this is the gradient of the full embedding.
        last_rows, row = part.unit.trained.matrices[-1]
        last = last_rows * row * (self.reduce_width if part.accumulated_bytes else self.width)
        lingering = last if part.unit.shards > 1 else 0.0
        account.add("gradients", lingering - waiting)
        own = part.unit.trained.own * MASTER_WIDTH
        narrow = part.unit.trained.own * (self.reduce_width if self.reduce_width < MASTER_WIDTH else 0.0)
        stream: Stream = "reduce" if part.unit.shards > 1 else "compute"
        account.touch(narrow + own, "collectives" if part.has_gradient else "gradients", stream)
        account.add("gradients", 0.0 if part.has_gradient or self.offloads else own, stream)
        account.add("gradients", -lingering)
        part.gradient_bytes = part.accumulated_bytes = 0.0
        self.reduced_bytes, part.has_gradient = size, True

    def end_backward(self) -> None:
        self.account.add("collectives", -self.reduced_bytes)
        self.reduced_bytes = 0.0


def replay(run: EngineRun, pipeline_rank: int) -> PeakMemory:
    """Return the memory in bytes, by cause, at the peak of a text model's step."""
    return _Replay(run, cast("TextModel", run.model), pipeline_rank).run()


def shape_of(run: EngineRun, model: TextModel, layer: Layer) -> Shape:
    layout, width = block_layout(run.layout), WIDTHS[run.compute]
    seq_len, is_fp8 = run.seq_len // run.layout.cp, run.matmul == "fp8"
    return Shape(model, layer, layout, run.samples, seq_len, width, is_fp8, run.lora, run.compiled)


@dataclass
class _Block:
    profile: BlockProfile
    own: Sharded
    experts: Sharded | None
    """The block's experts, if they are spread over ranks and sharded separately."""
    whole_experts: Unit
    """The block's experts, if they are not spread over ranks."""

    @property
    def units(self) -> list[Sharded]:
        """Return the units in the order in which their forward passes end."""
        return [self.experts, self.own] if self.experts else [self.own]


@dataclass
class _Stage:
    first: bool
    last: bool
    blocks: list[_Block]
    outside: Sharded
    sharding: Sharding
    left: int
    """Number of remaining backward passes."""
    further: int = 0
    """Number of blocks, the last ones, that predict further tokens."""

    def is_further(self, block: _Block) -> bool:
        return any(block is one for one in self.blocks[len(self.blocks) - self.further :])

    @cached_property
    def units(self) -> list[Sharded]:
        return [*(unit for block in self.blocks for unit in block.units), self.outside]

    @cached_property
    def before(self) -> dict[int, Sharded | None]:
        """Id of a unit -> the unit whose forward pass ended just before it, and whose backward pass therefore comes
        next."""
        return {id(unit): before for before, unit in zip([None, *self.units], self.units, strict=False)}


class _Replay:
    def __init__(self, run: EngineRun, model: TextModel, pipeline_rank: int):
        self.given, self.model, self.layout, self.rank = run, model, run.layout, pipeline_rank
        self.micro_batches = run.micro_batches
        if (run.layout.pp == 1 or run.layout.pipeline_schedule != "gpipe") and run.micro_batches % run.layout.pp == 0:
            # This many micro-batches fill the pipeline, and later ones repeat the pattern. GPipe, however, holds all of
            # them.
            self.micro_batches = min(run.micro_batches, 3 * run.layout.pp)
        self.width, self.reduce_width = WIDTHS[run.compute], WIDTHS[run.reduce]
        self.split = run.layout.splits_backward
        self.layers = model.layer_list
        self.shape = shape_of(run, model, self.layers[0])
        self.account = Account()
        self.message_bytes = self.shape.outside_tokens * model.hidden_size * self.width
        """Size in bytes of the hidden states passed between two stages or two blocks."""
        self.angles_bytes = 2.0 * self.shape.seq_len * model.rotated_size * self.width if model.rotates else 0.0
        self.stages = {stage: self._stage(stage) for stage in run.layout.stages_of_rank(pipeline_rank)}

    def _stage(self, stage: int) -> _Stage:
        stages = self.layout.num_stages
        held = cut_layers(self.model.num_layers, self.layout)[stage] if stages > 1 else range(self.model.num_layers)
        first, last = stage == 0, stage == stages - 1
        whole = outside_unit(self.model, self.layout, first, last)
        unit = frozen_outside(whole, self.model, first, last, self.given.groups)
        outside = Sharded(freeze(unit, self.given.lora))
        keeps, offloads = self.layout.keeps_parameters, self.given.offloads
        sharding = Sharding(self.account, self.width, self.reduce_width, keeps=keeps, offloads=offloads)
        groups = self.given.groups
        kinds = [
            (self.layers[number], frozen_names(self.model, number, self.layers[number], groups), False)
            for number in held
        ]
        further = self.model.prediction_layers if last else 0
        for number in range(self.model.num_layers, self.model.num_layers + further):
            kinds.append(
                (self.layers[-1], frozen_names(self.model, number, self.layers[-1], groups, predicts=True), True)
            )
        makers = {kind: self._maker(*kind) for kind in set(kinds)}
        blocks = [makers[kind]() for kind in kinds]
        return _Stage(first, last, blocks, outside, sharding, self.micro_batches, further)

    def _maker(self, layer: Layer, frozen: frozenset[str], predicts: bool) -> Callable[[], _Block]:
        """Return a function that creates blocks of one kind, which share everything except gathered parameters."""
        model, layout, lora = self.model, self.layout, self.given.lora
        shape = replace(shape_of(self.given, model, layer), frozen=frozen)
        profile = profile_block(shape, self.given.recompute, self.split, predicts)
        spread = layout.ep > 1 and "experts" in layer.mixers
        experts = experts_unit(model, layout, lora) if spread else None
        experts = frozen_experts(experts, layer, model, frozen) if experts else None
        own, whole = (
            block_unit(model, layer, layout, lora, predicts=predicts),
            whole_experts(model, layer, layout, lora),
        )
        own = frozen_block(own, model, layer, layout, frozen, predicts=predicts)
        whole = frozen_experts(whole, layer, model, frozen)
        return lambda: _Block(profile, Sharded(own), Sharded(experts) if experts and experts.matrices else None, whole)

    def run(self) -> PeakMemory:
        self._hold_state()
        for action in actions(self.layout, self.micro_batches)[self.rank]:
            _ACTIONS[action.kind](self, action)
        if self.layout.tp > 1 and self.layout.ep == 1:
            # Each tp rank holds all experts. Their gradients are summed after the passes: they are all copied, then
            # flattened.
            shares = sum(block.whole_experts.trained.own for stage in self.stages.values() for block in stage.blocks)
            self.account.touch(2 * shares * MASTER_WIDTH, "gradients")
        self._update()
        return self.account.at_peak

    def _hold_state(self) -> None:
        units = [unit for stage in self.stages.values() for unit in stage.units]
        own = 0.0 if self.given.offloads else sum(part.unit.own for part in units)
        # Each stage keeps tables with a row per token: positions, and cosines and sines in fp32.
        row_bytes = 8 + (2 * 4 * self.model.rotated_size if self.model.rotates else 0)
        tables = len(self.stages) * self.given.seq_len * row_bytes
        quantised = sum(part.unit.quantised_bytes for part in units)
        self.account.add("parameters", own * MASTER_WIDTH + quantised + tables)
        self.account.add("optimizer", self._optimizer_bytes())
        self.account.add("temporaries", 16.0 * self.shape.tokens * self.given.micro_batches)
        if self.layout.pp > 1:  # one message received in advance, and one being sent
            self.account.add("collectives", 2 * self.message_bytes)

    def _optimizer_bytes(self) -> float:
        blocks, outside = self._trained()
        name, outer_bytes = self.given.optimizer, self.given.outer_bytes
        if self.given.offloads:
            return outer_bytes * sum(unit.trained.own for unit in (*blocks, *outside))
        own = sum(state_bytes(name, unit, in_block=True, outer_bytes=outer_bytes) for unit in blocks)
        return own + sum(state_bytes(name, unit, in_block=False, outer_bytes=outer_bytes) for unit in outside)

    def _trained(self) -> tuple[list[Unit], list[Unit]]:
        """Return (the units of the rank's blocks, the units outside the blocks)."""
        stages = self.stages.values()
        blocks = [sharded.unit for stage in stages for block in stage.blocks for sharded in block.units]
        return blocks, [stage.outside.unit for stage in stages]

    def _update(self) -> None:
        """Count the optimizer update, during which the gradients and all persistent tensors are live."""
        if not self.given.offloads:
            self.account.touch(update_bytes(self.given.optimizer, *self._trained(), self.width))

    # Actions

    def _forward(self, action: Action) -> None:
        stage, account = self.stages[action.stage], self.account
        stage.sharding.gather(stage.outside)
        account.add("activations", self.message_bytes + self.angles_bytes)
        for block in stage.blocks:
            if stage.is_further(block):  # the loss before it, and the embeddings that it reads
                self._loss(stage)
                account.add("activations", self.message_bytes)
            stage.sharding.gather(block.own)
            self._work(stage, block, block.profile.forward)
            stage.sharding.free_after_forward(block.own)
        if stage.last:
            self._loss(stage)
        stage.sharding.end_forward()

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        stage.left -= 1
        self._backpropagate(stage, self.layout.exchanges_every_backward or stage.left == 0)

    def _backward_input(self, action: Action) -> None:
        self._backpropagate(self.stages[action.stage], exchanges=False)

    def _backward_weight(self, action: Action) -> None:
        """Compute the deferred weight gradients one after another; all of their inputs are kept until the last one is
        done."""
        stage, account = self.stages[action.stage], self.account
        for block in stage.blocks:
            stage.sharding.make_gradient(block.own, put_off=True)
        account.add("activations", -sum(block.profile.put_off for block in stage.blocks))
        stage.left -= 1
        if stage.left == 0:
            # `exchange_now` visits a module before those inside it.
            blocks = [unit for block in stage.blocks for unit in reversed(block.units)]
            for part in (stage.outside, *blocks):
                stage.sharding.after_backward(part, exchanges=True, last=True)
            stage.sharding.end_backward()

    # Parts of actions

    @property
    def _trains_head(self) -> bool:
        return trains_head(self.given, self.model)

    def _loss(self, stage: _Stage) -> None:
        """Count the loss, which keeps the gradients of the hidden states and, in fp32, those of the head."""
        account, hidden, width = self.account, self.model.hidden_size, self.width
        rows, tokens, trained = self.model.vocab_size // self.layout.tp, self.shape.tokens, self._trains_head
        # With sequence parallelism: the norm's output, and its gathered copy.
        is_split = self.layout.tp > 1 and self.layout.sequence_parallel
        entered = (tokens + (self.shape.outside_tokens if is_split else 0.0)) * hidden * width
        account.add("activations", tokens * hidden * width)
        account.add("gradients", trained * rows * hidden * 4.0)
        account.add("activations", entered)
        logits, temporaries, product = loss_parts(self.given, self.model)
        account.touch(logits + temporaries, "logits")
        account.add("gradients", product)
        account.touch(logits, "logits")
        account.add("gradients", -product)
        account.add("activations", -entered)

    def _backpropagate(self, stage: _Stage, exchanges: bool) -> None:
        account, sharding = self.account, stage.sharding
        if not stage.last and stage.blocks:
            # The last block's output is also the stage's output, so its hooks run in the order in which FSDP2 added
            # them.
            sharding.gather_again(stage.blocks[-1].own)
            sharding.prefetch(stage.before[id(stage.blocks[-1].own)])
        # If an earlier micro-batch's backward pass freed the parameters outside the blocks, gather them again.
        sharding.gather_again(stage.outside)
        sharding.prefetch(stage.blocks[-1].own if stage.blocks else None)
        if stage.last:
            self._loss_backward(stage)
        else:
            account.add("collectives", self.message_bytes)
        # The gradient of the embeddings that prediction layers read waits for that of the first layer's.
        embedding = self.model.vocab_size // self.layout.tp * self.model.hidden_size * self.width
        waiting = 0.0
        for block in reversed(stage.blocks):
            sharding.gather_again(block.own)
            sharding.prefetch(stage.before[id(block.own)])
            account.add("activations", -block.profile.kept)
            self._work(stage, block, block.profile.backward, exchanges)
            account.add("activations", block.profile.put_off - block.profile.backward[-1].live)
            if self.split:
                sharding.make_early_gradient(block.own)
            else:
                sharding.make_gradient(block.own)
            sharding.after_backward(block.own, exchanges=exchanges, last=stage.left == 0)
            if stage.is_further(block):
                account.add("activations", -self.message_bytes)
                account.touch(embedding if waiting else 0.0, "gradients")
                account.add("gradients", 0.0 if waiting else embedding)
                waiting = embedding
                self._loss_backward(stage)
        account.add("gradients", 0.0 if stage.first else -waiting)
        sharding.make_gradient(stage.outside)
        account.add("gradients", -waiting if stage.first else 0.0)
        account.add("activations", -self.message_bytes - self.angles_bytes)
        if not stage.last:
            account.add("collectives", -self.message_bytes)
        sharding.after_backward(stage.outside, exchanges=exchanges, last=stage.left == 0)
        if exchanges:
            sharding.end_backward()

    def _work(
        self, stage: _Stage, block: _Block, stretches: tuple[Stretch, ...], exchanges: bool | None = None
    ) -> None:
        """Run a block's forward or backward pass, which may exchange gradients (`exchanges`)."""
        live = 0.0
        for stretch in stretches:
            self.account.touch(stretch.peak - live)
            self.account.add("activations", stretch.live - live)
            live = stretch.live
            if stretch.then and block.experts:
                self._shard_experts(stage, block.experts, stretch.then, exchanges)

    def _shard_experts(self, stage: _Stage, experts: Sharded, event: Event, exchanges: bool | None) -> None:
        """Process an event of separately sharded experts. A forward pass that is recomputed in the backward pass ends
        with the experts and leaves them gathered."""
        sharding = stage.sharding
        if event == "gather":
            sharding.gather(experts)
        elif event == "free" and exchanges is None:
            sharding.free_after_forward(experts)
        elif event == "free":
            sharding.end_forward()
        elif event == "gather_again":
            sharding.gather_again(experts)
            sharding.prefetch(stage.before[id(experts)])
        elif event == "reduce":
            sharding.make_gradient(experts)
            sharding.after_backward(experts, exchanges=exchanges is True, last=stage.left == 0)

    def _loss_backward(self, stage: _Stage) -> None:
        account, hidden, width = self.account, self.model.hidden_size, self.width
        table = self._trains_head * (self.model.vocab_size // self.layout.tp) * hidden
        states = self.shape.tokens * hidden * width
        account.touch(states + table * width, "gradients")
        account.add("gradients", -table * 4.0)
        account.touch(states)
        account.add("activations", -states)
        if not stage.outside.gradient_bytes:
            account.add("gradients", table * width)
            stage.outside.gradient_bytes = table * width


def trains_head(run: EngineRun, model: TextModel) -> bool:
    name = "embed.weight" if model.tied_embeddings else "head.weight"
    return not run.lora.rank and not is_frozen(name, run.groups)


def loss_bytes(run: EngineRun, model: TextModel) -> float:
    """Return the peak bytes of the loss, excluding the head's fp32 gradient, which lasts until the backward pass."""
    logits, temporaries, product = loss_parts(run, model)
    return logits + max(temporaries, product)


def loss_parts(run: EngineRun, model: TextModel) -> tuple[float, float, float]:
    """Return the sizes in bytes of (a group's logits, the temporaries of one of its chunks, the product of the group's
    gradients and hidden states). The product is computed after the chunks."""
    width, rows = WIDTHS[run.compute], model.vocab_size // run.layout.tp
    tokens = run.samples * (run.seq_len // run.layout.cp)
    chunk = loss_chunk_tokens(rows)
    trained = trains_head(run, model)
    group = min(tokens, loss_group_tokens(model.hidden_size, width, chunk) if trained else chunk)
    table = trained * rows * model.hidden_size
    narrow = width < 4.0
    # The softmax, and the fp32 copy of 2-byte logits that it reads. A compiler fuses both. With a sharded vocabulary,
    # the softmax overwrites the copy.
    values = 4.0 * (narrow + (run.layout.tp == 1))
    if run.compiled and run.layout.tp == 1:
        values = 0.0
    # The gradient is allocated after the first group's chunks. A later group can be smaller.
    temporaries = min(tokens, chunk) * rows * values - 4.0 * table
    if tokens > group:
        later = min(group, tokens - group)
        temporaries = max(temporaries, min(later, chunk) * rows * values - (group - later) * rows * width)
    return group * rows * width, temporaries, table * width if narrow else 0.0


_ACTIONS = {
    "forward": _Replay._forward,
    "backward": _Replay._backward,
    "backward_input": _Replay._backward_input,
    "backward_weight": _Replay._backward_weight,
}
