"""A layer's forward and backward on a tape, with the operations and the lifetimes of the engine's own blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from trainspec_cli.plan.memory.engine.attention import attention, latent_attention
from trainspec_cli.plan.memory.engine.experts import mixture
from trainspec_cli.plan.memory.engine.parts import Part, Shape, feed_forward, norm, region
from trainspec_cli.plan.memory.engine.ssm import mamba
from trainspec_cli.plan.memory.engine.tape import Stretch, Tape, Value
from trainspec_cli.recipe.keys.model_parts import Mixer
from trainspec_cli.recipe.keys.run import Recompute


@dataclass(frozen=True)
class BlockProfile:
    """Bytes; what comes in is counted where it was made, what goes out here."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    """The backward's stretches, with the gradients of the output, which takes its place, and of the parameters."""
    put_off: float
    """Kept from a backward of inputs until that of weights, where schedules split them."""

    @property
    def kept(self) -> float:
        """Bytes kept from forward to backward, the output included."""
        return self.forward[-1].live


def profile(tape: Tape, block: Callable[[], Value], recompute: Recompute) -> BlockProfile:
    """`block` writes itself down on `tape`, which is new."""
    tape.is_saving = recompute == "none"
    tape.kept = [] if recompute == "selective" else None
    out = block()
    if tape.fuses and tape.kept:  # a compiler sees that no backward needs the block's last product
        tape.kept.pop()
    tape.mark()
    forward, tape.stretches, saves = tuple(tape.stretches), [], tape.saves
    arriving, node = [tape.new(out.elements)], out.node
    del out
    tape.meter.peak = tape.meter.live
    if recompute != "none":
        tape.is_saving, tape.saves, tape.saves_left = True, 0, saves
        tape.recomputes, tape.recalls = True, recompute == "selective"
        tape.recalled, tape.kept = deque(tape.kept or ()), None
        node = block().node
    assert node is not None
    tape.backward(node, arriving.pop())  # nothing else holds it
    tape.mark()
    put_off = {id(storage): storage.size for pair in tape.put_off or () for storage in pair}
    return BlockProfile(forward, tuple(tape.stretches), sum(put_off.values()))


@lru_cache(maxsize=1024)
def profile_block(shape: Shape, recompute: Recompute, split: bool) -> BlockProfile:
    """Profile one layer, forward and backward. `split`: gradients of weights come later."""
    tape = Tape(shape.width, fp8=shape.fp8, frozen=shape.lora.rank > 0, fuses=shape.compiled)
    tape.put_off = [] if split else None
    source = tape.leaf(shape.outside_tokens * shape.hidden, frozen=False)
    return profile(tape, lambda: block(tape, source, shape), recompute)


def block(tape: Tape, x: Value, shape: Shape) -> Value:
    """Record a block; the output of each mixer lives until the block ends."""
    given = []
    for mixer in shape.layer.mixers:
        given.append(MIXERS[mixer](tape, norm(tape, x, shape), shape))
        x = tape.add(x, with_bias(tape, given[-1], mixer, shape))
    return tape.settle(x)


def with_bias(tape: Tape, mixed: Value, mixer: Mixer, shape: Shape) -> Value:
    """Add the bias of attention's output, which is added outside of its region."""
    return tape.copy_in_forward(mixed) if mixer == "attention" and shape.decoder.attention_bias == "all" else mixed


MIXERS: dict[Mixer, Part] = {
    "attention": partial(region, part=attention),
    "latent": partial(region, part=latent_attention),
    "feed_forward": partial(region, part=feed_forward),
    "experts": mixture,
    "mamba": partial(region, part=mamba),
}
