"""Reverse-mode differentiation of sizes: what a block allocates, saves and frees, forward and backward.

A `Value` stands for a tensor and a `Storage` for its memory, which is live as long as something holds it, as in the
engine: a local variable, a saved input of a node, a gradient on its way. So a block written down here with the
operations of the engine's block has the same peaks. Sizes are bytes; elements carry their width.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count


class Meter:
    """Bytes live now, and the most there were."""

    def __init__(self) -> None:
        self.live = self.peak = 0.0

    def grow(self, size: float) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


class Storage:
    """Memory that is freed when the last that holds it lets go."""

    __slots__ = ("_meter", "size")

    def __init__(self, meter: Meter, size: float):
        self._meter, self.size = meter, size
        meter.grow(size)

    def __del__(self) -> None:
        self._meter.live -= self.size


Backward = Callable[["Value"], Sequence["Value | None"]]
"""The gradient of an operation's output -> those of its inputs; None where an input needs none."""


class Node:
    """An operation that was recorded, or (without inputs) a leaf, which adds up its gradient."""

    def __init__(self, number: int, inputs: Sequence[Node | None], backward: Backward | None):
        self.number, self.inputs, self.backward = number, inputs, backward
        self.gradient: Value | None = None

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number  # the latest first


class Value:
    """`elements` of `width` bytes each in a storage; `node` made it, where it needs a gradient."""

    __slots__ = ("elements", "node", "storage", "width")

    def __init__(self, storage: Storage, elements: float, width: float, node: Node | None = None):
        self.storage, self.elements, self.width, self.node = storage, elements, width, node


class Tape:
    """Records operations on values of `width` bytes an element."""

    def __init__(self, width: float, *, fp8: bool = False):
        self.width, self.meter, self.fp8 = width, Meter(), fp8
        self.is_saving = True
        """False: nothing is saved for a backward, as in a forward that will be done again."""
        self.kept: list[Storage] | None = None
        """Where results of costly operations are kept, for a selective recomputation; None: nowhere."""
        self.recalled: deque[Storage] = deque()
        """Such results, which the second forward takes instead of making them."""
        self.put_off: list[tuple[Storage, Storage]] | None = None
        """What the weights' gradients need, where they are computed later; None: at once."""
        self.saves_left = float("inf")
        """After so many saves the second forward ends: nothing more is allocated."""
        self.saves = 0
        self.apart: set[Node] = set()
        """Leaves whose gradients are taken away as soon as all of them are there."""
        self.taken: tuple[float, float] = (0.0, 0.0)
        """The peak until then, and what lived after it."""
        self._numbers = count()

    def new(self, elements: float, width: float | None = None) -> Value:
        width = self.width if width is None else width
        return Value(Storage(self.meter, elements * width), elements, width)

    def leaf(self, elements: float) -> Value:
        """A parameter, or what comes in: its own memory is counted elsewhere."""
        return Value(Storage(Meter(), 0.0), elements, self.width, Node(next(self._numbers), (), None))

    def leaf_apart(self, elements: float) -> Value:
        leaf = self.leaf(elements)
        assert leaf.node is not None
        self.apart.add(leaf.node)
        return leaf

    def _take_apart(self) -> None:
        for node in self.apart:
            node.gradient = None
        self.taken = (self.meter.peak, self.meter.live)
        self.meter.peak = self.meter.live

    def backward(self, node: Node, gradient: Value) -> None:
        """From `node` to the leaves. Gradients that meet are added into new memory."""
        arrived = {node: gradient}
        del gradient
        waiting = [node]
        while waiting:
            node = heapq.heappop(waiting)
            gradient = arrived.pop(node)
            if node.backward is None:
                node.gradient = gradient if node.gradient is None else self.new(gradient.elements)
                del gradient
                if node in self.apart and all(leaf.gradient for leaf in self.apart):
                    self._take_apart()
                continue
            for source, part in zip(node.inputs, self._run(node, gradient), strict=True):
                if source is not None and part is not None:
                    if source not in arrived:
                        heapq.heappush(waiting, source)
                    arrived[source] = self.new(part.elements, part.width) if source in arrived else part
            del gradient
            part = None

    def _run(self, node: Node, gradient: Value) -> Sequence[Value | None]:
        assert node.backward is not None
        gradients = node.backward(gradient)
        node.backward = None
        return gradients

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
    ) -> Value:
        """A new value from `inputs`, and in the backward a new gradient for each; `scratch` bytes are live besides
        while the forward and the backward run."""
        held = [value.storage for value in saved] if self.is_saving else []
        self.saves += len(saved) + saves_output
        stopped = self.saves > self.saves_left or (self.saves == self.saves_left and not saves_output)
        out = self._result(elements, width, 0.0 if stopped else scratch[0], costly, stopped)
        if saves_output and self.is_saving:
            held.append(out.storage)
        sizes = [(value.elements, value.width) if value.node else None for value in inputs]

        def backward(_gradient: Value, held: object = held) -> Sequence[Value | None]:
            room = Storage(self.meter, scratch[1])
            gradients = [self.new(*size) if size else None for size in sizes]
            del room
            return gradients

        return self._recorded(out, inputs, backward)

    def _result(self, elements: float, width: float | None, scratch: float, costly: bool, stopped: bool) -> Value:
        width = self.width if width is None else width
        if stopped:  # before a costly result would be recalled, which so lives on
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
        """Results of costly operations within one that is recorded as a whole."""
        if self.recalled:
            self.recalled.popleft()
        elif self.kept is not None:
            self.kept.append(Storage(self.meter, size))

    def _recorded(self, out: Value, inputs: Sequence[Value], backward: Backward) -> Value:
        node = Node(next(self._numbers), [value.node for value in inputs], backward)
        return Value(out.storage, out.elements, out.width, node)

    def linear(self, x: Value, weight: Value, elements: float) -> Value:
        """Saves its input; the weight is FSDP2's."""
        scratch = casts_to_fp8(x.elements, weight.elements, elements, self.width) if self.fp8 else (0.0, 0.0)
        out = self.apply((x, weight), elements, saved=(x,), costly=True, scratch=scratch)
        if self.put_off is None or out.node is None:
            return out
        put_off, inner = self.put_off, x.elements

        def backward(gradient: Value, held: Storage = x.storage) -> Sequence[Value | None]:
            put_off.append((held, gradient.storage))
            return self.new(inner), None

        out.node.backward = backward
        return out

    def product(self, x: Value, weight: Value, elements: float) -> Value:
        """A matrix product that is no linear layer: in the compute format, its weight's gradient at once."""
        return self.apply((x, weight), elements, saved=(x,), costly=True)

    def norm(self, x: Value, weight: Value, rows: float) -> Value:
        """In one kernel: saves its input and a number a row."""
        return self.apply((x, weight), x.elements, saved=(x, self.new(rows, 4.0)))

    def unary(self, x: Value) -> Value:
        return self.apply((x,), x.elements, saved=(x,), width=x.width)

    def mul(self, left: Value, right: Value) -> Value:
        return self.apply((left, right), left.elements, saved=(left, right))

    def mul_leaf(self, x: Value, weight: Value) -> Value:
        """By a small parameter; its gradient is summed from a product as large as `x`."""
        return self.apply((x, weight), x.elements, saved=(x,), width=x.width, scratch=(0.0, x.elements * x.width))

    def einsum(self, left: Value, right: Value, elements: float, *, copies: bool, width: float | None = None) -> Value:
        """A batched matrix product. `copies`: its operands have to be put in order first, and the copies are saved."""
        if copies:
            left, right = self.copy(left), self.copy(right)
        return self.apply((left, right), elements, saved=(left, right), width=width, costly=True)

    def add(self, left: Value, right: Value) -> Value:
        out = self._result(left.elements, None, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (left, right), lambda gradient: (gradient, gradient))

    def copy(self, x: Value, elements: float | None = None, scratch: tuple[float, float] = (0.0, 0.0)) -> Value:
        """Another of perhaps another size, as collectives make; saves nothing."""
        return self.apply((x,), x.elements if elements is None else elements, width=x.width, scratch=scratch)

    def view(self, x: Value, elements: float) -> Value:
        """A part of `x`; its gradient stands in zeros of the whole."""
        whole = x.elements
        node = self._recorded(x, (x,), lambda _gradient: (self.new(whole),)).node
        return Value(x.storage, elements, x.width, node)

    def halves(self, x: Value) -> tuple[Value, Value]:
        """Views; their gradients wait for one another and are put together."""
        half, width = x.elements / 2, x.width  # not x itself, which would live on

        def backward(_gradient: Value) -> Sequence[Value | None]:
            room = Storage(self.meter, half * width)
            whole = self.new(2 * half)
            del room
            return (whole,)

        node = self._recorded(x, (x,), backward).node
        return Value(x.storage, half, x.width, node), Value(x.storage, half, x.width, node)

    def join(self, first: Value, second: Value) -> Value:
        return self.apply((first, second), first.elements + second.elements)

    def copy_as(self, x: Value, width: float) -> Value:
        """In another format, where it is another."""
        return x if width == x.width else self.apply((x,), x.elements, width=width)

    def copy_with_bias(self, x: Value, bias: Value) -> Value:
        out = self._result(x.elements, x.width, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (x, bias), lambda gradient: (gradient, self.new(bias.elements)))

    def copy_in_backward(self, x: Value) -> Value:
        return self._recorded(x, (x,), lambda gradient: (self.new(gradient.elements),))

    def copy_in_forward(self, x: Value) -> Value:
        out = self._result(x.elements, None, 0.0, costly=False, stopped=self.saves >= self.saves_left)
        return self._recorded(out, (x,), lambda gradient: (gradient,))


def casts_to_fp8(x: float, weight: float, out: float, width: float) -> tuple[float, float]:
    """Elements of a product -> bytes that torchao's eager casts take besides, (forward, backward).

    A cast holds the scaled tensor in fp32, that clamped, and the result: 9 bytes an element, of which one stays.
    """
    held = 2 * out + weight + x * width
    backward = (9 * out, out + 9 * weight, held + 8 * out, held + 9 * x)
    return max(9 * x, x + 9 * weight), max(backward)
