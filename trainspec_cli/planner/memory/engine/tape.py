"""Reverse-mode differentiation of sizes: what a block allocates, saves and frees in the forward and backward passes,
and what its kernels read and write.

A `Value` represents a tensor, and a `Storage` its memory. As in the engine, memory is live as long as something
references it: a local variable, a node's saved input, a pending gradient. A block recorded here with the same
operations as the engine's block therefore has the same peaks. Sizes are in bytes; values have a width in bytes per
element.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from trainspec_cli.recipe.keys.training import NF4_BLOCK, NF4_CHUNK

PRECISE = 4.0
"""Bytes per element of scores, decays and statistics."""
INDEX = 8.0
"""Bytes per index."""
NF4_INDEX = 2.0
"""Bytes of index per 4-bit weight: two weights share a 4-byte index."""
Kernels = Sequence[float]
"""Bytes that each kernel reads and writes."""
Event = Literal["gather", "free", "gather_again", "reduce"]
"""Events of separately sharded experts within a block, which occur before and after their forward and backward
passes."""


@dataclass(frozen=True)
class Stretch:
    """A section of a block's work, which ends at an event or at the end of the block."""

    peak: float
    """Peak bytes of the block alone."""
    live: float
    """Bytes that are live at its end."""
    then: Event | None = None


class Meter:
    """The number of live bytes, and its peak so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0.0

    def grow(self, size: float) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


class Storage:
    """Memory that is freed when its last reference disappears."""

    __slots__ = ("_meter", "size")

    def __init__(self, meter: Meter, size: float):
        self._meter, self.size = meter, size
        meter.grow(size)

    def __del__(self) -> None:
        self._meter.live -= self.size


class JoinedStorage(Storage):
    """Several storages that are referenced together."""

    __slots__ = ("_parts",)

    def __init__(self, meter: Meter, *parts: Storage):
        super().__init__(meter, 0.0)
        self._parts = parts


Backward = Callable[["Value"], Sequence["Value | None"]]
"""Maps the gradient of an operation's output to the gradients of its inputs, with None for inputs that need no
gradient."""


class Node:
    """A recorded operation, or a leaf if it has no inputs. A leaf accumulates its gradient."""

    def __init__(
        self, number: float, inputs: Sequence[Node | None], backward: Backward | None, *, has_views: bool = False
    ):
        self.number, self.inputs, self.backward = number, inputs, backward
        self.has_views = has_views
        """True if its outputs are parts of one value, so that their gradients are concatenated instead of added."""
        self.gradient: Value | None = None

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number  # the latest operation comes first


class Value:
    """A tensor with `elements` elements of `width` bytes each. `node` is the operation that created it, if it needs a
    gradient."""

    __slots__ = ("elements", "node", "storage", "width")

    def __init__(self, storage: Storage, elements: float, width: float, node: Node | None = None):
        self.storage, self.elements, self.width, self.node = storage, elements, width, node

    @property
    def size(self) -> float:
        return self.elements * self.width

    @property
    def read_bytes(self) -> float:
        """Return the bytes that a kernel reads, which are fewer than `size` if a view repeats values. The memory of
        parameters and inputs is counted elsewhere (`Tape.leaf`)."""
        return min(self.size, self.storage.size or self.size)


class Tape:
    """Records operations on values with `width` bytes per element."""

    def __init__(self, width: float, *, fp8: bool = False, frozen: bool = False, fuses: bool = False):
        """`frozen`: whether parameters need no gradient unless specified otherwise. `fuses`: whether a compiler fuses
        consecutive element-wise operations into one kernel, so that the values between them need no memory."""
        self.width, self.meter, self.fp8, self.frozen, self.fuses = width, Meter(), fp8, frozen, fuses
        self.is_saving = True
        """If False, nothing is saved for a backward pass, as in a forward pass that will be recomputed."""
        self.recomputes = False
        """True if the forward pass is being recomputed for a backward pass."""
        self.recalls = False
        """True if the costly results of the first forward pass were saved."""
        self.kept: list[Storage] | None = None
        """Saved results of costly operations, for selective recomputation; None if they are not saved."""
        self.recalled: deque[Storage] = deque()
        """Saved results that the recomputed forward pass uses."""
        self.put_off: list[tuple[Storage, Storage]] | None = None
        """Storages that deferred weight gradients need; None if weight gradients are not deferred."""
        self.saves_left = float("inf")
        """After this many saves, the recomputed forward pass ends and allocates nothing more."""
        self.saves = 0
        self.stretches: list[Stretch] = []
        self.turns: list[float] = []
        """Positions in the backward pass at which linear layers compute their weight gradients while an exchange is in
        progress. Each layer pops the last entry; once only one entry is left, all remaining layers share it."""
        self.left: list[float] = []
        """Positions in the backward pass for work that runs while the output gradients of the block's earlier regions
        are gathered."""
        self.kernels: tuple[list[float], list[float]] = ([], [])
        """The kernels of the forward and backward passes, except for products and fused attention. Recomputed and fused
        blocks are not counted."""
        self._in_backward = False
        self._inner_leaves: list[Node] | None = None
        """Leaves of the separately sharded part, while it is recorded."""
        self._numbers = count()

    def new(self, elements: float, width: float | None = None) -> Value:
        width = self.width if width is None else width
        return Value(Storage(self.meter, elements * width), elements, width)

    def leaf(self, elements: float, *, frozen: bool | None = None) -> Value:
        """Return a parameter or an input whose memory is counted elsewhere."""
        if self.frozen if frozen is None else frozen:
            return Value(Storage(Meter(), 0.0), elements, self.width)
        node = Node(next(self._numbers), (), None)
        if self._inner_leaves is not None:
            self._inner_leaves.append(node)
        return Value(Storage(Meter(), 0.0), elements, self.width, node)

    def backward(self, node: Node, gradient: Value) -> None:
        """Run the backward pass from `node` to the leaves. If a value has several gradients, they are added in new
        memory."""
        self._in_backward = True
        arrived = {node: gradient}
        del gradient
        waiting = [node]
        while waiting:
            node = heapq.heappop(waiting)
            gradient = arrived.pop(node)
            if node.backward is None:
                node.gradient = gradient if node.gradient is None else self.new(gradient.elements)
                continue
            for source, part in zip(node.inputs, self._run(node, gradient), strict=True):
                if source is not None and part is not None:
                    if source not in arrived:
                        heapq.heappush(waiting, source)
                    arrived[source] = self._meet(source, arrived.get(source), part)
            del gradient
            part = None

    def _meet(self, source: Node, first: Value | None, second: Value) -> Value:
        if first is None:
            return second
        if self.fuses:  # the sum is computed in place
            return first
        if source.has_views:
            both = JoinedStorage(self.meter, first.storage, second.storage)
            return Value(both, first.elements + second.elements, second.width)
        self.move(3 * second.size)
        return self.new(second.elements, second.width)

    def move(self, *kernels: float) -> None:
        """Count kernels that read and write this many bytes."""
        self.kernels[self._in_backward].extend(kernels)

    def _run(self, node: Node, gradient: Value) -> Sequence[Value | None]:
        assert node.backward is not None
        gradients = node.backward(gradient)
        node.backward = None
        return gradients

    # Other parameter events

    def mark(self, then: Event | None = None) -> None:
        """End the current stretch and start the next one."""
        self.stretches.append(Stretch(self.meter.peak, self.meter.live, then))
        self.meter.peak = self.meter.live

    def enter(self, x: Value) -> Value:
        """Enter the separately sharded part. Its gradients leave the tape after its backward pass."""
        self.mark("gather")
        leaves: list[Node] = []
        self._inner_leaves = leaves

        def backward(gradient: Value) -> Sequence[Value | None]:
            for leaf in leaves:
                leaf.gradient = None
            self.mark("reduce")
            return (gradient,)

        return self._recorded(x, (x,), backward)

    def leave(self, y: Value) -> Value:
        self.mark("free")
        self._inner_leaves = None

        def backward(gradient: Value) -> Sequence[Value | None]:
            self.mark("gather_again")
            return (gradient,)

        return self._recorded(y, (y,), backward)

    # Operations

    def apply(
        self,
        inputs: Sequence[Value],
        elements: float,
        *,
        saved: Sequence[Value] = (),
        saves_output: bool = False,
        width: float | None = None,
        scratch: tuple[float, float] = (0.0, 0.0),
        costly: bool = False,
        kernels: tuple[Kernels, Kernels] | None = None,
    ) -> Value:
        """Record a new value computed from `inputs`, with a new gradient for each input in the backward pass.
        `scratch`: additional bytes that are live during the forward and backward passes, respectively. `kernels`:
        those of the forward and backward passes. By default, there is one for the result and one for each gradient,
        which also reads what was saved; a costly operation (a product or attention) has none."""
        out_bytes = elements * (self.width if width is None else width)
        if kernels is None and not costly:
            read = out_bytes + sum(value.read_bytes for value in saved) + saves_output * out_bytes
            kernels = (
                [out_bytes + sum(value.read_bytes for value in inputs)],
                [read + value.size for value in inputs if value.node],
            )
        forward, in_backward = kernels or ((), ())
        self.move(*forward)
        if not any(value.node for value in inputs):
            return self._result(elements, width, scratch[0], costly, stopped=self.saves >= self.saves_left)
        if self.fuses and self.recomputes and self.recalls and not costly:
            return self._made_late(inputs, elements, saved, saves_output, width, scratch)
        held = [value.storage for value in saved] if self.is_saving else []
        self.saves += len(saved) + saves_output
        stopped = self.saves > self.saves_left or (self.saves == self.saves_left and not saves_output)
        out = self._result(elements, width, 0.0 if stopped else scratch[0], costly, stopped)
        if saves_output and self.is_saving:
            held.append(out.storage)
        sizes = [(value.elements, value.width) if value.node else None for value in inputs]
        deferred = [value for value in saved if self.recalls and isinstance(value.storage, JoinedStorage)]
        late_bytes = sum(value.elements * value.width for value in deferred)

        def backward(_gradient: Value, held: object = held) -> Sequence[Value | None]:
            self.move(*in_backward)
            room = Storage(self.meter, scratch[1] + late_bytes)
            gradients = [self.new(*size) if size else None for size in sizes]
            del room
            return gradients

        return self._recorded(out, inputs, backward)

    def _result(self, elements: float, width: float | None, scratch: float, costly: bool, stopped: bool) -> Value:
        width = self.width if width is None else width
        if stopped:
            return Value(Storage(Meter(), 0.0), elements, width)
        if costly and self.recalled:
            return Value(self.recalled.popleft(), elements, width)
        room = Storage(self.meter, scratch)
        out = self.new(elements, width)
        del room
        if costly and self.kept is not None:
            self.kept.append(out.storage)
        return out

    def keep(self, size: float) -> None:
        """Record the result of a costly operation that is part of a larger recorded operation."""
        if self.recalled:
            self.recalled.popleft()
        elif self.kept is not None:
            self.kept.append(Storage(self.meter, size))

    def _recorded(self, out: Value, inputs: Sequence[Value], backward: Backward) -> Value:
        if not any(value.node for value in inputs):
            return out
        node = Node(next(self._numbers), [value.node for value in inputs], backward)
        return Value(out.storage, out.elements, out.width, node)

    def linear(self, x: Value, weight: Value, elements: float, *, delays: bool = True) -> Value:
        """Record a linear layer. It saves its input for the weight gradient, which belongs to FSDP2. If the weight is
        frozen, it saves only the weight. `delays`: whether the weight gradient may be computed later (`turns`)."""
        x = self.materialise(x)
        scratch = casts_to_fp8(x.elements, weight.elements, elements, self.width) if self.fp8 else (0.0, 0.0)
        out = self.apply((x, weight), elements, saved=(x if weight.node else weight,), costly=True, scratch=scratch)
        if delays and self.turns and x.node and weight.node and out.node:
            self._delay(out.node, x, weight)
        if self.put_off is None or out.node is None or not self.is_saving:
            return out
        put_off, inner = self.put_off, x.elements

        def backward(gradient: Value, held: Storage = x.storage) -> Sequence[Value | None]:
            put_off.append((held, gradient.storage))
            return self.new(inner), None

        out.node.backward = backward
        return out

    def _delay(self, node: Node, x: Value, weight: Value) -> None:
        """Compute a linear layer's weight gradient in a separate node, which keeps the layer's input."""
        turn = self.turns.pop() if len(self.turns) > 1 else self.turns[0]
        inner = x.elements, x.width
        matrix = weight.elements, weight.width
        held = [x.storage] if self.is_saving else []
        needed: list[Storage] = []

        def multiply(_gradient: Value) -> Sequence[Value | None]:
            product = self.new(*matrix)
            needed.clear()
            return (product,)

        def backward(gradient: Value) -> Sequence[Value | None]:
            needed.extend(held)
            held.clear()
            return self.new(*inner), gradient

        node.backward = backward
        node.inputs = [x.node, Node(turn, (weight.node,), multiply)]

    def cross(
        self,
        x: Value,
        elements: float,
        scratch: float,
        start: Callable[[Value], tuple[Value, Storage]],
        finish: Backward,
    ) -> tuple[Value, float]:
        """Record an exchange whose result has `elements` elements, using `scratch` temporary bytes. `start`: begins the
        exchange of a gradient in the backward pass, and returns its result and what it sends. `finish`: ends that
        exchange. Return (the result, the position in the backward pass for work that runs between the two)."""
        sent: list[Storage] = []

        def end(gradient: Value) -> Sequence[Value | None]:
            sent.clear()
            return finish(gradient)

        def begin(gradient: Value) -> Sequence[Value | None]:
            result, kept = start(gradient)
            sent.append(kept)
            return (result,)

        x = self._recorded(x, (x,), end)
        turn = next(self._numbers)
        if self.fuses and self.recomputes and self.recalls:
            out = Value(JoinedStorage(self.meter, x.storage), elements, x.width)
        elif elements == x.elements:
            out = x
        else:
            out = self._result(elements, x.width, scratch, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (x,), begin), turn

    def dequantised_linear(self, x: Value, weights: float, elements: float) -> Value:
        """Multiply by a frozen matrix that is dequantised in the forward pass and again in the backward pass."""
        whole = weights * self.width
        scales = PRECISE * weights / NF4_BLOCK
        peak = whole + scales + min(weights, NF4_CHUNK) * (PRECISE + NF4_INDEX)
        if self.saves < self.saves_left:
            self._pass(peak)
        out = self.apply((x,), elements, saved=(self.leaf(weights),), costly=True, scratch=(whole, whole))
        if out.node is None or out.node.backward is None:
            return out
        multiply = out.node.backward

        def backward(gradient: Value) -> Sequence[Value | None]:
            self._pass(peak)
            return multiply(gradient)

        out.node.backward = backward
        return out

    def merge(self, weights: float, *, dequantises: bool) -> None:
        """Allocate a matrix with its adapter merged in, which a forward pass frees again."""
        if self.saves < self.saves_left:
            whole = weights * self.width
            dequantised = whole + PRECISE * weights / NF4_BLOCK + min(weights, NF4_CHUNK) * (PRECISE + NF4_INDEX)
            self._pass(max(2 * whole, dequantised) if dequantises else whole)

    def _pass(self, size: float) -> None:
        """Allocate this number of bytes and free them immediately."""
        self.meter.grow(size)
        self.meter.grow(-size)

    def norm(self, x: Value, weight: Value, rows: float) -> Value:
        """Record a norm computed by one kernel, which saves its input and one number per row."""
        kernels = ((2 * x.size,), (3 * x.size,))
        return self.apply((x, weight), x.elements, saved=(x, self.new(rows, 4.0)), kernels=kernels)

    def unary(self, x: Value, kernels: tuple[Kernels, Kernels] | None = None) -> Value:
        if self.fuses:
            return self._deferred(x)
        return self.apply((x,), x.elements, saved=(x,), width=x.width, kernels=kernels)

    def mul(self, left: Value, right: Value) -> Value:
        if self.fuses:
            return self._fused_product(left, right)
        sides = left.read_bytes, right.read_bytes
        # The gradient of each side is the product with the other one.
        in_backward = [
            2 * left.size + other for value, other in zip((left, right), sides[::-1], strict=True) if value.node
        ]
        kernels = ((left.size + sum(sides),), in_backward)
        return self.apply((left, right), left.elements, saved=(left, right), width=left.width, kernels=kernels)

    def add(self, left: Value, right: Value) -> Value:
        if self.fuses:
            return self._deferred(left, right)
        self.move(left.size + left.read_bytes + right.read_bytes)
        out = self._result(left.elements, left.width, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (left, right), lambda gradient: (gradient, gradient))

    # Fusion by a compiler

    def _made_late(
        self,
        inputs: Sequence[Value],
        elements: float,
        saved: Sequence[Value],
        saves_output: bool,
        width: float | None,
        scratch: tuple[float, float],
    ) -> Value:
        """Return the result of a cheap operation, which is not stored but recomputed when the backward pass reads
        it."""
        self.saves += len(saved) + saves_output
        held = JoinedStorage(self.meter, *(value.storage for value in (*inputs, *saved)))
        sizes = [(value.elements, value.width) if value.node else None for value in inputs]

        def backward(_gradient: Value, held: object = held) -> Sequence[Value | None]:
            room = Storage(self.meter, scratch[1])
            gradients = [self.new(*size) if size else None for size in sizes]
            del room
            return gradients

        out = Value(held, elements, self.width if width is None else width)
        return self._recorded(out, inputs, backward)

    def _deferred(self, *inputs: Value) -> Value:
        """Return the result of a fused element-wise operation: its readers keep the inputs and compute it again.

        In the backward pass, the gradients of the inputs reuse the memory of the incoming one."""
        held, count = JoinedStorage(self.meter, *(value.storage for value in inputs)), len(inputs)
        out = Value(held, inputs[0].elements, inputs[0].width)
        return self._recorded(out, inputs, lambda gradient: (gradient,) * count)

    def _fused_product(self, left: Value, right: Value) -> Value:
        """Record a fused product. In the backward pass, the gradient of `left` reuses the memory of the incoming one.

        In a backward pass that recomputes the forward pass, one kernel computes both gradients and the product (which
        is needed for the weights' gradient). Their memory is therefore live together with everything that the kernel
        reads.
        """
        saved, again = ((left, right) if self.is_saving else ()), self.recomputes
        if again:
            self.saves += 2
            out = self._deferred(left, right)
        else:
            out = self.apply((left, right), left.elements, saved=saved, width=left.width)
        size, room_bytes = (right.elements, right.width), 2 * left.elements * left.width * again
        if out.node is not None:
            storages = [value.storage for value in saved]

            def backward(gradient: Value, held: object = storages) -> Sequence[Value | None]:
                room = Storage(self.meter, room_bytes)
                second = self.new(*size)
                del room
                return gradient, second

            out.node.backward = backward
        return out

    def materialise(self, x: Value) -> Value:
        """Materialise a deferred value for a reader that is not element-wise."""
        if self.recomputes or not isinstance(x.storage, JoinedStorage):
            return x
        out = self._result(x.elements, x.width, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (x,), lambda gradient: (gradient,))

    def copy(
        self,
        x: Value,
        elements: float | None = None,
        scratch: tuple[float, float] = (0.0, 0.0),
        kernels: tuple[Kernels, Kernels] | None = None,
    ) -> Value:
        """Record a new value, possibly of a different size, as a collective does. Nothing is saved."""
        size = x.elements if elements is None else elements
        return self.apply((x,), size, width=x.width, scratch=scratch, kernels=kernels)

    def cast(self, x: Value, width: float) -> Value:
        return x if x.width == width else self.apply((x,), x.elements, width=width)

    def split(self, x: Value, *sizes: float) -> list[Value]:
        """Return views of parts of `x`; in the backward pass, their gradients are copied into one tensor."""
        size, read_bytes = (x.elements, x.width), x.size  # the gradient must not keep `x` itself
        node = Node(next(self._numbers), (x.node,), lambda _: (self._moved(read_bytes, *size),), has_views=True)
        passing: Backward = lambda gradient: (gradient,)  # noqa: E731
        return [Value(x.storage, size, x.width, Node(next(self._numbers), (node,), passing)) for size in sizes]

    def part(self, x: Value, elements: float) -> Value:
        """Return a view of part of `x`; in the backward pass, its gradient is copied into a zero tensor."""
        size = x.elements, x.width
        return self._view(x, elements, lambda gradient: (self._moved(gradient.size, *size),))

    def expand(self, x: Value, elements: float, width: float | None = None) -> Value:
        """Return a view that repeats `x` (possibly with a different width); the backward pass is a sum."""
        size = x.elements, x.width
        return self._view(x, elements, lambda gradient: (self._moved(gradient.size, *size),), width)

    def cat(self, *parts: Value) -> Value:
        """Concatenate by copying; in the backward pass, the gradients are views of the incoming one."""
        width, sizes = parts[0].width, [part.elements for part in parts]
        self.move(sum(part.read_bytes for part in parts) + sum(sizes) * width)
        out = self._result(sum(sizes), width, 0.0, costly=False, stopped=self.saves >= self.saves_left)

        def backward(gradient: Value) -> Sequence[Value | None]:
            return [Value(gradient.storage, size, width) for size in sizes]

        return self._recorded(out, parts, backward)

    def with_side(self, x: Value, loss: Value) -> Value:
        """Return `x`; the backward pass also starts from the scalar `loss`."""
        return self._recorded(x, (x, loss), lambda gradient: (gradient, self.new(1, 4.0)))

    def negated(self, x: Value) -> Value:
        """Negate the right side of a difference; only its gradient needs memory."""
        width = x.width
        return self._view(x, x.elements, lambda gradient: (self._moved(gradient.size, gradient.elements, width),))

    def _view(self, x: Value, elements: float, backward: Backward, width: float | None = None) -> Value:
        width = x.width if width is None else width
        node = Node(next(self._numbers), (x.node,), backward) if x.node else None
        return Value(x.storage, elements, width, node)

    def _moved(self, read_bytes: float, elements: float, width: float) -> Value:
        """Return a new value that a kernel writes after reading this many bytes."""
        self.move(read_bytes + elements * width)
        return self.new(elements, width)

    def summed(self, x: Value) -> Value:
        """Return `x`, to which a product adds a bias; the bias's gradient is a sum."""

        def backward(gradient: Value) -> Sequence[Value | None]:
            self.move(gradient.size)
            return (gradient,)

        return self._recorded(x, (x,), backward)

    def copy_in_backward(self, x: Value) -> Value:
        return self._recorded(
            x, (x,), lambda gradient: (self._moved(gradient.size, gradient.elements, gradient.width),)
        )

    def copy_in_forward(self, x: Value) -> Value:
        self.move(x.size + x.read_bytes)
        out = self._result(x.elements, x.width, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (x,), lambda gradient: (gradient,))


def casts_to_fp8(x: float, weight: float, out: float, width: float) -> tuple[float, float]:
    """Return the temporary bytes of torchao's eager casts, as (forward, backward), for a matmul with these element
    counts.

    A cast holds the scaled tensor in fp32, the clamped one and the result: 9 bytes per element, 1 of which remains."""
    held = 2 * out + weight + x * width
    backward = (9 * out, out + 9 * weight, held + 8 * out, held + 9 * x)
    return max(9 * x, x + 9 * weight), max(backward)
